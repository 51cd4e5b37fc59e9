"""Which tensors a model has, and their names: on disk, in memory, and by HF Flax's convention."""
