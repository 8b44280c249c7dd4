"""A drafter and a verifier for foretoken, in a package of their own."""
