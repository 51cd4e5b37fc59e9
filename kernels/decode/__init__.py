"""Attention of one query token over a cache: `native.py` defines it, the other files compute the same faster."""
