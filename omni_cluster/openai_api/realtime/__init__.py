"""The Realtime protocol as OpenAI released it: its events, session and items."""
