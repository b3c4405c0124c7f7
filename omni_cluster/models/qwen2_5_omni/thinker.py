"""The thinker's conditioning rows."""

ROWS = "hidden+embedding"
"""What the talker takes of each position: the last hidden state plus the token's embedding."""
