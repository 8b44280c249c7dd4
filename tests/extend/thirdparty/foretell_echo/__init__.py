"""A drafter, a head and a verifier for foretell, in a package of their own."""
