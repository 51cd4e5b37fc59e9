"""Attention over a paged key/value cache: `native.py` defines it; the arguments are described in `contract.py`."""
