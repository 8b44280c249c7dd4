"""The same tokens with and without speculation: every method, alone and in mixed batches, in every implementation.

    python -m tests.stress.equality [--target bundled] [--draft bundled] [--prompts 50] [--tokens 128] [--temperature 1]
    python -m tests.stress.equality --dtype bfloat16 --width 8    # bit-identical, or it is a defect
    python -m tests.stress.equality --dtype bfloat16              # measures how often texts part, and at what gap

float32: the text of plain decoding (batch 1, the first implementation) is compared, token by token, with that of every
variant. At the first difference the oracle (transformers, float32, the plain path over the common prefix) shows how
near the two tokens were: the gap of log(p / E), which decides under coupled noise (of logits, at temperature 0), and
the distance of either token to the edge of top-k or top-p. Below 1e-4 it is a near-tie, where rounding decides; above,
or where one text merely ends earlier, a DEFECT. Exit 1 on any defect, or on more than 2 ties in one variant.

bfloat16 with --width: plain and speculative passes run the same kernels, so any difference is a DEFECT. Without: rounding
depends on the shape of a pass, so differences are counted, not judged. Each implementation is compared with its own plain.

In a mixed batch of 8, six rows are measured and two others have different parameters. Last line: JSON.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from foretell import Completion, Engine, ForetellError, Request, SamplingParams
from foretell.bench import Item, load_suite
from foretell.core.noise import Noise, derive_seed, exponentials
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.draft.base import Method
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.load import load_model, load_tokenizer
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target

TIE = 1e-4
MAX_TIES = 2
COMPANY = 2  # rows of a mixed batch that are not measured
VARIANTS = ("none", *(f"draft_model:{depth}" for depth in (1, 3, 5, 8)), "ngram", "prediction", "nonsense")
IMPLEMENTATIONS = ("native", "lean", "transformers")


@dataclass(frozen=True)
class Difference:
    """Where one text first parts from the plain one."""

    prompt: int
    position: int  # output tokens in common
    expected: int | None  # token ids; None where that text had ended
    found: int | None
    gap: float  # of log(p / E), or of logits at temperature 0; infinite where one of the two cannot be drawn
    edge: float  # distance of either token to the edge of top-k (in log p) or top-p (in mass)

    @property
    def is_tie(self) -> bool:
        """Rounding decides such a draw."""
        return min(self.gap, self.edge) < TIE


@dataclass
class Result:
    """One variant against plain decoding."""

    implementation: str
    variant: str
    temperature: float
    batch: int
    num_prompts: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    def verdict(self, rule: str) -> str:
        """identical, "n ties", DEFECT or, where nothing is judged, the share of texts that parted."""
        parted = len(self.differences)
        if not parted:
            return "identical"
        if rule == "measure":
            return f"{parted / self.num_prompts:.0%} part"
        ties = sum(difference.is_tie for difference in self.differences) if rule == "ties" else 0
        if parted > ties:
            return f"DEFECT ({parted - ties})"
        return f"{ties} tie{'s' * (ties > 1)}" + (" TOO MANY" if ties > MAX_TIES else "")

    def fails(self, rule: str) -> bool:
        """Whether the program must not succeed."""
        return "DEFECT" in self.verdict(rule) or "TOO MANY" in self.verdict(rule)


class Oracle:
    """How near two tokens were after a text: the transformers model in float32, plainly, on the whole prefix."""

    def __init__(self, target: str) -> None:
        self.name = target
        self._model: CausalModel | None = None

    def compare(
        self, ids: Sequence[int], num_prompt: int, params: SamplingParams, a: int, b: int
    ) -> tuple[float, float]:
        """(gap, distance to the edge) of tokens a and b after ids."""
        if self._model is None:
            self._model = load_model(self.name, dtype="float32", implementation="transformers")
        model = self._model
        with torch.inference_mode():
            logits = feed(Target(model, 1, len(ids) + 64), [list(ids)], [0], head=True)
        assert logits is not None
        assert params.seed is not None
        processors = Processors(
            [params], vocab_size=model.spec.vocab_size, end_token_ids=model.spec.eos_token_ids, device=model.spec.device
        )
        history = History([list(ids)], [num_prompt])
        paths = Paths(torch.tensor([[ids[-1]]]), torch.ones(1, 1, 1, dtype=torch.bool))
        if params.temperature == 0:
            return abs(float(logits[0, 0, a] - logits[0, 0, b])), math.inf
        probs = logits_to_probs(logits.double(), processors, history, paths)[0, 0]
        key = Noise(torch.tensor([derive_seed(params.seed)]), torch.tensor([len(ids) - 1])).coupled_keys(1)[0, 0]
        score = (probs / exponentials(key, len(probs))).log()
        gap = abs(float(score[a] - score[b])) if min(probs[a], probs[b]) > 0 else math.inf
        return gap, self._edge(logits[0, 0].double() / params.temperature, params, (a, b))

    @staticmethod
    def _edge(logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int]) -> float:
        """How far the nearer of two tokens is from being let in, or thrown out, by top-k or top-p."""
        distances = [math.inf]
        log_p = logits.log_softmax(0)
        if 0 < params.top_k < len(log_p):
            largest = log_p.topk(params.top_k + 1).values
            for token in tokens:
                inside = log_p[token] >= largest[-2]
                distances.append(abs(float(log_p[token] - largest[-1 if inside else -2])))
            log_p = log_p.masked_fill(log_p < largest[-2], -math.inf).log_softmax(0)
        if params.top_p < 1:
            p = log_p.exp()
            distances += [abs(float(p[p > p[token]].sum()) - params.top_p) for token in tokens]
        return min(distances)


def encode(items: Sequence[Item], engine: Engine, limit: int, room: int) -> list[list[int]]:
    """Prompts of all categories in turn, as token ids, cut on the left to leave room for the output."""
    by_category: dict[str, list[Item]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    deepest = max(map(len, by_category.values()))
    turns = [group[index] for index in range(deepest) for group in by_category.values() if index < len(group)][:limit]
    if len(turns) < limit:
        say(f"the suite has {len(turns)} prompts, {limit} were requested")
    longest = engine.model.spec.max_positions - room
    prompts = []
    for item in turns:
        try:
            ids = engine.chat_prompt([{"role": "user", "content": item.prompt}]) if item.format == "chat" else None
        except ForetellError:  # no chat template: plain text
            ids = None
        prompts.append((ids or engine.tokenizer.encode(item.prompt))[-longest:])  # type: ignore[union-attr]
    return prompts


def random_prompts(vocab_size: int, limit: int) -> list[list[int]]:
    """For models without a tokenizer (random weights): ragged random ids, every other prompt repetitive."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for index in range(limit):
        ids = torch.randint(0, vocab_size, (3 + (index * 37) % 150,), generator=generator).tolist()
        prompts.append((ids[:9] * 20)[: len(ids)] if index % 2 else ids)
    return prompts


