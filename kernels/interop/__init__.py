"""Between runtimes: jax functions inside torch_xla graphs, and compiling for a TPU that is not there."""
