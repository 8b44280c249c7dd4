"""One training ``Objective`` per method."""
