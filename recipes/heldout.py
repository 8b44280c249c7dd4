"""Held-out text by category, the same for every model that is compared on it."""

from __future__ import annotations

import random
from pathlib import Path

from recipes.mix import chat_text, read_documents
from recipes.problems import problem
from recipes.questions import chats, copies


def heldout_texts(data: Path, *, bytes_per_category: int = 150_000) -> dict[str, list[str]]:
    """Texts by category, about `bytes_per_category` each: whole packages never seen, and new problem numbers.

    ``files_code`` and ``files_prose`` are unseen files of packages that the training text does hold: easier.
    """
    r = random.Random("heldout")
    packages = read_documents(data / "heldout_packages.jsonl")
    files = read_documents(data / "heldout_files.jsonl")
    r.shuffle(packages)
    r.shuffle(files)
    found: dict[str, list[str]] = {
        "code": [d.text for d in packages if d.category == "code"],
        "prose": [d.text for d in packages if d.category == "prose"],
        "questions": [chat_text(p) for d in packages for p in chats(r, d)],
        "copies": [chat_text(p) for _ in range(3) for d in packages for p in copies(r, d)],
        "problems": [chat_text(problem("heldout", i)) for i in range(bytes_per_category // 150)],
        "files_code": [d.text for d in files if d.category == "code"],
        "files_prose": [d.text for d in files if d.category == "prose"],
    }
    return {category: _cut(texts, bytes_per_category) for category, texts in found.items()}


def _cut(texts: list[str], limit: int) -> list[str]:
    """The first texts up to `limit` bytes; a single text counts for a fifth of it at most."""
    kept: list[str] = []
    left = limit
    for text in texts:
        text = text[: limit // 5]
        if left <= 0:
            break
        left -= len(text.encode())
        kept.append(text)
    return kept
