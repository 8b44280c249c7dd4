"""The head that verifier ``judge`` reads."""
