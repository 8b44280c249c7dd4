"""Training of drafters and of the small heads around them, and what can be said of a drafter before anyone times it."""
