"""Unlimited prompts of four domains, without a network: for experiments in which the kind of requests changes."""

import inspect
import pkgutil
import random
import sys
from pathlib import Path

from recipes.problems import problem

from foretell import Engine
from foretell.engine.request.request import token_ids

DOMAINS = ("code", "mathematics", "prose", "copy")


def sources() -> list[str]:
    """Source files of the standard library, in a fixed order."""
    found = []
    for module in sorted(pkgutil.iter_modules(), key=lambda one: one.name):
        if module.name in sys.stdlib_module_names and not module.name.startswith("_"):
            path = getattr(module.module_finder, "path", "")
            file = Path(path) / f"{module.name}.py"
            if file.is_file() and file.stat().st_size > 4000:
                found.append(file.read_text(encoding="utf-8", errors="replace"))
    return found


def prompts(engine: Engine, domain: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of ``count`` prompts of a domain; of another seed, others."""
    r, made = random.Random(f"{domain}/{seed}"), list[list[int]]()
    files = sources() if domain != "mathematics" else []
    paragraphs = [part for text in files for part in _paragraphs(text)] if domain in ("prose", "copy") else []
    while len(made) < count:
        if domain == "mathematics":
            question = problem(f"online/{seed}", r.randrange(1 << 30)).question
            made.append(engine.chat_prompt([{"role": "user", "content": question}]))
        elif domain == "code":
            lines = r.choice(files).splitlines()
            begin = r.randrange(max(1, len(lines) - 30))
            made.append(token_ids("\n".join(lines[begin : begin + 12]), engine.tokenizer)[:96])
        elif domain == "prose":
            made.append(token_ids(r.choice(paragraphs), engine.tokenizer)[:48])
        elif domain == "copy":
            text = r.choice(paragraphs)[:400]
            made.append(engine.chat_prompt([{"role": "user", "content": f"Repeat this text exactly.\n{text}"}])[:192])
        else:
            raise SystemExit(f"domain {domain!r} is not one of {', '.join(DOMAINS)}")
    return made


def _paragraphs(source: str) -> list[str]:
    """Docstrings of a module, its first and those of its functions, as prose."""
    pieces = source.split('"""')[1::2]
    whole = [inspect.cleandoc(piece) for piece in pieces]
    return [text for text in whole if len(text) > 200 and ">>>" not in text]
