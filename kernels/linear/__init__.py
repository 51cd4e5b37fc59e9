"""x @ weight.T + bias: `native.py` defines it, `onednn.py` computes float32 faster on CPUs where MKL is slow."""
