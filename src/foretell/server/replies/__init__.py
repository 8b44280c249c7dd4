"""The server's answers, as the OpenAPI document describes them. The answers themselves are plain dicts, made in
``server/chat.py``, ``server/completions.py`` and ``server/usage.py``; the tests check every one of them against these
models."""
