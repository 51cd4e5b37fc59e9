"""A decoder layer's two halves for one token of each row: `native.py` defines them, `cpu.py` runs them in C++."""
