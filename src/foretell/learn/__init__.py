"""Drafters that learn from the traffic they serve (Online Speculative Decoding, 2310.07177), behind a gate."""

from foretell.learn.options import LearnOptions as LearnOptions
