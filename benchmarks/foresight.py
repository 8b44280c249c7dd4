"""How well a rejection is foreseen: an acceptance head beside what the draft model says for nothing.

    python -m benchmarks.foresight > foresight.md
    python -m benchmarks.foresight --acceptance bundled/acceptance --acceptance DIR --temperature 0 --temperature 1

The target answers the prompts of the bundled suite, on which nothing was trained, once at each temperature. The guesses are
those that decoding makes with verifier ``coupled``: the draft model's race at each position of the answer, run with the
request's own noise, behind the answer's own tokens; a guess is kept where it is the answer's token. (Behind a rejected
guess decoding starts anew, so in lines without end every position is guessed exactly once, and behind a right prefix.)

Scores, higher meaning "will be kept":

- ``head DIR``: what an acceptance head says of the guess; shape ``specdec`` multiplies it along the line.
- ``q(x)``: the draft's probability of the guess, at temperature 1 where decoding is at 0.
- ``max q``: that of its most probable token, known before the guess is drawn: rule ``probability`` of shape ``adaptive``.
- ``entropy``: of q, its sign turned.

``own``: the area under the ROC curve of the score of the guess itself, the probability that a kept guess scores higher
than a rejected one. ``line``: of the product of the scores of the guesses of its line up to it, in lines of --depth guesses
walked as decoding walks them; the entropy is summed. In brackets 95 % by bootstrap over prompts; ``- q(x)`` is the paired
difference from q(x) of what stands before it. ``ece``: expected calibration error, of scores that are probabilities.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.bench import encode_item, load_suite, select
from foretell.cli.output import as_json
from foretell.core.noise import Stream, derive_seed, race, stream_keys
from foretell.heads.formats import load_head
from foretell.heads.teacher import Teacher
from foretell.methods.acceptance.head import AcceptanceHead, distribution_inputs, predicted
from foretell.methods.acceptance.objective import (
    ModelReader,
    area_under_curve,
    calibration_error,
    distribution_of,
    parts_of,
)
from foretell.model.load import load_model
from foretell.train.data import sequential_batches
from foretell.train.responses import Responses, pack

SEED = 1_000_000
"""Seed of the first prompt's answer at the first temperature."""


@dataclass
class Guesses:
    """M guesses in the order of their texts."""

    text: Tensor  # [M] int64
    at: Tensor  # [M] int64 position in the text
    kept: Tensor  # [M] float32, 0 or 1
    scores: dict[str, Tensor]  # by name: [M], higher means "will be kept"
    agreement: float  # share of the answers' tokens that the target's own race picks here too

    def lines(self, depth: int) -> Tensor:
        """[M] int64: the line that each guess stands in, where a line is at most depth guesses and ends with the first
        that is rejected; -1 for positions that no line guesses: behind a line whose guesses were all kept, the target
        adds a token of its own."""
        line = torch.full((len(self.text),), -1)
        number, length, text = -1, 0, -1
        skip = False
        for index, (own, kept) in enumerate(zip(self.text.tolist(), self.kept.tolist(), strict=True)):
            if own != text:
                text, length, skip = own, 0, False
            if skip:
                skip = False
                continue
            if length == 0:
                number += 1
            line[index] = number
            length = length + 1 if kept else 0
            if length == depth:
                length, skip = 0, True
        return line


def answers(engine: Engine, prompts: Sequence[list[int]], temperature: float, seed: int, most: int) -> Responses:
    """The target's own text behind each prompt; prompt i has seed ``seed + i``."""
    params = [SamplingParams(temperature=temperature, max_new_tokens=most, seed=seed + i) for i in range(len(prompts))]
    made = engine.generate_batch([Request(ids, own) for ids, own in zip(prompts, params, strict=True)], batch_size=16)
    return pack([([*ids, *one.token_ids], len(ids)) for ids, one in zip(prompts, made, strict=True)])


@torch.no_grad()
def guess(
    texts: Responses,
    teacher: Teacher,
    reader: ModelReader,
    heads: dict[str, AcceptanceHead],
    temperature: float,
    seed: int,
    batch_tokens: int = 2048,
) -> Guesses:
    """What decoding these texts guesses, and every score of it."""
    rows: list[tuple[Tensor, ...]] = []
    scores: dict[str, list[Tensor]] = {}
    for index in sequential_batches(texts.length.tolist(), batch_tokens):
        batch = texts.batch(index)
        labeled = teacher.label(batch, ())
        law, _ = reader.read(batch)
        row, before = batch.supervised.nonzero(as_tuple=True)
        own = torch.tensor(index)[row]
        seeds = torch.tensor([derive_seed(seed + text) for text in index])[row]  # as the engine does
        keys = stream_keys(seeds, before + 1, Stream.COUPLED)
        heat = torch.full((len(row),), temperature)
        drawn, right, probs = [], [], []
        for part in parts_of(len(row)):
            logits = law[row[part], before[part]]
            q, p = (
                distribution_of(logits, heat[part]),
                distribution_of(labeled.logits[row[part], before[part]], heat[part]),
            )
            drawn.append(race(q, keys[part]))
            right.append(race(p, keys[part]))
            probs.append(distribution_inputs(logits / (temperature or 1.0), drawn[-1], heat[part]))
        guesses = batch.tokens[:, 1:].clone()
        guesses[row, before] = torch.cat(drawn)
        hidden = reader.beside(batch, guesses)[row, before]
        true = batch.tokens[row, before + 1]
        rows.append((own, before + 1, (guesses[row, before] == true).float(), (torch.cat(right) == true).float()))
        inputs = torch.cat(probs)
        told = distribution_inputs(law[row, before], guesses[row, before], heat) if temperature else inputs
        found = {name: predicted(head, hidden, told if head.config.reads_law else None) for name, head in heads.items()}
        found |= {"q(x)": inputs[:, 0].exp(), "max q": inputs[:, 1].exp(), "entropy": -inputs[:, 2]}
        for name, score in found.items():
            scores.setdefault(name, []).append(score)
    text, at, kept, agreed = (torch.cat(column) for column in zip(*rows, strict=True))
    return Guesses(text, at, kept, {name: torch.cat(parts) for name, parts in scores.items()}, float(agreed.mean()))


