"""Floor 7: answers before they are asked for. What runs here, what guessing would bring, and why a head accepts little."""
