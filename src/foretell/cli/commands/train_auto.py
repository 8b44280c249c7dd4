"""``foretell train auto``: a head for a target in one command, from prompts to what it is worth here.

Each stage leaves a file that is whole or a journal, and each is a function of the plan, which is made once: the same
command goes on where it was stopped, to the same head.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from foretell.cli.errors import say
from foretell.cli.output import waiting
from foretell.cli.train_progress import bar, time_text, told_if_interrupted
from foretell.cli.train_worth import HELD_OUT, METHOD, RESULT, TEMPERATURES, evaluate, load_target, read
from foretell.core.errors import ConfigError
from foretell.core.journal import first_difference
from foretell.core.jsontext import parse_json
from foretell.core.platform import lock_file
from foretell.core.prompts import entries, is_plain, read_text
from foretell.core.whole import write_whole
from foretell.kernels.cpu import cpu_flags
from foretell.model import trained

if TYPE_CHECKING:
    from foretell import Engine
    from foretell.model.target import CausalModel
    from foretell.train.plan import Size, Speeds, Task, TrainPlan
    from foretell.train.responses import Responses

PLAN, PROMPTS, LOCK = "plan.json", "prompts.jsonl", "lock"
ANSWER = 128
"""The most tokens of an answer."""
MAX_LENGTH = 640
"""Of a text to learn from: the longest passage, its task and an answer."""
SETTINGS: dict[str, Any] = {
    "num_slots": 4,
    "alone": 0.55,
    "batch_tokens": 1536,
    "max_length": MAX_LENGTH,
    "eval_every": 0,
}
"""Of training, where they are not the defaults: those that the head of smollm2-135m began with."""
PROBED, PROBE_STEPS = 4, 3
CHECKPOINT_S = 60.0
EVALUATION = 0.1
"""Share of the time for measuring what the head is worth."""
FEWEST, MOST = 4, 24
"""Held-out prompts that are decoded."""


def auto(task: "Task", drafter: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run or go on; the result. drafter: trains on a file of prompts (``train.py``). Raises ForetellError, OSError."""
    if not 0 < task.hours <= 10_000:
        raise ConfigError(f"--hours {task.hours:g} must be above 0 and at most 10000")
    with _folder(task.out):
        stopped = f"what is done is kept in {task.out}: the same command goes on"
        with told_if_interrupted(lambda: stopped):
            learning = replace(task, dtype=task.dtype or fast_dtype(task.device))
            if not (task.out / PLAN).exists():
                say(
                    f"a head for {task.target} within {time_text(3600 * task.hours)}, in {task.out}; first what it costs"
                )
            plan = _planned(learning)
            if (task.out / RESULT).exists():
                done = read(task.out / RESULT)
                say(f"it was done before: for another head give another --out, or delete {task.out}")
                return done
            _prompts(learning, plan)
        from foretell.train.answering import AskedPrompt

        given = {**plan["settings"], "seed": task.seed}
        asked = AskedPrompt(None, plan["answer"], TEMPERATURES, task.seed)
        run = task.out / "run"
        drafter(
            METHOD, task.target, str(task.out / PROMPTS), str(run), given, None, task.device, learning.dtype, True,
            asked, 1.0, task.no_color,
        )  # fmt: skip
        with told_if_interrupted(lambda: stopped):
            return evaluate(task, plan, run)


def fast_dtype(device: str) -> str | None:
    """The dtype in which texts are written, read and learned from where none was asked for. torch multiplies bfloat16 twice
    as fast as float32 on a CPU that has instructions for it (Zen 4: 190 and 85 GFLOP/s a core). What the head is worth is
    still measured in the target's usual dtype."""
    return "bfloat16" if device == "cpu" and cpu_flags() & {"avx512_bf16", "amx_bf16"} else None


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The folder is there, can be written to, holds nothing else, and is this process's alone. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written to: {error.strerror}; give another folder") from None
    try:
        if not lock_file(held):
            raise ConfigError(
                f"--out {out} is in use by another 'foretell train auto': wait for it, or give another folder"
            )
        others = [file.name for file in out.iterdir() if file.name != LOCK]
        if others and not any(name in (PLAN, f".{PLAN}.part") for name in others):
            raise ConfigError(f"--out {out} is not empty and holds no run of 'train auto': give another folder")
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror}; make room, and the same command goes on", str(out)) from error
    finally:
        os.close(held)


