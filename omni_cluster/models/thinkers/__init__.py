"""What thinkers of several families share over the classes that vLLM offers to models."""
