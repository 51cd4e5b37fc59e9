"""Attention of one query token over a cache: `native.py` defines it, the other files are faster implementations."""
