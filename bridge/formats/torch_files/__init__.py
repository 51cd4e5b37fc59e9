"""Torch's own formats: pickles, read without running them, and torch.distributed.checkpoint."""
