"""Floor 5: the decode loop. Start reading at ``step.py``."""
