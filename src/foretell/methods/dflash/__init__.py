"""DFlash: a block of guesses in one pass."""
