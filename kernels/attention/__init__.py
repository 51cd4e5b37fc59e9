"""Attention: `native.py` defines it, the other files are faster implementations; the contract is in `contract.py`."""
