"""Causal depthwise convolution over the sequence: `native.py` defines it."""
