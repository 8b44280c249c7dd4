"""Floor 2: causal language models behind one interface. The only floor that imports transformers."""
