"""Orbax checkpoints, through tensorstore."""
