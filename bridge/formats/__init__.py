"""Checkpoint formats, one file each, behind the interface in `base` and found through `registry`."""
