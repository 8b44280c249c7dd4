"""Drafters of a batch: rows with several, failures, and what waits until a drafter guesses again."""
