"""The random cases of scripts/fuzz_models.py for families other than decoders."""
