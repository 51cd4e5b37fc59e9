"""Naming schemes: which torch tensor is which leaf of the trees that other programs write."""
