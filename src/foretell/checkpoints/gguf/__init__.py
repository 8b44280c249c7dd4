"""GGUF files as models: their header, configuration, tokenizer and tensors."""
