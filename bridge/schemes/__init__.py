"""Naming schemes: which torch tensor is which leaf of a tree that other programs write."""
