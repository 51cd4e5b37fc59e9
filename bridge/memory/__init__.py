"""Trees of arrays in memory: numpy's, torch's and jax's, sharded ones included."""
