"""Layers: what models are made of. Each computes through an operation, so each runs on every platform."""