# -- the plan ----------------------------------------------------------------------------------------------------------


def _planned(task: "Task") -> dict[str, Any]:
    """The plan of this run: read, or made now. Raises ConfigError where it is of another run."""
    from foretell.model.identity import target_hash
    from foretell.train.responses import file_sha256

    engine = load_target(task)
    if engine.tokenizer is None:
        raise ConfigError(
            f"--target {task.target} has no tokenizer, and prompts are texts: put tokenizer.json beside it"
        )
    identity = {
        "target_hash": target_hash(engine.model),
        "dtype": task.dtype,
        "device": task.device,
        "hours": task.hours,
        "seed": task.seed,
        "data_sha256": file_sha256(task.data) if task.data is not None else None,
    }
    file = task.out / PLAN
    if file.exists():
        plan = read(file)
        difference = first_difference(plan["identity"], identity)
        if difference is not None:
            key, old, new = difference
            raise ConfigError(
                f"{task.out} holds a run with {key} = {old!r}, and now {key} is {new!r}: give the arguments of that run "
                f"to go on with it, another --out for a new one, or delete the folder"
            )
        return plan
    begun = perf_counter()
    with waiting("measuring how fast answers, training and guesses are here", no_color=task.no_color):
        plan = {"identity": identity, **_made(task, engine, begun)}
    write_whole(file, [json.dumps(plan, indent=1).encode()])
    say(plan["said"])
    return plan


