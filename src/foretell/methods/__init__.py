"""Learned heads: small networks that read a target's hidden states. Weights, configurations and formats; no decoding.

A head is an ``nn.Module`` with a frozen ``config``. Each has one forward over whole texts (training) and one over the
nodes of a tree with a cache (decoding); tests check that they are equal.
"""
