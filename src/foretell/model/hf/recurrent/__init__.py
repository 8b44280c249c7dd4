"""Recurrent mixers of transformers models: their states in a cache, and how a rejected guess is taken back."""
