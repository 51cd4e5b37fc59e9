"""RMS norm: `native.py` defines it."""
