"""streamtrain: continuous training of sparse models from sample streams."""

__version__ = "0.1.0"
__distribution__ = "streamtrain"
