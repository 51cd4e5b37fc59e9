"""What the operations with a recurrent state share: documents in a sequence, products of decays, checks."""
