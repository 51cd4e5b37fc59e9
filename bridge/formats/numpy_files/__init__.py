"""numpy's `.npz` and `.npy`."""
