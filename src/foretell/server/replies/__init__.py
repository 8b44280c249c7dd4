"""The server's answers, as the OpenAPI document describes them. The answers themselves are plain dicts, made in
``routes/chat.py``, ``routes/completions.py`` and ``server/usage.py``; the tests check each of them against these models."""
