"""The attention operations: `attention`, which selects one of the others for each call, and those others."""
