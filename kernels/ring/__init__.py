"""Attention over a sequence that is sharded across processes or devices: keys and values are passed around a ring."""
