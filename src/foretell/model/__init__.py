"""Floor 2: causal language models behind one interface.."""
