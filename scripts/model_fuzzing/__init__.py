"""What scripts/fuzz_models.py draws for families that are no decoders."""
