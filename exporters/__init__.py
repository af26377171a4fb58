"""Published versions: deltas, log, Redis, replica."""

__distribution__ = "streamtrain"
