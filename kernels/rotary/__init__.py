"""Rotary position embedding: `native.py` defines it; its angles, with every scaling of them, are `frequencies.py`."""
