"""What the trained methods share: head, layers, files and their keys, training targets."""
