"""A linear layer of frozen 8 and 4 bit weights: `weight.py` quantizes, `native.py` defines the product."""
