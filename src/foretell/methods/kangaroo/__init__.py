"""Kangaroo: the target's lower layers and an adapter (2404.18911); early exit without one."""
