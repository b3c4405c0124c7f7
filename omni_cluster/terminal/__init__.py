"""A server's client on a terminal."""
