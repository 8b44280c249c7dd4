"""SpecDec++: an acceptance head that says when to stop guessing (2405.19715)."""
