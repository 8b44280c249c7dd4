"""Prompts where no file of them is given: questions that the target writes itself, and texts that are on this machine.

A chat model that is given its template up to the user's turn writes a question of the kind that it was tuned on (Magpie,
2406.08464): no data set is needed.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.core.journal import Journal
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine, Request
from foretell.engine.request.conversation import is_instruct
from foretell.model.identity import target_hash
from foretell.train import found

SYSTEMS = (
    "You are a helpful AI assistant.",
    "You are a helpful assistant who answers questions about science, history and geography.",
    "You are a Python programming assistant.",
    "You are a math tutor. The user asks a word problem.",
    "You are a creative writer who helps users with stories, poems and letters.",
    "You are an assistant for everyday life: cooking, travel, health, work.",
    "You give advice in a role that the user asks you to play.",
    "You extract facts from a text that the user gives.",
    "You are a careful teacher who explains how things work.",
    "You answer short questions of fact: who, what, where, when, how many.",
    "You play characters: pirates, scientists, famous people.",
)
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 128}
WORDS = (5, 90)  # of a question
TASKS = (
    "Summarize the following text in a few sentences:\n\n{}",
    "Rewrite the following text in simpler words:\n\n{}",
    "What is the main point of this text?\n\n{}",
    "Read this text and list what it says:\n\n{}",
    "Read this text.\n\n{}\n\nWrite three questions about it, with answers.",
)

CODE_TASKS = (
    "What does this code do?\n\n```python\n{}\n```",
    "Explain this code line by line:\n\n```python\n{}\n```",
    "Go on with this code:\n\n```python\n{}\n```",
    "Is there a mistake in this code?\n\n```python\n{}\n```",
)
OWN = 0.5
"""Share of a chat model's prompts that it is asked to write; those that are no questions are replaced by tasks."""


def make_prompts(
    engine: Engine,
    count: int,
    seed: int,
    journal: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """count prompts in random order, as files of prompts have them: a chat model's own questions and tasks about texts of
    this machine; for others beginnings of such texts. A function of the target, the seed, and the packages installed.

    journal: of the questions, which a killed run goes on with; progress: (questions written, asked). Raises OSError."""
    r = random.Random(f"own prompts/{seed}")
    chats = is_instruct(engine.tokenizer, engine.model.spec.eos_token_ids)
    asked = round(OWN * count) if chats else 0
    questions = own_questions(engine, asked, seed, journal, progress) if asked else []
    made = [_message(text) for text in questions] + found_prompts(r, count - len(questions), chats=chats)
    r.shuffle(made)
    return made


def found_prompts(r: random.Random, count: int, *, chats: bool) -> list[dict[str, Any]]:
    """The part of them that is made of texts of this machine. chats: whether as tasks, or as beginnings to go on with."""
    prose = found.passages(r, count // 2)
    code = list(found.code(r, count - len(prose)))
    if not chats:
        return [{"format": "text", "prompt": text[: r.randint(*found.CHARACTERS)]} for text in (*prose, *code)]
    tasks = [*(r.choice(TASKS).format(text) for text in prose), *(r.choice(CODE_TASKS).format(text) for text in code)]
    return [_message(text) for text in tasks]


def _message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def is_question(text: str) -> bool:
    """Whether a text that the model wrote as the user's turn is worth answering: English letters, no other turns."""
    plain = sum(c.isascii() for c in text) / max(1, len(text))
    return WORDS[0] <= len(text.split()) <= WORDS[1] and plain > 0.98 and "<|" not in text


def own_questions(
    engine: Engine,
    count: int,
    seed: int,
    journal: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Questions that the model writes itself, each once. Those cut off by the length are left out."""
    requests = []
    for index in range(count):
        messages = [{"role": "system", "content": SYSTEMS[index % len(SYSTEMS)]}, {"role": "user", "content": "?"}]
        text = engine.tokenizer.decode(engine.chat_prompt(messages)) if engine.tokenizer else ""
        before = text[: text.rindex("?")]
        requests.append(Request(before, SamplingParams(seed=seed + index, **SAMPLING)))
    with Journal(journal, {"target": target_hash(engine.model), "count": count, "seed": seed, **SAMPLING}) as kept:
        made = {record["index"]: record["text"] for record in kept.records}
        left = [index for index in range(count) if index not in made]
        for number, completion in engine.completions([requests[index] for index in left], batch_size=64):
            index = left[number]
            made[index] = completion.text.strip() if completion.finish_reason == "stop" else ""
            kept.append({"index": index, "text": made[index]})
            progress(len(made), count)
    return sorted({text for text in made.values() if is_question(text)})
