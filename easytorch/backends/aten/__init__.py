"""The backend `torch`: every operation on ATen, eagerly or through torch.compile."""
