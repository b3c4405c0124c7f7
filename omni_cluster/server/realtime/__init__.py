"""Realtime sessions: a conversation on a WebSocket."""
