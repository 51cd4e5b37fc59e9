"""Lowerings of ATen's operations, a file a family; `registry` imports them all."""
