"""Samples of every operation: data for the tests of this folder, which load the package by its path."""

from backend_samples import control, elementwise, indexing, movement, product, reduction
from backend_samples.make import Sample

SAMPLES: list[Sample] = [
    sample for module in (elementwise, movement, reduction, product, indexing, control) for sample in module.samples()
]
