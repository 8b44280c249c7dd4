"""Answers held to a JSON schema, a regular expression, a grammar or a choice of texts."""
