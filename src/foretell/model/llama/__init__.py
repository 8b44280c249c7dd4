"""One decoder of the Llama family, in PyTorch (``lean``) and in C (``native``)."""
