"""What usually goes wrong with guessing, looked for in what was measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.bench.stats import FEW
from foretell.core.errors import ForetellError
from foretell.doctor.examine import Examined
from foretell.doctor.machine import Machine
from foretell.doctor.recommend import Advice
from foretell.engine.engine import Engine
from foretell.engine.request.conversation import render
from foretell.model.load import load_tokenizer

FAR_FROM_LIMIT = 0.4
"""Share of the memory's bandwidth, below which a pass is bound by something else."""
CACHE_BYTES = 256 << 20
"""Weights up to this may stay in caches, in part: the limit then says little."""
BUSY, TAKEN = 0.5, 0.1
"""Load of the machine beside this process, by core; share of the time that others took of it."""
LOW_AT_TEMPERATURE = 0.85
"""Acceptance over agreement, below which sampling is what costs guesses."""
WIDE = 0.35
"""Width of an interval over its middle."""


@dataclass(frozen=True)
class Warned:
    """One warning."""

    about: str  # a short name, stable
    text: str


def about_run(
    machine: Machine, plain_pass: float | None, *, looped: float, tokens: float, prompts: int, given: int, taken: float
) -> Iterator[Warned]:
    """Of the machine and the prompts. looped: share of texts that began to loop; tokens: of a text, on average; prompts:
    that the method with the most was measured on, of those given; taken: share of the time that other programs took."""
    threads, cores, load = machine.threads, machine.cores, machine.load_average
    if cores and threads > cores:
        yield Warned("threads", f"{threads} threads on {cores} cores get in each other's way: --threads")
    elif cores and threads < cores and machine.accelerator is None:
        text = f"{threads} of {cores} cores are used; speedups with more threads differ (OMP_NUM_THREADS, --threads)"
        yield Warned("threads", text)
    if taken > TAKEN or (load is not None and load > BUSY * (cores or 1)):
        text = f"other programs took {taken:.0%} of the time, which is not counted" if taken > TAKEN else (
            f"the machine had a load of {load:.1f} when this began"
        )  # fmt: skip
        yield Warned("busy", f"{text}: speedups are less sure, though plain decoding was timed beside each method")
    for kind, reason in machine.why_not.items():
        yield Warned("implementation", f"the target runs as {machine.implementation}, not {kind}: {reason}")
    if machine.reads_again:
        text = f"recurrent layers read accepted guesses again, which costs time: {machine.reads_again}"
        yield Warned("reads_again", text)
    least = machine.least_pass_seconds
    if least and plain_pass and machine.weight_bytes > CACHE_BYTES and least / plain_pass < FAR_FROM_LIMIT:
        text = (
            f"a plain pass takes {plain_pass * 1e3:.1f} ms and memory allows {least * 1e3:.1f} ms: something else than "
        )
        yield Warned("far_from_limit", text + "memory limits it, so that wider passes cost more than they should")
    if looped >= 0.3:
        text = (
            f"{looped:.0%} of the texts began to repeat themselves, and were cut there: looping text is easy to guess"
        )
        yield Warned("loops", text)
    if tokens < 16:
        yield Warned("short", f"a text has {tokens:.0f} tokens on average: too few for the drafter's start to pay")
    if prompts < FEW:
        said = "one prompt" if prompts == 1 else f"{prompts} prompts"
        mend = "give ten or more of your own" if given < FEW else "give more time (--time-limit)"
        yield Warned("few_prompts", f"{said}: there is no interval from under {FEW}; {mend}")


def about_method(engine: Engine, own: Engine, one: Examined, *, temperature: float) -> Iterator[Warned]:
    """Of a method that was examined. engine: the target's; own: with the method. temperature: of the texts."""
    if one.speculation == "auto":
        return  # of its method all was said
    name, can, spec = one.method, own.method.capabilities, engine.model.spec
    if one.best_case is not None and one.best_case < 1.1:
        cost = "" if one.guess_cost is None else f": a guess costs {one.guess_cost:.2f} plain passes"
        yield Warned("draft_too_large", f"{name} cannot win: {one.best_case:.2f} times if all were accepted{cost}")
    most = own.method.max_positions
    if most is not None and most < spec.max_positions:
        text = f"{name}: the draft's context is {most} tokens, the target's {spec.max_positions}: longer texts are decoded "
        yield Warned("context", text + "plainly from there on")
    if one.drafter is not None and can.needs_draft:
        yield from _templates(engine, one.drafter)
    if one.drafter is not None and can.needs_head and spec.is_quantised:
        text = f"{name}: heads are mostly trained on unquantised targets, and this one is held as {spec.weights}: its "
        yield Warned("quantised", text + "hidden states differ; compare with --weights bf16")
    sampled = one.slots[0] if one.slots else None
    if temperature and sampled is not None and one.agreement and sampled < LOW_AT_TEMPERATURE * one.agreement:
        text = (
            f"{name}: slot 1 accepts {sampled:.2f} at these sampling settings and {one.agreement:.2f} at temperature 0"
        )
        yield Warned("sampling", text)


def about_choice(found: Sequence[Examined], advice: Advice) -> Iterator[Warned]:
    """Of the recommended configuration, where it is recommended for certain."""
    config = advice.config
    for one in found if advice.is_sure else ():
        best, mine = one.best, (one.method, one.drafter, one.speculation)
        if mine != (config["method"], config.get("model"), advice.speculation) or best is None:
            continue
        value = best.speedup
        if value.high - value.low > WIDE * value.value:
            text = f"{one.label}: the interval ({value.low:.2f} to {value.high:.2f}) is wide: more prompts (--limit, "
            yield Warned("wide", text + "--time-limit), or more of them timed (--timed)")
            return


def _templates(engine: Engine, drafter: str) -> Iterator[Warned]:
    """Whether the draft's chat template writes what the target's does."""
    mine: Any = engine.tokenizer
    try:
        its: Any = load_tokenizer(drafter)
    except ForetellError:
        return
    shown = [_rendered(one) for one in (mine, its)]
    if shown[0] is None or shown[0] == shown[1]:
        return
    how = "has no chat template" if shown[1] is None else "has another chat template than the target"
    text = f"draft {drafter} {how}: the target's is used for both, and the draft may never have seen it in training"
    yield Warned("template", text)


def _rendered(tokenizer: Any) -> str | None:
    """A short conversation by a tokenizer's template."""
    try:
        return render([{"role": "user", "content": "Hello"}], tokenizer, "").text
    except ForetellError:  # there is none, or it refuses that
        return None
