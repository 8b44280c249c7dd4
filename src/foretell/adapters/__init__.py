"""Doors into other programs: evaluation harnesses and generation loops that call the engine. Each is imported by name."""
