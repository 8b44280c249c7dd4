"""A checkpoint's tensors as the decoders want them: named, split, quantised."""
