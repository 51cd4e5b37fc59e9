"""Lowerings of ATen's operations, one file per family; `registry` imports them all."""
