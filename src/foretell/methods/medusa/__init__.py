"""Medusa: heads on the last hidden state (2401.10774)."""
