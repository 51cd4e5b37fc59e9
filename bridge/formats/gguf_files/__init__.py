"""GGUF, llama.cpp's format: tensors, config and tokenizer in one file."""
