"""Embedding tables: index, rows, admission, eviction, optimizers, save and load."""

__distribution__ = "streamtrain"
