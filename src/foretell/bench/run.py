"""All measuring: every prompt plainly and with each method, interleaved, in one process on one set of weights."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from foretell.bench.quality import Judge
from foretell.bench.report import BenchReport, Session, assemble
from foretell.bench.sandbox import isolation
from foretell.bench.script import Script, answer_text
from foretell.bench.suite import Item
from foretell.bench.trace import DecodedRun
from foretell.core.errors import ConfigError
from foretell.core.journal import Journal
from foretell.core.params import SamplingParams
from foretell.core.platform import peak_rss_bytes
from foretell.core.provenance import provenance
from foretell.core.spec import method_words
from foretell.draft.config import MethodConfig
from foretell.engine.config import METHODS, speculative_config
from foretell.engine.engine import Engine

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class BenchMethod:
    """A method configuration, and its label in the report."""

    label: str
    config: MethodConfig
    speculation: str = "on"  # "auto": before each step the planner decides how deep to guess, or not at all


def parse_method(text: str, *, draft: str | None = None, verify: str | None = None) -> BenchMethod:
    """``[auto:]METHOD[:N][:VERIFY][:SHAPE][:DRAWS][:OPTION=VALUE]``: "draft_model:5",
    "draft_model:6:rejection:sequoia/size=16:iid" or "hybrid:second=draft_model:second_tokens=3".

    The parts after the name may come in any order; options are the method's own. "auto:" before it guesses as much as
    pays (see ``Engine``). Raises ConfigError.
    """
    options, speculation = method_words(text)
    name = options["method"]
    if verify is not None:
        options.setdefault("verify", verify)
    if draft is not None and name in METHODS and "model" in METHODS[name].key_names():
        options["model"] = draft
    return BenchMethod(text.strip(), speculative_config(options), speculation)


AnyMethod = str | Mapping[str, Any] | MethodConfig | BenchMethod
"""A text for ``parse_method``, a mapping for ``speculative_config``, or a ready value."""


@dataclass(eq=False)
class _Lane:
    """One method's engine during a session."""

    method: BenchMethod
    engine: Engine
    runs: dict[tuple[float, int], list[DecodedRun]] = field(default_factory=dict)  # (temperature, item) -> one a round


FINISHED = "finished"
"""Key of the last line of a file of runs."""
REVISION = "git_revision"
"""Key of a run's commit, in a file where they may differ."""
KEY = ("temperature", "index", "round", "method")
RunKey = tuple[float, int, int, str]


@dataclass(frozen=True)
class _Turn:
    """One prompt at one temperature, once by each method."""

    temperature: float
    round: int
    index: int  # of the message
    lanes: list[_Lane]

    def key(self, lane: _Lane) -> RunKey:
        """The key of a method's run."""
        return self.temperature, self.index, self.round, lane.method.label


@dataclass(frozen=True)
class PromptDone:
    """One prompt, decoded once by every method at one temperature."""

    num_runs: int  # done so far, this prompt's included
    num_planned: int
    temperature: float
    round: int  # from 0
    item: Item
    runs: Mapping[str, DecodedRun]  # by the method's label, plain decoding among them


class BenchInterrupted(KeyboardInterrupt):
    """A KeyboardInterrupt (Ctrl-C) during ``run_bench``."""

    def __init__(self, report: BenchReport | None) -> None:
        """report: of the prompts that every method had decoded by then; None where there is none."""
        super().__init__("interrupted")
        self.report = report


