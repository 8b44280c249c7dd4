"""Texts between a request and the engine: turns, tools, formats, thoughts, and the texts of tokens."""
