"""Training of drafters and of the small heads around them, and the evaluation of drafters without timing."""
