"""Floor 5.5: the engine on its own thread, for a server's many callers. Start reading at ``service.py``."""
