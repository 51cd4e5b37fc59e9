"""Between runtimes: jax functions inside torch_xla graphs, and ahead-of-time compilation for TPUs and GPUs."""
