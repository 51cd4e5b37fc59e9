"""Attention over a sequence that is sharded across processes or devices: keys and values travel round a ring."""
