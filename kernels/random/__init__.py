"""Random numbers that are a function of a seed and a position, the same on every device and in every kernel."""
