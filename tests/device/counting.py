"""Decode on the pretend device and on the CPU, and count what each step of the device costs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from foretell import Engine, Request, SamplingParams
from foretell.engine import batch as batches, judging, step as stepping
from foretell.engine.event import StepEvent
from foretell.engine.state import State
from foretell.model.load import load_model, load_tokenizer
from foretell.model.target import CausalModel, Target
from tests.device.pretend import METER, NAME, device, phased

PROMPTS = [
    "def add(a, b):\n    return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "x = 1; x = 1; x",
]
Config = str | Mapping[str, Any]


@dataclass
class Step:
    """What one step cost the device."""

    rows: tuple[int, ...]  # indices of its requests
    shape: tuple[int, ...]  # nodes of the tree that was verified, and its kept ones
    launches: Counter[str]  # by phase
    reads: Counter[str]
    uploads: Counter[str]


@dataclass
class Run:
    """Tokens of each request, and all steps."""

    tokens: list[list[int]]
    steps: list[Step] = field(default_factory=list)

    @property
    def steady(self) -> list[Step]:
        """The steps in which no request comes or ends, the first two left out: what is made once for a shape is then
        there."""
        inner = zip(self.steps[1:], self.steps[2:], self.steps[3:], strict=False)
        return [step for before, step, after in inner if before.rows == step.rows == after.rows]


class Phased:
    """A drafter whose launches count as the draft's."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.propose = phased("draft", drafter.propose)
        self.observe = phased("draft", drafter.observe)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


@contextmanager
def phases() -> Iterator[None]:
    """Launches within are counted as the draft's, the target's or the verifier's. The layout is the target's."""
    step = stepping.step

    def stepped(state: State, target: Target, drafter: Any, *args: Any, **kwargs: Any) -> StepEvent:
        return step(state, target, Phased(drafter), *args, **kwargs)

    verifying = ("draw", "evidence_of")
    with (
        patch.multiple(judging, **{name: phased("verify", getattr(judging, name)) for name in verifying}),
        patch.multiple(judging, layout=phased("target", judging.layout)),
        patch.object(State, "advance", phased("verify", State.advance)),
        patch.object(Target, "forward", phased("target", Target.forward, within="draft")),
        patch.object(Target, "commit", phased("target", Target.commit, within="draft")),
        patch.object(batches, "step", stepped),
    ):
        yield


@cache
def model(where: str, name: str = "bundled/target") -> CausalModel:
    """A model as ``lean``; where is "cpu" or "pretend"."""
    if where == NAME:
        device()
    return load_model(name, device=where, implementation="lean", dtype="float32")


def engine_on(where: str, config: Config, target: CausalModel | None = None, **options: Any) -> Engine:
    """An engine over the bundled target, or another model that lies there."""
    return Engine.load(
        target or model(where), tokenizer=load_tokenizer("bundled/target"), speculative=deepcopy(config),
        drafter_errors="raise", **options,
    )  # fmt: skip


def requests(params: Sequence[SamplingParams], prompts: Sequence[str] = PROMPTS) -> list[Request]:
    """One request for each, its seed its own."""
    return [
        Request(prompts[index % len(prompts)], replace(one, seed=3 + index), PROMPTS[0] + " a + b")
        for index, one in enumerate(params)
    ]


def run(engine: Engine, given: list[Request], batch_size: int = 8) -> Run:
    """Decode, and count every step where the engine is on the device."""
    made = Run([])

    def watch(event: StepEvent) -> None:
        shape = (event.evidence.tree.num_nodes, *map(len, event.commit.path))
        counts = METER.launches.copy(), METER.reads.copy(), METER.uploads.copy()
        made.steps.append(Step(tuple(row.index for row in event.rows), shape, *counts))
        METER.reset()

    METER.reset()
    engine.observers.append(watch)
    with phases():
        made.tokens = [done.token_ids for done in engine.generate_batch(given, batch_size=batch_size)]
    engine.observers.remove(watch)
    return made


def both(config: Config, given: list[Request], **options: Any) -> tuple[Run, Run]:
    """(on the CPU, on the device)."""
    return run(engine_on("cpu", config, **options), given), run(engine_on(NAME, config, **options), given)
