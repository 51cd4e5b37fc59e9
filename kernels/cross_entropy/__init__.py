"""Softmax cross entropy, of logits and of a linear layer's hidden states: `native.py` defines both."""
