"""Answers that are kept: a line of a file each, written as soon as the answer ends, so that a run can be stopped anywhere.

Two rows decode hundreds of answers (``judge``, ``abstention``). An answer is known by its setting (models, length and
whatever else changes the text), rule, category, question and seed; what the file has is not decoded again. Answers are
decoded ``batch_size`` at a time, and the next takes the row of one that ends: under every rule a text depends on its own
question and seed alone, so the size changes no figure.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foretell import Engine, Request, SamplingParams
from foretell.bench import Item, encode_item
from foretell.bench.script import answer_text
from foretell.bench.stats import PairedRuns
from foretell.engine.config import speculative_config

PLAIN = "none"
Key = tuple[str, str, str, int]
Record = dict[str, Any]


class Answers:
    """Answers by rule, question and seed."""

    def __init__(self, file: Path | None, setting: Sequence[Any], *, seeds: int = 1, spread: bool = False) -> None:
        """file: where they are kept; None: nowhere. spread: questions have different seeds (their numbers), else all have
        the seeds 0, 1, ..."""
        self.file, self.setting, self.seeds, self.spread = file, list(setting), seeds, spread
        self.known: dict[Key, Record] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a line that a killed run left unfinished
                if record["setting"] == self.setting:
                    self.known[_key(record["rule"], record)] = record

    def keys(self, rule: str, items: Sequence[Item]) -> list[Key]:
        """Of all answers of a rule: question by question, seed by seed."""
        return [
            (rule, item.category, str(item.question_id), (at * self.seeds if self.spread else 0) + seed)
            for at, item in enumerate(items)
            for seed in range(self.seeds)
        ]

    def complete(
        self, rule: str, items: Sequence[Item], engine: Callable[[], Engine],
        params: Callable[[int], SamplingParams], *, batch_size: int,
    ) -> None:  # fmt: skip
        """Decode what is missing. engine is called only where something is; params by seed."""
        asked = [item for item in items for _ in range(self.seeds)]
        pairs = zip(self.keys(rule, items), asked, strict=True)
        missing = [(key, item) for key, item in pairs if key not in self.known]
        if not missing:
            return
        model = engine()
        requests = [Request(encode_item(model, item), params(key[-1])) for key, item in missing]
        for done, (at, one) in enumerate(model.completions(requests, batch_size=batch_size), 1):
            key, item = missing[at]
            record = {
                "setting": self.setting, "rule": rule, "question_id": key[2], "seed": key[3], "category": item.category,
                "level": item.level, "ids": list(one.token_ids), "text": answer_text(model, one.token_ids),
                "steps": one.num_steps, "accepted": one.num_accepted_tokens, "finish": one.finish_reason,
            }  # fmt: skip
            self.known[key] = record
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(record) + "\n")
            if done % 8 == 0 or done == len(missing):
                print(f"  {rule}: {done} of {len(missing)}", flush=True)

    def of(self, rule: str, items: Sequence[Item]) -> list[Record]:
        """All records of a rule, in the order of ``keys``."""
        return [self.known[key] for key in self.keys(rule, items)]

    def same(self, rule: str, other: str, items: Sequence[Item]) -> int:
        """Answers whose tokens are equal under two rules."""
        pairs = zip(self.of(rule, items), self.of(other, items), strict=True)
        return sum(mine["ids"] == theirs["ids"] for mine, theirs in pairs)

    def length(self, rule: str, items: Sequence[Item]) -> float:
        """Tokens a step: 1 + accepted / steps, over all answers."""
        records = self.of(rule, items)
        return 1 + sum(one["accepted"] for one in records) / max(1, sum(one["steps"] for one in records))

    def lengths(self, rule: str, other: str, items: Sequence[Item]) -> list[PairedRuns]:
        """Tokens and steps of a rule beside another's, by answer: the ``speedup`` of these is the ratio of tokens a step,
        and ``bootstrap`` gives its interval."""
        pairs = zip(self.of(rule, items), self.of(other, items), strict=True)
        return [PairedRuns(*_tokens_and_steps(theirs), *_tokens_and_steps(mine)) for mine, theirs in pairs]


class Engines:
    """An engine for every rule over the same weights, which are read when the first one is asked for."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self.load = load
        self.first: Engine | None = None

    def of(self, rule: str) -> Engine:
        """Of a rule; of plain decoding for ``none``."""
        if self.first is None:
            self.first = self.load()
        if rule == PLAIN:
            return self.first.with_method("none")
        config = speculative_config({**self.first.speculative.resolved(), "verify": rule})
        return self.first.with_method(config, method=self.first.method)


def params(args: argparse.Namespace, seed: int) -> SamplingParams:
    """Of a row's answers."""
    return SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=seed)


def _tokens_and_steps(record: Record) -> tuple[int, int]:
    return record["steps"] + record["accepted"], record["steps"]


def _key(rule: str, record: Record) -> Key:
    return rule, record["category"], record["question_id"], record["seed"]
