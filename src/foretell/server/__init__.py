"""The server: OpenAI's API over a ``Service``. It needs the extra ``serve``: ``pip install "foretell[serve]"``."""
