"""All C code: sources, their build, and the Python bindings, each with a torch twin of the same result."""
