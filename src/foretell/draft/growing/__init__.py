"""From a shape and a model's logits to a tree of guesses."""
