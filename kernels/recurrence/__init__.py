"""Shared by the operations with a recurrent state: packed documents, products of decays, checks."""
