"""Attention that skips masked blocks: windows, chunks, prefixes, documents. `native.py` defines it."""
