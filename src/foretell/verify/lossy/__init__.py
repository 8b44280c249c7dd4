"""Lossy verifiers: the text may differ from the target's, and each says by how much."""
