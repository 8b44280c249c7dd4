"""Real checkpoints on public questions: every method against plain decoding, interleaved, cell by cell.

    python -m benchmarks.real --results build/real.jsonl --models DIR [--model qwen] [--weights bf16,int8]
                              [--methods draft_model:3,suffix,auto:draft_model:5,hybrid:second=draft_model]
                              [--temperatures 0,1]
                              [--suite spec-bench] [--sample 60] [--limit N] [--tokens 128] [--rounds 1] [--minutes 10]
    python -m benchmarks.real --results build/real.jsonl --show

A cell is one method of one model with one kind of weights at one temperature, on one set of questions. A finished cell is
a line of the results file, and is not measured again; cells that are missing are measured together, with plain decoding
beside them on every question (``foretell.bench``), and their runs are kept too: stopped by --minutes or Ctrl-C, the same
command goes on. ``--show`` prints all cells of the file.

A cell is known by what is measured: the models' files (names, sizes, times of change), the method with all its options, the
questions, the machine and the versions of foretell and torch. Not by the commit of foretell's source: a row says how many
of its runs come from which, and the table says so where they are not all from one.

Models: smollm2 (SmolLM2-135M-Instruct) and qwen (Qwen2.5-Coder 1.5B with the 0.5B as draft), which are looked for under
--models by the names below; any other by ``--model NAME=TARGET[,draft=DIR][,eagle3=DIR][,dflash=DIR]``, which also gives a
known one its drafters. Weights: bf16, int8, int4, as ``foretell bench --weights``; "auto" for a GGUF file is the
file's own.

auto: ``speculation="auto"``, costs measured before the first question. It guesses with the one method behind its name. Two
bars are checked for it: against plain decoding in every task (0.98) and against the best fixed choice overall (0.95).
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from foretell import Engine, speculative_config
from foretell.bench import (
    BenchInterrupted,
    BenchMethod,
    Item,
    Suite,
    parse_method,
    read_suite,
    run_bench,
    sample,
    select,
)
from foretell.checkpoints.catalogue import pulled
from foretell.checkpoints.directories import resolve
from foretell.core.errors import ForetellError
from foretell.core.provenance import provenance
from foretell.kernels.cpu import cpu_flags
from foretell.kernels.functions import dram_read_bandwidth

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni")
AUTO_BARS = (0.98, 0.95)
PLAIN = parse_method("none")


@dataclass(frozen=True)
class Model:
    """A target, and what drafts for it."""

    target: str
    draft: str | None = None
    eagle3: str | None = None
    dflash: str | None = None

    def methods(self) -> list[str]:
        """What is measured where nothing is asked for."""
        found = [f"draft_model:{count}" for count in range(1, 6)] if self.draft else []
        found += ["eagle3:5", "hybrid:15"] if self.eagle3 else []
        found += ["dflash:4"] if self.dflash else []
        auto = "draft_model:5" if self.draft else "hybrid:15" if self.eagle3 else "suffix"
        return [*found, "suffix", "ngram", f"auto:{auto}"]

    def method(self, text: str, draft_weights: str) -> BenchMethod | None:
        """A method with its weights; None where this model has none for it."""
        name = text.removeprefix("auto:").split(":")[0]
        drafts = name == "draft_model" or "second=draft_model" in text
        second = self.draft if drafts else self.dflash if "second=dflash" in text else self.eagle3
        weights = {"draft_model": self.draft, "eagle3": self.eagle3, "dflash": self.dflash, "hybrid": second}
        if name in weights and weights[name] is None:
            return None
        method = parse_method(text, draft=weights.get(name))
        if not drafts or "draft_weights=" in text:
            return method
        return replace(method, config=speculative_config({**method.config.resolved(), "draft_weights": draft_weights}))


MODELS = {
    "smollm2": Model("smollm2-135m-hf"),
    "qwen": Model("qwen2.5-coder-1.5b-hf", draft="qwen2.5-coder-0.5b-hf"),
}


def chosen_models(texts: Sequence[str] | None, folder: Path | None) -> dict[str, Model]:
    """``NAME[=TARGET][,draft=DIR][,eagle3=DIR][,dflash=DIR]`` of each option; the known ones without any."""
    models = {}
    for text in texts or MODELS:
        head, *rest = text.split(",")
        name, _, target = head.partition("=")
        if name not in MODELS and not target:
            raise SystemExit(f"--model {name} is not one of {', '.join(MODELS)}: give --model {name}=TARGET")
        known = replace(MODELS[name]) if name in MODELS else Model(target)
        if folder is not None and name in MODELS:
            known = replace(
                known, target=str(folder / known.target), draft=str(folder / known.draft) if known.draft else None
            )
        given = dict(part.split("=", 1) for part in rest)
        if not given.keys() <= {"draft", "eagle3", "dflash"}:
            raise SystemExit(f"--model {text}: expected NAME=TARGET[,draft=DIR][,eagle3=DIR][,dflash=DIR]")
        models[name] = replace(known, **given, **({"target": target} if target else {}))
    return models


def load(model: Model, weights: str, prefix_memory_gib: float) -> Engine:
    """The engine. Keys and values are in bfloat16 for all weights."""
    return Engine.load(model.target, dtype="bfloat16", weights=weights, prefix_memory_gib=prefix_memory_gib)


@dataclass(frozen=True)
class Group:
    """Cells that are measured together: all but the method."""

    model: str
    target: str
    draft: str | None
    eagle3: str | None
    dflash: str | None
    weights: str
    draft_weights: str
    temperature: float
    suite: str
    questions: str  # digest of them, so that another file of the same name is another cell
    tokens: int
    rounds: int
    threads: int
    files: str  # digest of the models' files
    machine: str  # processor, accelerator
    versions: str

    def key(self, method: BenchMethod) -> str:
        """Of a cell. A model that was moved is the same model."""
        places = {"target": None, "draft": None, "eagle3": None, "dflash": None}
        config = {**method.config.resolved(), "model": None, "speculation": method.speculation}
        return json.dumps({**asdict(self), **places, "method": method.label, "config": config}, sort_keys=True)


class OutOfTime(KeyboardInterrupt):
    """--minutes are over: stops ``run_bench`` as Ctrl-C does."""


def measure(
    group: Group, engine: Engine, methods: list[BenchMethod], items: list[Item], runs: Path, until: float
) -> Iterator[dict[str, Any]]:
    """The cells of these methods, plain decoding among them."""

    def watch(done: int, total: int) -> None:
        if monotonic() > until:
            raise OutOfTime

    begun = monotonic()
    named = {method.label: method for method in (PLAIN, *methods)}
    report = run_bench(
        engine, items, methods, temperatures=[group.temperature], max_new_tokens=group.tokens, rounds=group.rounds,
        dram_read=dram_read_bandwidth, progress=watch, runs_file=runs, any_revision=True,
        judged=any(item.check for item in items),
        on_prompt=lambda done: print(
            f"  {done.num_runs}/{done.num_planned} {done.item.category} {done.item.question_id}", file=sys.stderr
        ),
    )  # fmt: skip
    for method in report.temperatures[0].methods:
        yield {
            "key": group.key(named[method.label]), **asdict(group), "method": method.label, "report": asdict(method),
            "revisions": report.settings["runs_by_revision"][method.label],
            "weight_bytes": report.settings["weight_bytes"], "too_long": report.settings["num_prompts_too_long"],
            "dram_read_bytes_per_second": report.dram_read_bytes_per_second, "flags": flags(),
            "seconds": monotonic() - begun, "provenance": report.provenance,
        }  # fmt: skip


def digest(values: Sequence[Any]) -> str:
    """Twelve hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, default=asdict).encode()).hexdigest()[:12]


