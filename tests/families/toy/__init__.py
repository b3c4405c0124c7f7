"""A family without vLLM: text, codes of two codebooks, and sound of them, all of it a function of the request."""
