"""Floor 4: the decode loop. Start reading at ``step.py``."""
