"""A pretend accelerator: ``pretend.py``. What runs on it, and what a step costs there: ``counting.py``."""
