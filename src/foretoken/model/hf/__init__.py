"""Models of ``transformers`` behind the seam ``Target``."""
