"""A smaller model of the same vocabulary as drafter."""
