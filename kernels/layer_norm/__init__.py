"""Layer norm: `native.py` defines it; its Triton kernels also compute RMS norm."""
