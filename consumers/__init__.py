"""Sample streams: sources, decode, position."""

__distribution__ = "streamtrain"