def files_of(names: Sequence[str | None]) -> str:
    """Digest of the files of models and heads: their names, sizes and times of change. A hub id stands for itself."""
    found: list[Any] = []
    for name in names:
        if name is None or not (name.split("/")[0] == "bundled" or Path(name).expanduser().exists() or pulled(name)):
            found.append(name)
            continue
        place = resolve(name)
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        stats = [(path.name if path == place else str(path.relative_to(place)), path.stat()) for path in files]
        found.append([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
    return digest(found)


def flags() -> list[str]:
    """Those of the processor that the kernels care about."""
    have = cpu_flags()
    return [flag for flag in FLAGS if flag in have]


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Finished cells by key; a line that was cut short is none."""
    cells: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            cell = json.loads(line)
        except ValueError:
            continue
        cells[cell["key"]] = cell
    return cells


def show(cells: Sequence[dict[str, Any]]) -> None:
    """A table for each model, weights, temperature and set of questions, and what auto attained."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        key = tuple(
            cell[name]
            for name in (
                "model",
                "weights",
                "draft_weights",
                "temperature",
                "suite",
                "questions",
                "tokens",
                "rounds",
                "threads",
            )
        ) + tuple(cell.get(name) for name in ("files", "machine", "versions"))
        groups.setdefault(key, []).append(cell)
    for key, found in groups.items():
        model, weights, drafts, temperature, suite, _, tokens, rounds, threads, *_ = key
        machine, last = found[0]["provenance"]["machine"], found[0]
        draft = f", draft in {drafts}" if found[0]["draft"] and drafts != weights else ""
        print(f"\n## {model}, {weights}{draft}, temperature {temperature:g}\n")
        limit = ""
        if last["dram_read_bytes_per_second"]:
            rate = last["dram_read_bytes_per_second"]
            limit = f"; memory reads {rate / 1e9:.1f} GB/s, so {rate / last['weight_bytes']:.1f} passes/s at most"
        print(
            f"{suite}, {tokens} tokens an answer, {rounds} rounds, {threads} threads; {machine['processor']} "
            f"({', '.join(last['flags'])}), load {machine['load_average']}; "
            f"{last['weight_bytes'] / 1e6:.0f} MB a pass{limit}\n"
        )
        tasks = [part["category"] for part in found[0]["report"]["categories"]]
        print("| method | tok/s | ratio to plain | " + " | ".join(tasks) + " | mean | length | by position | same |")
        print("|---" * (len(tasks) + 7) + "|")
        for cell in sorted(found, key=lambda one: one["method"] != "none"):
            print(row(cell["report"]))
        for line in (*origins(found), *bars(found)):
            print(f"\n{line}")


def row(report: dict[str, Any]) -> str:
    """A method's line of the table."""
    overall, speedup = report["overall"], report["overall"]["speedup"]
    positions = " ".join(f"{rate:.2f}" for rate in overall["conditional_acceptance_per_pos"])
    parts = [f"{part['speedup']['value']:.2f}" for part in report["categories"]]
    return (
        f"| `{report['label']}` | {overall['tokens_per_second']:.1f} | {speedup['value']:.2f} [{speedup['low']:.2f}, "
        f"{speedup['high']:.2f}] | {' | '.join(parts)} | {report['macro']['speedup']['value']:.2f} | "
        f"{overall['mean_acceptance_length']:.2f} | {positions} | {overall['num_identical']}/{overall['num_prompts']} |"
    )


def origins(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """From which commits the runs of a table come, where they are not all from one."""
    counts = {
        cell["method"]: cell.get("revisions") or {cell["provenance"].get("git_revision") or "unknown": None}
        for cell in cells
    }
    if len({revision for found in counts.values() for revision in found}) < 2:
        return
    parts = []
    for method, found in counts.items():
        each = [f"{short(name)} ({count} runs)" if len(found) > 1 else short(name) for name, count in found.items()]
        parts.append(f"{method}: {', '.join(each)}")
    yield f"Not all from one revision: {'; '.join(parts)}"


def short(revision: str) -> str:
    """A commit, as people write it."""
    commit, changes, _ = revision.partition("+changes")
    return commit[:10] + changes


def bars(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What auto attained against plain decoding in every task, and against the best fixed choice overall."""

    def ratio(cell: dict[str, Any]) -> float:
        return float(cell["report"]["overall"]["speedup"]["value"])

    fixed = [cell for cell in cells if not cell["method"].startswith("auto:") and cell["method"] != "none"]
    for cell in cells:
        if not cell["method"].startswith("auto:"):
            continue
        low = min(cell["report"]["categories"], key=lambda part: part["speedup"]["value"])
        value = low["speedup"]["value"]
        said = f"{cell['method']}: at least {value:.2f} of plain in every task"
        said += f" (lowest: {low['category']}; bar {AUTO_BARS[0]})"
        if fixed:
            best = max(fixed, key=ratio)
            share = ratio(cell) / max(1.0, ratio(best))
            name = best["method"] if ratio(best) > 1 else "plain decoding"
            said += f"; {share:.2f} of the best fixed choice, {name} (bar {AUTO_BARS[1]})"
        yield said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--models", type=Path, help="folder of the known models")
    parser.add_argument(
        "--model", action="append", help="NAME[=TARGET][,draft=DIR][,eagle3=DIR][,dflash=DIR]; may be repeated"
    )
    parser.add_argument("--weights", default="bf16", help="of the target: bf16, int8, int4, auto, separated by commas")
    parser.add_argument(
        "--draft-weights", default="least", help="of the draft model: same as the target's, or one of these"
    )
    parser.add_argument("--methods", help="default: all that the model has weights for")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--suite", default="spec-bench")
    parser.add_argument("--sample", type=int, default=60, help="0: the whole suite")
    parser.add_argument("--limit", type=int, help="at most so many questions of a category")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prefix-memory-gib", type=float, default=0.0, help="prompts that begin alike are read once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    args = parser.parse_args()
    cells = read(args.results)
    if args.show:
        show(list(cells.values()))
        return
    until = monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    suite = read_suite(args.suite)
    suite = sample(suite, args.sample) if args.sample else suite
    suite = (
        Suite(f"{suite.name}/{args.limit} each", select(suite.items, limit=args.limit), suite.notes)
        if args.limit
        else suite
    )
    print("".join(f"{note}\n" for note in suite.notes), end="", file=sys.stderr)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    try:
        for name, model in chosen_models(args.model, args.models).items():
            for weights in args.weights.split(","):
                run(name, model, weights, suite.name, suite.items, args, until)
    except (OutOfTime, BenchInterrupted):
        print("stopped: the same command goes on", file=sys.stderr)
    except ForetellError as error:
        raise SystemExit(str(error)) from None
    show(list(read(args.results).values()))


def run(
    name: str, model: Model, weights: str, suite: str, items: list[Item], args: argparse.Namespace, until: float
) -> None:
    """All missing cells of a model with these weights, written as they are finished."""
    engine: Engine | None = None
    drafts = weights if args.draft_weights == "same" else args.draft_weights
    for temperature in map(float, args.temperatures.split(",")):
        origin = provenance()
        machine, versions = origin["machine"], origin["versions"]
        group = Group(
            name, model.target, model.draft, model.eagle3, model.dflash, weights, drafts, temperature, suite, digest(items),
            args.tokens, args.rounds, args.threads,
            files=files_of([model.target, model.draft, model.eagle3, model.dflash]),
            machine=", ".join(filter(None, (machine["processor"], machine["accelerator"]))),
            versions=", ".join(f"{part} {versions[part]}" for part in ("foretell", "torch")),
        )  # fmt: skip
        asked = args.methods.split(",") if args.methods else model.methods()
        methods = [method for text in asked if text != "none" and (method := model.method(text, drafts)) is not None]
        done = read(args.results)
        methods = [method for method in methods if group.key(method) not in done]
        if not methods and (group.key(PLAIN) in done or asked != ["none"]):
            continue
        if monotonic() > until:
            raise OutOfTime
        engine = engine or load(model, weights, args.prefix_memory_gib)
        labels = ", ".join(method.label for method in methods)
        print(f"{name}, {weights}, temperature {temperature:g}: none, {labels}", file=sys.stderr)
        parts = [asdict(group), [group.key(method) for method in methods], versions]
        runs = args.results.with_name(f"{args.results.stem}.{digest(parts)}.runs.jsonl")
        with args.results.open("a", encoding="utf-8") as stream:
            for cell in measure(group, engine, methods, items, runs, until):
                stream.write(json.dumps(cell) + "\n")
        runs.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
