"""Prompts for the drafters of a chat model: most are written by the model itself, the rest made from code and problems.

A chat model that is given its template up to the user's turn writes a question of the kind that it was tuned on
(Magpie, 2406.08464): no data set is needed, and nothing of a suite can be in it. The rest are questions about Python's
standard library and generated problems, as in ``recipes.questions`` and ``recipes.problems``. Answers are made later,
by ``foretell train``. What was written is kept when the program is killed: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path

from foretell.core.journal import Journal
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine, Request
from foretell.train.found import clean
from foretell.train.own_prompts import TASKS, own_questions
from recipes.corpus import Document
from recipes.problems import problem
from recipes.questions import chats, excerpt

SUBJECTS = (
    "a city", "an animal", "a river", "a plant", "an invention", "a scientist", "a ruler of the past", "a war",
    "a sport", "a dish", "a disease", "a planet", "a painter", "a building", "a company", "a book", "a film",
    "a musical instrument", "a law", "a holiday", "a craft", "an accident", "an election", "a storm", "a trial",
    "a school", "a discovery", "a ship", "a football match", "a festival",
)  # fmt: skip
PASSAGES = (
    "Write an encyclopedia article of two paragraphs about {} of your choice, with names, places and years.",
    "Write a news report of three paragraphs about {}, with names, places and numbers.",
    "Write five sentences in German about {}.",
)
ABOUT = (
    "Summarize: {}",
    "Summarize this report in three sentences.\n\n{}",
    "Read the text and say in one sentence what it is about.\n\n{}",
    "Context: {}\n\nQuestion: which names and years are given, and what do they stand for?",
    "Answer from the documents below.\n\nDocument 1: {}\n\nDocument 2: {}\n\nWhat does each of them tell, in short?",
    "Documents:\n[1] {}\n[2] {}\n\nQuestion: what happened first, and where? Answer in short.",
)
GERMAN = ("Translate German to English: {}", "Translate the following text into English.\n\n{}")


def passage_questions(engine: Engine, count: int, seed: int, journal: Path) -> list[str]:
    """Tasks about texts that the model writes first: summaries, answers from documents, translations."""
    r = random.Random(f"passages/{seed}")
    orders = [PASSAGES[i % len(PASSAGES)].format(SUBJECTS[i // len(PASSAGES) % len(SUBJECTS)]) for i in range(count)]
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 256}
    requests = [
        Request(engine.chat_prompt([{"role": "user", "content": order}]), SamplingParams(seed=seed + i, **sampling))
        for i, order in enumerate(orders)
    ]
    with Journal(journal, {"target": engine.model.spec.name, "count": count, "seed": seed, **sampling}) as kept:
        made = {record["index"]: record["text"] for record in kept.records}
        left = [index for index in range(count) if index not in made]
        for number, completion in engine.completions([requests[index] for index in left], batch_size=64):
            made[left[number]] = completion.text.strip()
            kept.append({"index": left[number], "text": made[left[number]]})
    texts = {index: text for index, text in made.items() if len(text.split()) > 25}
    german = [text for index, text in texts.items() if index % len(PASSAGES) == len(PASSAGES) - 1]
    others = [text for index, text in texts.items() if index % len(PASSAGES) != len(PASSAGES) - 1]
    found = [r.choice(GERMAN).format(" ".join(text.split())) for text in german]
    for text in others:
        task = r.choice(ABOUT)
        found.append(task.format(*([text, r.choice(others)][: task.count("{}")])))
    return found


def library_questions(r: random.Random, count: int) -> list[str]:
    """Questions about functions of the standard library, and tasks about its documentation strings."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    documents = [
        Document("python", file.name, "code", text) for file in files if (text := clean(file.read_bytes())) is not None
    ]
    found: list[str] = []
    while len(found) < count:
        document = r.choice(documents)
        if r.random() < 0.5:
            found += [made.question for made in chats(r, document, most=1)]
            continue
        part = excerpt(r, document.text, 200, 900)
        prose = " ".join(line.strip("#\" '") for line in (part or "").split("\n"))
        if len(prose) > 200 and sum(c.isalpha() or c == " " for c in prose) / len(prose) > 0.9:
            found.append(r.choice(TASKS).format(" ".join(prose.split())))
    return found[:count]


def main() -> None:
    """Command line: one JSON object {"messages": [...]} a line, in random order."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", type=int, default=5000, help="user turns that the model writes; about half are kept")
    parser.add_argument(
        "--passages", type=int, default=900, help="texts that the model writes, each with a task about it"
    )
    parser.add_argument("--library", type=int, default=900)
    parser.add_argument("--problems", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="of the target")
    parser.add_argument(
        "--implementation", default="auto", help="lean is the quickest at 64 rows where the CPU has AMX"
    )
    args = parser.parse_args()
    r = random.Random(f"chat/{args.seed}")
    engine = Engine.load(args.target, dtype=args.dtype, implementation=args.implementation)
    questions = own_questions(engine, args.own, args.seed, args.out.with_suffix(".journal"))
    questions += passage_questions(engine, args.passages, args.seed, args.out.with_suffix(".passages"))
    questions += library_questions(r, args.library)
    questions += [problem("train", r.randrange(40_000)).question for _ in range(args.problems)]
    r.shuffle(questions)
    lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
    args.out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
