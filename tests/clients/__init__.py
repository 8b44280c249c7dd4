"""Programs that use the server, unmodified: what they send."""
