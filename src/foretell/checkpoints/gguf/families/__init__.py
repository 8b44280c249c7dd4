"""Architectures of GGUF files: what each is made of, and what llama.cpp's converter changes."""
