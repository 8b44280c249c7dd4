"""Floor 2: causal language models behind one seam. The only floor that imports transformers."""
