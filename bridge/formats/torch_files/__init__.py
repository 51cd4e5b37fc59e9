"""What torch itself writes: pickles, read without running them, and torch.distributed.checkpoint."""