def along(score: Tensor, line: Tensor) -> Tensor:
    """[M] each score multiplied (summed where it is not a probability) with those before it in its line."""
    summed = bool((score < 0).any())
    out = score.clone()
    for index in range(1, len(score)):
        if line[index] >= 0 and line[index] == line[index - 1]:
            out[index] = out[index - 1] + score[index] if summed else out[index - 1] * score[index]
    return out


@dataclass(frozen=True)
class Area:
    """An area under the curve, over bootstrap samples of prompts too."""

    value: float
    samples: Tensor  # [R]

    def __sub__(self, other: "Area") -> "Area":
        return Area(self.value - other.value, self.samples - other.samples)

    def __str__(self) -> str:
        low, high = self.samples.nanquantile(torch.tensor([0.025, 0.975], dtype=self.samples.dtype)).tolist()
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


def area(score: Tensor, kept: Tensor, weights: Tensor) -> Area:
    """weights [R, M]: how often each guess stands in each bootstrap sample."""
    value, place = torch.unique(score, return_inverse=True)  # sorted once for all samples
    samples = []
    for part in weights.double().split(64):
        won = part.new_zeros(len(part), len(value)).index_add_(1, place, part * kept)
        lost = part.new_zeros(len(part), len(value)).index_add_(1, place, part * (1.0 - kept))
        samples.append((won * (lost.cumsum(1) - 0.5 * lost)).sum(1) / (won.sum(1) * lost.sum(1)))
    return Area(area_under_curve(score, kept), torch.cat(samples))


def resampled(text: Tensor, resamples: int) -> Tensor:
    """[R, M] how often each guess's text is drawn among as many texts as there are."""
    count = int(text.max()) + 1
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    times = torch.zeros(resamples, count).scatter_add_(1, drawn, torch.ones(resamples, count))
    return times[:, text]


def rows_of(guesses: Guesses, depth: int, resamples: int) -> list[dict[str, Any]]:
    """A row a score."""
    weights, line = resampled(guesses.text, resamples), guesses.lines(depth)
    inside = line >= 0
    both = {
        name: (
            area(score, guesses.kept, weights),
            area(along(score, line)[inside], guesses.kept[inside], weights[:, inside]),
        )
        for name, score in guesses.scores.items()
    }
    base = both["q(x)"]
    out = []
    for name, score in guesses.scores.items():
        own, product = both[name]
        out.append(
            {
                "score": name,
                "own": own,
                "own_difference": None if name == "q(x)" else own - base[0],
                "line": product,
                "line_difference": None if name == "q(x)" else product - base[1],
                "ece": None if name == "entropy" else calibration_error(score, guesses.kept),
            }
        )
    return out


def as_plain(row: dict[str, Any], temperature: float) -> dict[str, Any]:
    """For JSON: an area as its value and interval."""
    return {"temperature": temperature} | {
        key: str(value) if isinstance(value, Area) else value for key, value in row.items()
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", default="bundled/draft")
    parser.add_argument(
        "--acceptance", action="append", help="an acceptance head; may be repeated; default: the bundled one"
    )
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated; default: 0 and 1")
    parser.add_argument("--prompts-per-category", type=int, help="default: all")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=8, help="guesses of a line")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("```text\npython -m benchmarks.foresight " + shlex.join(sys.argv[1:]) + "\n```\n", flush=True)
    engine = Engine.load(args.target)
    prompts = [encode_item(engine, item) for item in select(load_suite("bundled"), limit=args.prompts_per_category)]
    prompts = [ids for ids in prompts if len(ids) + args.max_new_tokens <= engine.model.spec.max_positions]
    load: Callable[[str], Any] = lambda name: load_model(name, dtype="float32", implementation="transformers")  # noqa: E731
    teacher, draft = Teacher(load(args.target)), load(args.draft)
    names = args.acceptance or ["bundled/acceptance"]
    heads = {f"head {name}": load_head(name, draft.spec, AcceptanceHead, dtype=torch.float32) for name in names}
    found = []
    for number, temperature in enumerate(args.temperature or [0.0, 1.0]):
        seed = SEED * (number + 1)
        texts = answers(engine, prompts, temperature, seed, args.max_new_tokens)
        guesses = guess(texts, teacher, ModelReader(draft), heads, temperature, seed)
        if guesses.agreement < 0.99:
            raise SystemExit(
                f"temperature {temperature:g}: the target's own race finds {guesses.agreement:.2%} of its answers' tokens, "
                "where all but near ties were expected: these are not the guesses that decoding makes"
            )
        print(
            f"Temperature {temperature:g}: {len(guesses.kept):,} guesses in {len(texts)} answers, "
            f"{float(guesses.kept.mean()):.1%} kept; {guesses.agreement:.2%} of the answers' tokens found again\n"
        )
        print("| score | own | - q(x) | line | - q(x) | ece |\n|---|---|---|---|---|--:|")
        for row in rows_of(guesses, args.depth, args.resamples):
            ece = "-" if row["ece"] is None else f"{row['ece']:.3f}"
            cells = [row["score"], row["own"], row["own_difference"], row["line"], row["line_difference"], ece]
            print("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |", flush=True)
            found.append(as_plain(row, temperature))
        print()
    if args.json:
        args.json.write_text(as_json({"argv": sys.argv[1:], "rows": found}, pretty=True), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
