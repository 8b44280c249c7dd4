"""A drafter and a verifier for foretell, in a package of their own."""
