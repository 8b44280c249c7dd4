"""Draft models that guess other tokens than the target has: fewer of them, or those of another vocabulary."""
