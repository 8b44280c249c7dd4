"""Floor 7: the command line, a thin skin over the public API. Start reading at ``app.py``."""
