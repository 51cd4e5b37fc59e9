"""Gated linear units: `native.py` defines them."""
