"""The selective scan of Mamba: `native.py` defines it."""