def company(prompts: Sequence[Sequence[int]], index: int, tokens: int) -> list[Request]:
    """Two rows with other parameters and lengths."""
    first, second = prompts[(index * 5 + 1) % len(prompts)], prompts[(index * 3 + 2) % len(prompts)]
    greedy = SamplingParams(
        temperature=0.0, repetition_penalty=1.2, max_new_tokens=max(1, tokens // 2), ignore_eos=True
    )
    other = SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, presence_penalty=0.4, max_new_tokens=tokens, seed=index
    )
    return [Request(list(first), greedy), Request(list(second)[-7:], other)]


def run(engine: Engine, requests: Sequence[Request], batch: int, label: str) -> Iterator[tuple[int, Completion]]:
    """(index, completion) of every measured request, alone or in mixed batches; progress to stderr."""
    size = batch - COMPANY if batch > COMPANY else batch
    prompts = [list(request.prompt) for request in requests]  # type: ignore[arg-type]
    for start in range(0, len(requests), size):
        print(f"\r{label}  {start}/{len(requests)} ", end="", file=sys.stderr, flush=True)
        part = list(requests[start : start + size])
        mates = company(prompts, start, requests[0].params.max_new_tokens) if size < batch else []
        together = mates[:1] + part + mates[1:]
        found = engine.generate_batch(together, batch_size=batch)
        yield from enumerate(found[len(mates[:1]) : len(mates[:1]) + len(part)], start)
    print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)


def engine_of(
    variant: str, model: CausalModel, tokenizer: object, draft: CausalModel | None, width: int
) -> Engine | None:
    """The engine of one variant; None where its guesses do not fit the width."""
    name, _, count = variant.partition(":")
    method: Method | None = DraftModel(draft) if name == "draft_model" and draft is not None else None
    config: dict[str, object] = {"method": "prediction" if name == "nonsense" else name}
    if count:
        config["num_speculative_tokens"] = int(count)
    if width and name != "none" and int(config.get("num_speculative_tokens", 7)) + 1 > width:  # type: ignore[call-overload]
        return None
    return Engine(model, tokenizer, speculative=config, method=method, width=width)  # type: ignore[arg-type]


def guessed(variant: str, request: Request, expected: Sequence[int], vocab_size: int) -> Request:
    """The request with the prediction that its variant calls for."""
    if variant == "prediction":
        return Request(request.prompt, request.params, list(expected))
    if variant == "nonsense":
        return Request(
            request.prompt, request.params, [(7 * token + 11 * k) % vocab_size for k, token in enumerate(expected)]
        )
    return request


