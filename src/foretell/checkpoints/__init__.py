"""Floor 1: what files say of a model: names and places, configurations, tensors, tokenizers and chat templates, of Hugging
Face directories and of GGUF files (``gguf``). Nothing here builds or runs a model.
"""
