"""Chat-form questions about a document: what a function does, write a function, which arguments, complete a sentence.

They are built from the document itself (functions with a docstring; headings with the paragraph below them), so they
belong to the same split as the document. Answers are the authors' own words.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

from recipes.corpus import Document
from recipes.problems import Problem, copy_task

MAX_ANSWER_CHARS = 700
HEADING = re.compile(r"(?:^|\n\n)([A-Z][^\n]{4,60})\n(?:[=\-~^\"*]{4,})\n\n((?:[A-Z`][^\n]*\n){2,8})\n")


def functions(text: str) -> Iterator[tuple[str, str, list[str], str]]:
    """(name, source, argument names, docstring) of the functions of a Python file that say what they do."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 25:
                source = lines[node.lineno - 1 : node.end_lineno]
                indent = len(source[0]) - len(source[0].lstrip())
                names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
                yield node.name, "\n".join(line[indent:] for line in source), names, doc


def about_function(r: random.Random, name: str, source: str, arguments: list[str], doc: str) -> Problem | None:
    """One question about one function."""
    summary = " ".join(doc.split("\n\n")[0].split())
    shape = r.randrange(4)
    if shape == 0 and len(source) < MAX_ANSWER_CHARS:
        ask = r.choice(
            [
                "Write a Python function named {n}. {s}",
                "Implement {n} in Python. {s}",
                "I need a function {n}({a}). {s}",
            ]
        )
        return Problem("write", ask.format(n=name, s=summary, a=", ".join(arguments)), f"```python\n{source}\n```")
    if shape == 1 and arguments:
        listed = "\n".join(f"{i}. {a}" for i, a in enumerate(arguments, 1))
        head = source.split("\n")[0]
        return Problem(
            "arguments",
            f"Which arguments does this function take?\n```python\n{head}\n```",
            f"{listed}\nAnswer: {len(arguments)}",
        )
    if shape == 2 and len(source) < 2 * MAX_ANSWER_CHARS and len(summary) < 300:
        ask = r.choice(
            [
                "What does this function do?",
                "Explain this code in one sentence.",
                "Write a docstring for this function.",
            ]
        )
        body = source.replace(doc, "...") if doc in source else source
        return Problem("explain", f"{ask}\n```python\n{body}\n```", summary)
    if len(summary) > 30:
        ask = r.choice(
            [
                "What does the function {n} do?",
                "What is {n} for?",
                "Describe {n}({a}).",
                "Tell me about the Python function {n}.",
            ]
        )
        return Problem(
            "describe",
            ask.format(n=name, a=", ".join(arguments)),
            " ".join(doc[:MAX_ANSWER_CHARS].split()) if len(doc) < MAX_ANSWER_CHARS else summary,
        )
    return None


def about_heading(r: random.Random, title: str, paragraph: str) -> Problem:
    """A question that a heading asks and the paragraph below it answers."""
    ask = r.choice(
        ["What should I know about: {t}?", "Explain: {t}", "Tell me about {t}.", "Can you say something about {t}?"]
    )
    return Problem("topic", ask.format(t=title.strip()), " ".join(paragraph.split()))


def excerpt(r: random.Random, text: str, low: int, high: int) -> str | None:
    """Some whole lines of a text, between `low` and `high` characters, starting where a block starts."""
    blocks = [m.end() for m in re.finditer(r"\n\n", text)] or [0]
    start = r.choice(blocks)
    part = ""
    limit = r.randint(low, high)
    for line in text[start : start + 2 * high].split("\n"):
        if len(part) + len(line) + 1 > limit:
            break
        part += line + "\n"
    part = part.strip("\n")
    return part if len(part) >= low else None


def chats(r: random.Random, document: Document, most: int = 3) -> list[Problem]:
    """A few questions about a document; empty where it offers nothing to ask."""
    found: list[Problem] = []
    if document.category == "code":
        candidates = list(functions(document.text))
        for name, source, arguments, doc in r.sample(candidates, min(most, len(candidates))):
            question = about_function(r, name, source, arguments, doc)
            if question is not None:
                found.append(question)
    else:
        headings = HEADING.findall(document.text)
        found += [about_heading(r, *h) for h in r.sample(headings, min(most, len(headings)))]
    return found


def copies(r: random.Random, document: Document) -> list[Problem]:
    """At most one copy task about a document."""
    text = excerpt(r, document.text, 120, 600)
    return [copy_task(r, text, document.category)] if text is not None and "```" not in text else []
