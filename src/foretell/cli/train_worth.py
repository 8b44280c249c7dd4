"""The last stage of ``foretell train auto``: how the head is stored, how deep it guesses, and what it is worth here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.cli import settings
from foretell.cli.errors import say
from foretell.cli.train_progress import bar
from foretell.core.errors import ConfigError, ForetellError
from foretell.core.jsontext import parse_json
from foretell.core.whole import write_whole
from foretell.model import trained

if TYPE_CHECKING:
    from foretell import Engine
    from foretell.bench import BenchReport, Figures
    from foretell.train.plan import Task

METHOD = "eagle3"
RESULT, HELD_OUT = "result.json", "held_out.jsonl"
FORMS = {"4 bits": "Q4_0", "8 bits": "Q8_0"}
"""How a head is stored, from the smallest form on, by the type of its blocks."""
LOSS = 0.01
"""Of kept first guesses, for which the smaller form is not taken."""
WORTH = 1.03
"""The least mean speed, in plain decoding's, for which a head is used where nothing is said."""
TEMPERATURES = (0.0, 1.0)


def evaluate(task: "Task", plan: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Choose how the head is stored and how deep it guesses, measure it on held-out prompts, and say where it is used."""
    from foretell.bench import load_suite

    engine = load_target(task)
    items = load_suite(task.out / HELD_OUT)
    forms = {"as trained": run, **_stored(task, engine, run)}
    configs = {
        name: {"method": METHOD, "model": str(path), "num_speculative_tokens": 5} for name, path in forms.items()
    }
    first = _bench(task, engine, items, configs, "forms", plan, (0.0,))
    kept = {name: _first_kept(_figures(first, 0.0, name)) for name in forms}
    form = next((name for name in FORMS if name in forms and kept[name] >= kept["as trained"] - LOSS), "as trained")
    depth = best_depth(_figures(first, 0.0, form))
    head = forms[form]
    for name, path in forms.items():
        if name not in (form, "as trained"):
            path.unlink(missing_ok=True)
    chosen = {"the head": {"method": METHOD, "model": str(head), "num_speculative_tokens": depth}}
    now = trained.trained_head(task.target)
    before = dict(trained.bundled_speculation(task.target))
    if now is not None and Path(now.head) != head.resolve():
        before = {**now.speculative, "model": now.head}
    if before["method"] != "none":
        chosen["until now"] = before
    report = _bench(task, engine, items, chosen, "worth", plan, TEMPERATURES)
    speed = {name: {f"{t:g}": _figures(report, t, name).speedup.value for t in TEMPERATURES} for name in chosen}
    cold = _figures(report, 0.0, "the head")
    size = sum(file.stat().st_size for file in ([head] if head.is_file() else head.glob("*.safetensors")))
    mean = {name: (values["0"] * values["1"]) ** 0.5 for name, values in speed.items()}
    is_used = mean["the head"] >= max(WORTH, mean.get("until now", 0.0))
    result = {
        "target": task.target, "method": METHOD, "head": str(head.resolve()), "bytes": size, "stored": form,
        "num_speculative_tokens": depth, "speedup": speed["the head"], "speedup_until_now": speed.get("until now"),
        "tokens_per_step": cold.mean_acceptance_length, "first_guesses_kept": _first_kept(cold),
        "first_guesses_kept_by_form": kept, "num_prompts": cold.num_prompts, "is_used": is_used,
    }  # fmt: skip
    write_whole(task.out / "README.md", [card(task, plan, result).encode()])
    if is_used:
        trained.use(task.target, head, METHOD, depth)
    else:
        trained.unuse(task.target, head)
    write_whole(task.out / RESULT, [json.dumps(result, indent=1).encode()])
    return result


def load_target(task: "Task") -> "Engine":
    """The target, with nothing that guesses. Raises ModelError."""
    with settings.loading(task.target, no_color=task.no_color):
        from foretell import Engine

        return Engine.load(task.target, speculative="none", device=task.device, dtype=task.dtype)


def _stored(task: "Task", engine: "Engine", run: Path) -> dict[str, Path]:
    """Files of the head by their form, in fewer bits."""
    from foretell.checkpoints.directories import resolve
    from foretell.checkpoints.gguf.write_heads import vocabulary_of
    from foretell.heads import formats

    spec = engine.model.spec
    made = {}
    try:
        vocabulary = vocabulary_of(resolve(task.target), name=task.target, size=spec.vocab_size)
        for name, kind in FORMS.items():
            file = task.out / f"head-{kind}.gguf"
            head = formats.load(run, num_layers=spec.num_layers, name=str(run))
            formats.save_gguf(head, file, vocabulary, target=spec, kind_of_matrices=kind)
            made[name] = file
    except ForetellError as error:
        say(f"the head is stored as it was trained, not in fewer bits: {error}")
    return made


def _bench(
    task: "Task", engine: "Engine", items: list[Any], configs: Mapping[str, Mapping[str, Any]], name: str,
    plan: Mapping[str, Any], temperatures: Sequence[float],
) -> "BenchReport":  # fmt: skip
    from foretell import speculative_config
    from foretell.bench import BenchMethod, run_bench

    methods = [BenchMethod(label, speculative_config(config)) for label, config in configs.items()]
    with bar(f"measuring {name}", task.no_color) as update:
        return run_bench(
            engine, items, methods, temperatures=temperatures, max_new_tokens=max(8, plan["answer"] // 2), seed=task.seed,
            progress=lambda done, total: update(done, total, f"{done}/{total} answers"),
            runs_file=task.out / f"{name}.runs.jsonl", any_revision=True,
        )  # fmt: skip


def _figures(report: "BenchReport", temperature: float, label: str) -> "Figures":
    at = next(each for each in report.temperatures if each.temperature == temperature)
    return next(method.overall for method in at.methods if method.label == label)


def _first_kept(figures: "Figures") -> float:
    return figures.conditional_acceptance_per_pos[0] if figures.conditional_acceptance_per_pos else 0.0


def best_depth(figures: "Figures") -> int:
    """How many guesses a step pay best, by the cost model: 1 to as many as were made. The pass grows evenly with them."""
    from foretell.costs.cost_model import speedup, step_cost

    kept = figures.conditional_acceptance_per_pos
    wide, guess, beside = figures.verify_cost or 1.0, figures.draft_cost or 0.0, figures.overhead_cost or 0.0
    best, tokens, chance = (0.0, 1), 1.0, 1.0
    for depth, share in enumerate(kept, 1):
        chance *= share
        tokens += chance
        cost = step_cost(1.0 + max(0.0, wide - 1.0) * depth / len(kept), depth, guess, beside)
        best = max(best, (speedup(tokens, cost), depth), key=lambda each: each[0])
    return best[1]


def worth(result: Mapping[str, Any]) -> str:
    """What it is worth here, in one line."""
    speed, depth, tokens = result["speedup"], result["num_speculative_tokens"], result["tokens_per_step"]
    line = (
        f"worth {speed['0']:.2f} times plain here (T = 0), {speed['1']:.2f} (T = 1), {tokens:.2f} tokens "
        f"a step; head in {result['head']} ({result['bytes'] / 1e6:.1f} MB)"
    )
    if result["is_used"]:
        return f"{line}; from now on it guesses for {result['target']} where no method is named ({depth} a step)"
    until = result["speedup_until_now"]
    why = "it is not worth its cost"
    if until is not None:
        why += f", or less than what guesses until now ({until['0']:.2f} and {until['1']:.2f})"
    how = f"--method {result['method']} --draft {result['head']}"
    return f"{line}; not used where no method is named: {why}. {how} tries it"


def card(task: "Task", plan: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The head's README.md."""
    source = f"`{task.data}`" if task.data is not None else "the target itself, and texts of this machine"
    made, shape = plan["plan"], plan["plan"]["size"]
    return f"""---
library_name: foretell
---
# {result["method"]} head for {result["target"]}

By `foretell train auto`, for target weights `{plan["identity"]["target_hash"]}`.

- prompts: {made["num_prompts"]}, from {source}; answers by the target at temperatures 0 and 1
- training: {made["epochs"]:g} times over them; draft vocabulary {shape["draft_vocab_size"]}; {made["why"]}
- stored: {result["stored"]}
- on {result["num_prompts"]} prompts held out: {result["first_guesses_kept"]:.3f} of the first guesses kept;
  {worth(result)}
"""


def read(file: Path) -> dict[str, Any]:
    """A file of this run. Raises ConfigError."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found
    except (OSError, ValueError, AssertionError):
        raise ConfigError(f"{file} cannot be read; delete {file.parent}, and the same command begins anew") from None
