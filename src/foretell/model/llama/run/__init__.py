"""The decoders at work: in torch (``lean``) and in C (``native``), with their caches."""
