"""Attention: `native.py` defines it, the other files compute the same faster; the contract is in `contract.py`."""
