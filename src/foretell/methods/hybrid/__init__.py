"""Suffix decoding where its match is strong, another method where it is not."""
