"""The target's answers to the prompts of a file, made once and kept: what a drafter learns from."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accelerate import PartialState

from foretell import Engine
from foretell.core.errors import ConfigError
from foretell.core.journal import first_difference
from foretell.model.target import CausalModel
from foretell.train import responses as r

Bar = Callable[[Path], AbstractContextManager[Callable[[int, int, int], None]]]
"""From the journal's path to a bar that takes (prompts done, prompts, tokens written)."""


@dataclass(frozen=True)
class Asked:
    """How prompts are answered."""

    limit: int | None  # only the first prompts of the file
    max_new_tokens: int
    temperatures: Sequence[float]  # in turn
    seed: int


@dataclass(frozen=True)
class Found:
    """Answers, and what is to be told of them."""

    responses: r.Responses
    message: str = ""


def answers_of(
    data: str,
    target: str,
    model: CausalModel,
    out: Path,
    asked: Asked,
    *,
    max_length: int,
    dtype: str | None,
    device: str,
    bar: Bar,
) -> Found:
    """The target's answers: read, if they are there (a file of them, or those of a run to be resumed), or written now.

    data: prompts, or a file of answers. target: its name, for the engine that answers; model: the same, for its hash.
    max_length: tokens of prompt and answer together. They are kept beside the folder ``out``, as
    OUT.responses.safetensors, so that another method can learn from them; while they are made, in OUT.responses.jsonl, so
    that the same call goes on after a kill. Raises ConfigError.
    """
    mine = r.target_hash(model)
    if data.endswith(".safetensors"):
        found = r.Responses.load(data)
        found.check_target(mine, name=f"--data {data}")
        return Found(found)
    kept = out.with_name(f"{out.name}.{r.FILE}")
    made_with = {
        "source_sha256": r.file_sha256(data) if Path(data).is_file() else None,
        **asdict(asked),
        "temperatures": list(asked.temperatures),
        "target_hash": mine,
    }
    state = PartialState(cpu=device == "cpu")
    with state.main_process_first():  # one process writes them, the others read
        if kept.exists():
            return Found(_kept(kept, made_with))
        engine = Engine.load(target, speculative="none", device=device, dtype=dtype)
        most = asked.max_new_tokens
        prompts = r.read_prompts(data, engine, limit=asked.limit, max_new_tokens=most, max_length=max_length)
        journal = kept.with_suffix(".jsonl")
        journal.parent.mkdir(parents=True, exist_ok=True)
        with bar(journal) as progress:
            found = r.regenerate(
                engine, prompts, temperatures=asked.temperatures, max_new_tokens=most, seed=asked.seed,
                progress=progress, journal=journal, source=data, source_sha256=made_with["source_sha256"],
            )  # fmt: skip
        found = replace(found, metadata={**found.metadata, "limit": asked.limit})
        found.save(kept)
        journal.unlink()
        skipped, told = found.metadata["num_skipped"], ""
        if skipped:
            told = (
                f"{skipped} of {len(prompts)} prompts of {data} were left out: no room for an answer of {most} tokens"
            )
    return Found(found, told)


def _kept(file: Path, made_with: dict[str, object]) -> r.Responses:
    """The answers of an earlier run. Raises ConfigError where they were made otherwise."""
    found = r.Responses.load(file)
    difference = first_difference({key: found.metadata.get(key) for key in made_with}, made_with)
    if difference is None:
        return found
    key, old, new = difference
    raise ConfigError(
        f"{file} holds {len(found)} answers that were made with {key} = {old!r}, and now {key} is {new!r}: give it "
        "as --data to learn from it, or another --out, or delete it"
    )
