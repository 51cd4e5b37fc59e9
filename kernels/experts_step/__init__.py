"""The experts of few tokens, from the router's choice to the weighted sum, as one call: `native.py` defines it."""
