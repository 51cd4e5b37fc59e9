"""The state-space dual of Mamba-2: `native.py` defines it."""
