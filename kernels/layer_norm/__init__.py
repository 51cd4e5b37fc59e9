"""Layer norm: `native.py` defines it; the Triton kernels here are those of RMS norm too."""
