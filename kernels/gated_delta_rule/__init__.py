"""The gated delta rule of Gated DeltaNet: `native.py` defines it."""
