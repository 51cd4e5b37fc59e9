"""Multi-head latent attention: `native.py` defines it; the arguments are described in `contract.py`."""
