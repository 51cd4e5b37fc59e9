"""Forward passes in jax over HF Flax trees, one file an architecture: the other side that `convert --verify` runs.

They are the definitions, short and plain; models that are to be fast live elsewhere.
"""
