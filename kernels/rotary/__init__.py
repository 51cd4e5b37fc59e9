"""Rotary position embedding: `native.py` defines it."""
