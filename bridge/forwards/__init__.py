"""Forward passes in jax over HF Flax trees, one file per architecture, which `convert --verify` compares with torch's.

They are short, plain definitions, not optimized.
"""