def run_bench(
    engine: Engine | Mapping[str, Any],
    prompts: Sequence[Item | str],
    methods: Sequence[AnyMethod],
    *,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 128,
    rounds: int = 1,
    seed: int = 0,
    verify: str | None = None,
    draft: str | None = None,
    dram_read: Callable[[], float | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_prompt: Callable[[PromptDone], None] | None = None,
    runs_file: Path | str | None = None,
    any_revision: bool = False,
    judged: bool = False,
) -> BenchReport:
    """Decode every prompt plainly and with each method, ``rounds`` times, and report.

    engine, or the options of ``Engine.load``. A prompt that is a mere text is continued as it is. Plain decoding is
    always measured, whether or not it is among methods. The runs of one prompt follow each other, in an order that
    rotates from prompt to prompt, so that a slowdown of the machine affects all of them. A short run of each lane warms
    up and is not counted. Prompts are decoded one at a time. A later message of a question follows plain decoding's
    answer to the one before, for every method: what they decode is then the same. Methods that learn from texts begin with
    nothing at each temperature and in each round, and share nothing: they never meet a text that they have decoded.

    dram_read measures the memory bandwidth in bytes per second; progress is called with (runs done, runs in all),
    on_prompt when all methods have decoded a prompt. runs_file: a file of JSON lines that every run is appended to as it
    is made; the runs in it are not made again, if it comes from the same configuration and machine. any_revision: runs of
    another commit of foretell's source count too (not those of another version); then ``settings["runs_by_revision"]``
    says how many of each method's runs come from which. judged: whether answers to questions with a ``check`` are
    judged; programs among them are run (``sandbox``).

    Raises ConfigError, ModelError, BenchInterrupted.
    """
    if not isinstance(engine, Engine):
        engine = Engine.load(**engine)
    if rounds < 1 or not temperatures:
        raise ConfigError(f"rounds = {rounds} must be at least 1, and temperatures = {list(temperatures)} not empty")
    chosen = [_bench_method(method, draft=draft, verify=verify) for method in methods]
    lanes = _lanes(engine, chosen)
    given_items = [Item(at, "all", item, "text") if isinstance(item, str) else item for at, item in enumerate(prompts)]
    script = Script(engine, given_items)
    items, fitting = script.messages, script.fitting
    sampling = [SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=seed) for t in temperatures]
    given = {params.temperature: params for params in sampling}
    turns = [
        _Turn(temperature, turn, index, [
            lane for lane in _turned(lanes, index + turn)
            if not lane.engine.method.capabilities.needs_prediction or items[index].prediction is not None
        ])
        for temperature in given
        for turn in range(rounds)
        for index in fitting
    ]  # fmt: skip
    num_planned = sum(len(turn.lanes) for turn in turns)
    origin = provenance()
    settings = {
        **{
            key: value for key, value in engine.resolved().items() if key not in ("speculative", "speculation", "exact")
        },
        "weight_bytes": engine.model.spec.weight_bytes,
        "vocab_size": engine.model.spec.vocab_size,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "seed": seed,
        "num_questions": len(given_items),
        "num_prompts": len(items),
    }
    judge = Judge()
    made_by: dict[RunKey, str | None] = {}  # commits of runs that were made before

    def report(begun: float, *, partial: bool) -> BenchReport:
        session = Session(
            items=items,
            fitting=fitting,
            temperatures=list(given),
            weight_bytes=engine.model.spec.weight_bytes,
            split_is_real=engine.model.spec.device.type == "cpu",
            dram_read=dram_read() if dram_read is not None else None,
            seed=seed,
            questions=script.questions,
            right=_right(engine, judge, items, lanes) if judged else {},
        )
        measured = sum(len(runs) for lane in lanes for runs in lane.runs.values())
        figures: dict[str, Any] = {
            "num_prompts_too_long": len(items) - len(fitting) + len(script.too_long),
            "num_runs": measured,
            "num_runs_planned": num_planned,
            "seconds_measuring": perf_counter() - begun,
        }
        if judged and any(item.check is not None and item.check.kind == "python" for item in items):
            figures["sandbox"] = str(isolation())
        if any_revision:
            figures["runs_by_revision"] = {
                lane.method.label: _counted(made_by.get(key, origin["git_revision"]) for key in _keys(lane))
                for lane in lanes
            }
        lanes_of = {lane.method.label: (lane.method.config, lane.runs) for lane in lanes}
        return assemble(
            session, lanes_of, settings={**settings, **figures}, provenance=origin, peak_rss_bytes=peak_rss_bytes(),
            partial=partial,
        )  # fmt: skip

    with ExitStack() as stack:
        journal, known = None, {}
        if runs_file is not None:
            texts = [[script.first.get(i, items[i].prompt), items[i].prediction] for i in fitting]
            sha256 = hashlib.sha256(json.dumps(texts).encode())
            identity = {
                **settings,
                "num_prompts_too_long": len(items) - len(fitting),
                "methods": {
                    lane.method.label: {**lane.method.config.resolved(), "speculation": lane.method.speculation}
                    for lane in lanes
                },
                "temperatures": list(given),
                "prompts_sha256": sha256.hexdigest(),
                "versions": origin["versions"],
                **({} if any_revision else {"git_revision": origin["git_revision"]}),
                "processor": origin["machine"]["processor"],
                "accelerator": origin["machine"]["accelerator"],
                "torch_threads": origin["machine"]["torch_threads"],
            }
            journal = stack.enter_context(Journal(runs_file, identity))
            made = [record for record in journal.records if FINISHED not in record]
            known = {_key(record): DecodedRun.of(record) for record in made}
            made_by.update((_key(record), record.get(REVISION)) for record in made)
        begun, num_runs = perf_counter(), 0
        try:
            for temperature in given:
                left = [turn for turn in turns if turn.temperature == temperature]
                for lane in lanes:
                    if any(lane in turn.lanes and turn.key(lane) not in known for turn in left):
                        warm = replace(given[temperature], max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
                        measure(lane.engine, script.first[fitting[0]], warm, items[fitting[0]].prediction)
            current: tuple[float, int] | None = None
            for turn in turns:
                if current != (turn.temperature, turn.round):
                    current = turn.temperature, turn.round
                    for lane in lanes:  # else the stores of a method that learns hold the very texts it is asked for
                        lane.engine.forget()
                prompt = script.prompt(turn.index, lanes[0].runs, turn.temperature)
                if prompt is None:  # with the answer before it, it is longer than the context
                    num_planned -= len(turn.lanes)
                    continue
                runs, is_new = {}, False
                for lane in turn.lanes:
                    if progress is not None:
                        progress(num_runs, num_planned)
                    key = turn.key(lane)
                    if key not in known:
                        own = replace(given[turn.temperature], seed=seed + turn.index)
                        known[key] = measure(lane.engine, prompt, own, items[turn.index].prediction)
                        is_new = True
                        if journal is not None:
                            here = {REVISION: origin["git_revision"]} if any_revision else {}
                            journal.append({**dict(zip(KEY, key, strict=True)), **here, **known[key].record()})
                    runs[lane.method.label] = known[key]
                    num_runs += 1
                for lane in turn.lanes:  # now, so that a partial report has the same prompts for every method
                    lane.runs.setdefault((turn.temperature, turn.index), []).append(runs[lane.method.label])
                if on_prompt is not None and is_new:
                    on_prompt(PromptDone(num_runs, num_planned, turn.temperature, turn.round, items[turn.index], runs))
            if progress is not None:
                progress(num_planned, num_planned)
            if journal is not None and not any(FINISHED in record for record in journal.records):
                journal.append({FINISHED: True})
        except KeyboardInterrupt as error:
            raise BenchInterrupted(report(begun, partial=True) if any(lane.runs for lane in lanes) else None) from error
    return report(begun, partial=False)


def measure(engine: Engine, prompt: Sequence[int], params: SamplingParams, prediction: str | None = None) -> DecodedRun:
    """Decode one prompt, keeping the time of every step."""
    with engine.recorder.timing() as steps:
        completion = engine.generate(prompt, params, prediction=prediction)
    seconds_draft = sum(step.seconds_draft_model for step in steps)
    return DecodedRun(completion.token_ids, steps, completion.seconds_prefill, seconds_draft)


def _key(record: Mapping[str, Any]) -> RunKey:
    return record["temperature"], record["index"], record["round"], record["method"]


def _keys(lane: _Lane) -> Iterator[RunKey]:
    """Of all runs of a lane."""
    for (temperature, index), runs in lane.runs.items():
        yield from ((temperature, index, turn, lane.method.label) for turn in range(len(runs)))


def _counted(revisions: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(revision or "unknown" for revision in revisions))


def _bench_method(given: AnyMethod, *, draft: str | None, verify: str | None) -> BenchMethod:
    if isinstance(given, BenchMethod):
        return given
    if isinstance(given, str):
        return parse_method(given, draft=draft, verify=verify)
    config = speculative_config(given)
    return BenchMethod(f"{config.method}:{config.num_speculative_tokens}", config)


def _lanes(engine: Engine, methods: Sequence[BenchMethod]) -> list[_Lane]:
    """Plain decoding first, then each method; draft models of one name are loaded once."""
    named = [method for method in methods if method.config.method != "none"]
    plain = next((method for method in methods if method.config.method == "none"), parse_method("none"))
    twice = [method.label for method in named if [other.label for other in named].count(method.label) > 1]
    if twice:
        raise ConfigError(f"method {twice[0]!r} is given twice")
    lanes = [_Lane(plain, engine.with_method(plain.config, speculation="on"))]
    for method in named:
        shares = [lane.engine for lane in lanes if lane.method.config.weights == method.config.weights]
        lanes.append(
            _Lane(
                method,
                (shares[0] if shares else engine).with_method(
                    method.config, speculation=method.speculation, drafter_errors="raise"
                ),
            )
        )
    return lanes


def _turned(lanes: Sequence[_Lane], turn: int) -> list[_Lane]:
    start = turn % len(lanes)
    return [*lanes[start:], *lanes[:start]]


def _right(
    engine: Engine, judge: Judge, items: Sequence[Item], lanes: Sequence[_Lane]
) -> dict[tuple[str, float, int], bool]:
    """(method, temperature, message) -> whether its answer is right, of those that can be judged."""
    found = {}
    for lane in lanes:
        for (temperature, index), runs in lane.runs.items():
            check = items[index].check
            if check is not None:
                text = answer_text(engine, runs[0].token_ids)
                found[lane.method.label, temperature, index] = judge.right(check, text)
    return found