def first_difference(
    oracle: Oracle, index: int, request: Request, expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    """None where the texts are equal."""
    if list(expected) == list(found):
        return None
    short = min(len(expected), len(found))
    at = next((k for k in range(short) if expected[k] != found[k]), short)
    if at == short:  # one is a prefix of the other: no tie explains that
        after = (expected[at] if at < len(expected) else None, found[at] if at < len(found) else None)
        return Difference(index, at, *after, math.inf, math.inf)
    prompt = list(request.prompt)  # type: ignore[arg-type]
    gap, edge = oracle.compare([*prompt, *expected[:at]], len(prompt), request.params, expected[at], found[at])
    return Difference(index, at, expected[at], found[at], gap, edge)


def say(text: str) -> None:
    """To stderr: stdout is for the table and the JSON."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="bundled/target")
    parser.add_argument("--draft", default="bundled/draft")
    parser.add_argument("--suite", default="bundled", help="'bundled', a JSONL file, or 'random' (ids, no tokenizer)")
    parser.add_argument("--prompts", "--limit", type=int, default=50, dest="prompts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="e.g. none,draft_model:3,ngram")
    parser.add_argument("--batches", default=None, help="default: 1,8; in bfloat16 1")
    parser.add_argument("--threads", type=int, default=1, help="1 is right for small models and busy machines")
    parser.add_argument("--json", type=Path, default=None, help="write the JSON to this file too")
    options = parser.parse_args(arguments)
    options.variants, options.implementations = options.variants.split(","), options.implementations.split(",")
    unknown = [
        variant for variant in options.variants if variant.partition(":")[0] not in {v.split(":")[0] for v in VARIANTS}
    ]
    if unknown or not set(options.implementations) <= set(IMPLEMENTATIONS):
        parser.error(
            f"unknown variant or implementation; there are {', '.join(VARIANTS)} and {', '.join(IMPLEMENTATIONS)}"
        )
    single = options.dtype == "bfloat16"
    options.batches = [int(size) for size in (options.batches or ("1" if single else "1,8")).split(",")]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and judge."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    rule = "ties" if options.dtype == "float32" else "bits" if options.width else "measure"
    tokenizer = None if options.suite == "random" else load_tokenizer(options.target)
    oracle = Oracle(options.target)
    expected: dict[float, list[list[int]]] = {}
    results: list[Result] = []
    for implementation in options.implementations:
        model = load_model(options.target, dtype=options.dtype, implementation=implementation)
        draft = None
        if any(variant.startswith("draft_model") for variant in options.variants):
            draft = load_model(options.draft, dtype=options.dtype, implementation=implementation)
        plain = Engine(model, tokenizer, width=options.width)
        vocab_size = model.spec.vocab_size
        if tokenizer is None:
            prompts = random_prompts(vocab_size, options.prompts)
        else:
            prompts = encode(load_suite(options.suite), plain, options.prompts, options.tokens)
        for temperature in options.temperature:
            params = SamplingParams(
                temperature=temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                max_new_tokens=options.tokens,
                seed=options.seed,
            )
            requests = [Request(prompt, params) for prompt in prompts]
            if temperature not in expected or rule != "ties":
                label = f"{implementation} plain, the reference"
                expected[temperature] = [completion.token_ids for _, completion in run(plain, requests, 1, label)]
                say(f"{label}: {sum(map(len, expected[temperature]))} tokens at temperature {temperature}")
            for variant in options.variants:
                engine = engine_of(variant, model, tokenizer, draft, options.width)
                if engine is None:
                    say(f"{variant} does not fit width {options.width}: left out")
                    continue
                asked = [
                    guessed(variant, request, ids, vocab_size)
                    for request, ids in zip(requests, expected[temperature], strict=True)
                ]
                for batch in options.batches:
                    result = Result(implementation, variant, temperature, batch)
                    label = f"{implementation} {variant} temperature {temperature} batch {batch}"
                    begun = time.perf_counter()
                    for index, completion in run(engine, asked, batch, label):
                        result.num_prompts += 1
                        result.num_tokens += completion.num_tokens
                        result.num_drafted += completion.num_draft_tokens
                        result.num_accepted += completion.num_accepted_tokens
                        difference = first_difference(
                            oracle, index, requests[index], expected[temperature][index], completion.token_ids
                        )
                        if difference is not None:
                            result.differences.append(difference)
                    result.seconds = time.perf_counter() - begun
                    results.append(result)
                    say(f"{label}: {result.verdict(rule)} ({result.seconds:.1f} s)")
    report(results, rule)
    failed = any(result.fails(rule) for result in results)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    record = {
        "passed": not failed,
        "rule": rule,
        "settings": settings,
        "results": [{**asdict(result), "verdict": result.verdict(rule)} for result in results],
    }
    line = json.dumps(record, default=str).replace("Infinity", "null")
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return int(failed)


def report(results: Sequence[Result], rule: str) -> None:
    """A table for people, and every difference."""
    head = ("implementation", "variant", "temp", "batch", "prompts", "tokens", "accepted", "result", "largest gap")
    lines = [head]
    for result in results:
        gaps = [min(difference.gap, difference.edge) for difference in result.differences]
        accepted = f"{result.num_accepted / result.num_drafted:.1%}" if result.num_drafted else "-"
        lines.append(
            (
                result.implementation,
                result.variant,
                f"{result.temperature:g}",
                str(result.batch),
                str(result.num_prompts),
                str(result.num_tokens),
                accepted,
                result.verdict(rule),
                f"{max(gaps):.1e}" if gaps else "-",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for result in results:
        for found in result.differences:
            print(
                f"{result.implementation} {result.variant} batch {result.batch}: prompt {found.prompt}, token "
                f"{found.position}: {found.expected} expected, {found.found} found; "
                f"gap {found.gap:.2e}, edge {found.edge:.2e}"
            )


if __name__ == "__main__":
    sys.exit(main())