def _made(task: "Task", engine: "Engine", begun: float) -> dict[str, Any]:
    from foretell.engine.request.conversation import is_instruct
    from foretell.model.load import load_model
    from foretell.train import responses
    from foretell.train.own_prompts import found_prompts
    from foretell.train.plan import MOST_PROMPTS, SIZES, Speeds, check_least, choose

    spec = engine.model.spec
    answer = min(ANSWER, spec.max_positions // 4)
    given = _given(task, lambda: engine)
    if given is not None and len(given) < 2 * FEWEST:
        raise ConfigError(f"--data {task.data} holds {len(given)} prompts, and {2 * FEWEST} are the least")
    r = random.Random(f"probe/{task.seed}")
    chats = is_instruct(engine.tokenizer, spec.eos_token_ids)
    texts = found_prompts(r, 24, chats=chats) if given is None else r.sample(given, min(24, len(given)))
    with TemporaryDirectory() as folder:
        file = Path(folder) / PROMPTS
        file.write_bytes(_lines(texts))
        ids = responses.read_prompts(file, engine, max_new_tokens=answer, max_length=MAX_LENGTH)
        ids = [one for one in ids if len(one) < min(MAX_LENGTH, spec.max_positions - answer)]
        responses.regenerate(engine, ids[:2], max_new_tokens=2)  # what is made once is not timed
        few, _ = _answered(engine, ids, 2)
        some, probe = _answered(engine, ids, max(3, min(26, answer)))
        seconds_answer = max(1e-9, some - few) / max(1, probe.num_tokens - 2 * len(ids))
        seconds_read = max(0.0, few - 2 * len(ids) * seconds_answer) / sum(map(len, ids))
        most = MOST_PROMPTS if given is None else len(given) - FEWEST
        sizes = {"prompt_tokens": sum(map(len, ids)) / len(ids), "answer_tokens": 0.8 * answer}
        known = Speeds(seconds_read, seconds_answer, 0.0, 0.0, 0.0, 0)
        least = check_least(task.hours, known, most, **sizes)
        say(f"answers take {1e3 * seconds_answer:.1f} ms a token: {time_text(3600 * least)} at least, beside learning")
        model = load_model(task.target, dtype=task.dtype, device=task.device, implementation="transformers")
        plain = list[float]()

        def measured(size: "Size") -> "Speeds":
            speeds, seconds = _measured(engine, model, probe, size, Path(folder))
            plain.append(seconds)
            speeds = replace(speeds, read=seconds_read, answer=seconds_answer)
            smallest = replace(speeds, learn=speeds.learn * estimated(SIZES[-1]) / estimated(size))
            least = check_least(task.hours, smallest, most, **sizes)
            say(f"a head learns at {1e3 * speeds.learn:.1f} ms a token: {time_text(3600 * least)} at least in all")
            return speeds

        estimated = partial(_estimated, model)
        plan, speeds = choose(task.hours, measured, estimated=estimated, most_prompts=most, **sizes)
    decoded = 5 * answer / 2 * plain[-1]  # seconds for a prompt, by all methods at both temperatures
    count = max(FEWEST, min(MOST, int(EVALUATION * 3600 * task.hours / max(decoded, 1e-9))))
    count = count if given is None else min(count, len(given) - plan.num_prompts)
    settings = _settings(model, plan.size) | {
        "epochs": plan.epochs,
        "keep_gib": _keep_gib(model, plan, answer),
        "checkpoint_every": max(1, round(CHECKPOINT_S / max(1e-6, speeds.learn * SETTINGS["batch_tokens"]))),
    }
    said = (
        f"plan: {plan.num_prompts} prompts, answered and read {plan.epochs:g} times in "
        f"{str(model.spec.dtype).removeprefix('torch.')} by an {METHOD} head of "
        f"{speeds.num_parameters / 1e6:.2g}M weights to learn ({plan.why}); about {time_text(plan.seconds)}, beside "
        f"{time_text(perf_counter() - begun)} of measuring before it and some after"
    )
    return {"plan": asdict(plan), "speeds": asdict(speeds), "settings": settings, "answer": answer, "evaluated": count,
            "said": said}  # fmt: skip


def _answered(engine: "Engine", prompts: list[list[int]], count: int) -> tuple[float, "Responses"]:
    """Seconds for so many tokens after each prompt, and what was written."""
    from foretell.train.responses import regenerate

    begun = perf_counter()
    found = regenerate(engine, prompts, temperatures=TEMPERATURES, max_new_tokens=count)
    return perf_counter() - begun, found


def _settings(model: "CausalModel", size: "Size") -> dict[str, Any]:
    """Of a head of this size, and how it is trained."""
    import torch

    from foretell.train.making import Making

    own = Making(model, None, 0).shape["intermediate_size"]  # type: ignore[arg-type]  # sizes need no texts
    wide = max(32, round(own * size.intermediate / 32) * 32) if size.intermediate < 1 else own
    half = model.spec.dtype == torch.bfloat16
    return {
        **SETTINGS,
        "intermediate_size": wide,
        "draft_vocab_size": min(size.draft_vocab_size, model.spec.vocab_size),
        "precision": "bfloat16" if half else "float32",
        "save_dtype": "bfloat16" if half else "float32",
    }


def _estimated(model: "CausalModel", size: "Size") -> float:
    """The cost of a guess in plain passes, by the weights that both read; those of a head are rounded to 8 bits but for
    float32."""
    import torch

    from foretell.train.making import Making

    hidden, shape, settings = model.spec.hidden_size, Making(model, None, 0).shape, _settings(model, size)  # type: ignore[arg-type]
    heads = 2 * shape["num_heads"] + 2 * shape["num_kv_heads"]
    columns = 2 * heads * shape["head_dim"] + 3 * settings["intermediate_size"] + settings["draft_vocab_size"]
    return float(hidden * columns * (4 if model.spec.dtype == torch.float32 else 1) / model.spec.weight_bytes)


def _keep_gib(model: "CausalModel", plan: "TrainPlan", answer: int) -> float:
    """Memory for the target's outputs on all texts, at most a quarter of what is free."""
    import psutil

    wanted = plan.num_prompts * MAX_LENGTH / 2 * 4 * model.spec.hidden_size * model.spec.dtype.itemsize
    return round(float(min(wanted, psutil.virtual_memory().available / 4)) / 2**30, 2)


def _measured(
    engine: "Engine", model: "CausalModel", probe: "Responses", size: "Size", folder: Path
) -> tuple["Speeds", float]:
    """What a head of this size costs, learning and guessing (answers are left out), and the seconds of a plain pass. A
    fresh head is trained for a few steps on the same texts, of which the first alone needs the target's outputs."""
    from foretell.bench import Item, run_bench
    from foretell.heads.teacher import Teacher
    from foretell.train import methods
    from foretell.train.plan import Speeds
    from foretell.train.trainer import LOG, train

    out = folder / f"{size.intermediate:g}-{size.draft_vocab_size}"
    texts = probe.take(range(min(PROBED, len(probe))))
    given = {**_settings(model, size), "batch_tokens": 2**20, "keep_gib": 1.0, "steps": PROBE_STEPS, "alone": 0.0}
    prepared = methods.prepare(METHOD, model, texts, given)
    train(prepared.objective, Teacher(model), texts, out, prepared.config, save=prepared.save)
    rows = [parse_json(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    learn = (rows[-1]["seconds"] - rows[0]["seconds"]) / (PROBE_STEPS - 1) / rows[0]["num_tokens"]
    label = max(0.0, rows[0]["seconds"] / rows[0]["num_tokens"] - learn)
    learn *= 1 - SETTINGS["alone"] * (1 - 1 / SETTINGS["num_slots"])  # for so long slot 1 is learned alone
    ids = [probe.text(index)[: int(probe.start[index])] for index in range(min(2, len(probe)))]
    assert engine.tokenizer is not None
    items = [Item(index, "all", engine.tokenizer.decode(one), "text") for index, one in enumerate(ids)]
    config = {"method": METHOD, "model": str(out), "num_speculative_tokens": 5}
    figures = run_bench(engine, items, [config], max_new_tokens=16).temperatures[0].methods[-1].overall
    weights = sum(parameter.numel() for parameter in prepared.objective.head.parameters() if parameter.requires_grad)
    cost = figures.draft_cost if figures.draft_cost is not None else _estimated(model, size)
    return Speeds(0.0, 0.0, label, learn, cost, weights), figures.seconds_plain_pass or 0.0


# -- prompts -----------------------------------------------------------------------------------------------------------


def _given(task: "Task", load: Callable[[], "Engine"]) -> list[dict[str, Any]] | None:
    """The prompts of --data; None where the target makes its own. load: the target, whose tokens cut a plain text."""
    if task.data is None:
        return None
    text = read_text(task.data, f"--data {task.data}")
    if not is_plain(text, Path(task.data).suffix):
        return [dict(entry.record) for entry in entries(text, task.data, suffix=Path(task.data).suffix)]
    from foretell.train.responses import read_prompts

    engine = load()
    assert engine.tokenizer is not None
    return [{"format": "text", "prompt": engine.tokenizer.decode(ids)} for ids in read_prompts(task.data, engine)]


def _prompts(task: "Task", plan: Mapping[str, Any]) -> None:
    """Write those to learn from and, before them, those that the head is measured on, which it never sees."""
    if (task.out / PROMPTS).exists():
        return
    held_out, count = plan["evaluated"], plan["plan"]["num_prompts"]
    found = _given(task, lambda: load_target(task))
    if found is None:
        from foretell.train.own_prompts import make_prompts

        engine = load_target(task)
        with bar("writing prompts", task.no_color) as update:
            found = make_prompts(
                engine, held_out + count, task.seed, task.out / "questions.jsonl",
                lambda done, total: update(done, total, f"{done}/{total} questions"),
            )  # fmt: skip
    else:
        random.Random(f"split/{task.seed}").shuffle(found)
    write_whole(task.out / HELD_OUT, [_lines(found[:held_out])])
    write_whole(task.out / PROMPTS, [_lines(found[held_out : held_out + count])])


def _lines(records: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def default_out(target: str) -> Path:
    """Where the head of a target goes where nothing is said. Raises ModelError."""
    return trained.heads_directory() / trained.called(target)
