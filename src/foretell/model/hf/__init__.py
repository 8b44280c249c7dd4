"""Models of ``transformers``, unmodified: what all other implementations are compared with."""
