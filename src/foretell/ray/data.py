"""Batch generation over files of JSON lines, by Ray Data: actors that hold an engine each, one output line a prompt.

The driver reads the input once, to find what is still to do, and cuts it into batches; an actor reads the lines of its
batch by itself, so the files must be at the same path on every machine. The driver alone writes: a prompt that is
generated a second time, since an actor died, is written once.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from foretell.core.errors import ConfigError, ModelError, PromptError
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED, SamplingParams, fresh_seed
from foretell.core.prompts import Conversation, PromptEntry, conversation
from foretell.core.settings import check_keys
from foretell.engine.config import speculative_config
from foretell.engine.engine import Engine, Request
from foretell.engine.request.conversation import takes_messages
from foretell.engine.request.request import check_text
from foretell.engine.request.result import Completion

if TYPE_CHECKING:
    from foretell.draft.config import MethodConfig

PathLike = str | os.PathLike[str]
MAX_BLOCKS = 20_000
"""Batches of a Ray Data task: smaller tasks cost the driver memory, larger ones save nothing."""
PARTS = ("target or engine_options", "speculative", "params")
"""Of what a row says that it was written with."""
KEEP_TEXT = {"width", "prefix_memory_gib", "speculation", "drafter_errors"}
"""Options of an engine that change no token."""
OWN_ERROR = re.compile(r"^foretell\.core\.errors\.(\w+): ", re.MULTILINE)
"""The last line of the traceback by which Ray tells why an actor died."""
BEGIN = b'{"id": '
"""Of every line that is written."""


@dataclass(frozen=True)
class Summary:
    """What a run of ``generate_files`` did."""

    path: str
    num_prompts: int  # in the input
    num_skipped: int  # were in the output already
    num_written: int  # by this run
    num_failed: int  # of num_written: rows with an ``error`` in place of a text


@dataclass(frozen=True)
class Span:
    """A batch: some lines of a file that follow each other, empty ones not counted."""

    path: str
    offset: int  # in bytes, of the first line
    line: int  # its number, from 1 on
    count: int


@dataclass(frozen=True)
class RayJob:
    """Settings of every actor."""

    target: str
    speculative: "MethodConfig | Mapping[str, Any] | str | None"
    params: SamplingParams  # with the seed from which rows' seeds are derived
    prompt_key: str
    id_key: str
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False

    @cached_property
    def run(self) -> str:
        """What the tokens of a row depend on beside its prompt and seed, as short hashes of ``PARTS`` joined by "-"."""
        sampling = {**asdict(replace(self.params, logits_processor=None)), "seed": None}
        sampling |= {} if self.raw else {"texts": "by the model"}
        processor = getattr(self.params.logits_processor, "__qualname__", type(self.params.logits_processor).__name__)
        options = {name: value for name, value in self.engine_options.items() if name not in KEEP_TEXT}
        parts = [self.target, options], [repr(speculative_config(self.speculative))], [sampling, processor]
        texts = [json.dumps(part, sort_keys=True, default=str) for part in parts]
        return "-".join(hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts)


def generate_files(
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    target: str = "bundled",
    speculative: "MethodConfig | Mapping[str, Any] | str | None" = None,
    params: SamplingParams | None = None,
    prompt_key: str = "prompt",
    id_key: str = "id",
    raw: bool = False,
    batch_size: int = 8,
    concurrency: int = 1,
    engine_options: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
) -> Summary:
    """Complete every prompt of these JSON-lines files once, on ``concurrency`` actors of the Ray cluster.

    A line is an object whose prompt_key is a text, token ids, or chat messages. An instruct model gets a text as a message,
    unless its line has ``"format": "text"`` or all are to be raw; each actor says so on stderr. A line's id is its
    id_key, else ``FILE NAME:LINE NUMBER``, and must be unique. Each line of ``out`` has id, text, token_ids, finish_reason
    and seed, or id and error for a prompt that cannot be completed, and run, which stands for the settings. Lines come in
    the order in which they are done.

    A row's seed is derived from (params.seed, its id), so its tokens depend neither on the number of actors nor on
    batch_size; without params.seed a fresh one is drawn. Ids that ``out`` has already are skipped: an interrupted run
    continues where it stopped; with other settings it is refused, so that a file holds texts of one kind. engine_options
    are those of ``Engine.load``; ray_actor_options what one actor takes (by default a GPU where the device is one, else
    one CPU).

    Raises ConfigError, before any model is loaded, for input that cannot be read: all of it is checked first; and with
    the actor's own words for a model that cannot be loaded.
    """
    speculative_config(speculative)  # raises
    check_engine_options(engine_options or {})
    if batch_size < 1 or concurrency < 1:
        raise ConfigError(f"batch_size = {batch_size} and concurrency = {concurrency} must be at least 1")
    files = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    out = Path(out)
    if out.resolve() in {path.resolve() for path in files}:
        raise ConfigError(f"out = {str(out)!r} is one of the input files: name another one")
    params = params or SamplingParams()
    if out.is_dir():
        raise ConfigError(
            f"out = {str(out)!r} is a directory: name a file in it, e.g. {str(out / 'completions.jsonl')!r}"
        )
    done, runs = finished(out)
    if params.seed is None:
        params = replace(params, seed=fresh_seed())
    elif any(seed not in (None, row_seed(params.seed, key)) for key, seed in done.items()):
        raise ConfigError(
            f"{str(out)!r} was written with another seed than {params.seed}: give that one, or another out"
        )
    job = RayJob(target, speculative, params, prompt_key, id_key, dict(engine_options or {}), raw)
    _check_runs(runs, job.run, out)
    spans, ids = plan(files, job, done, batch_size)
    todo = ids - done.keys()
    num_failed = 0
    if spans:
        taken = _actor_options(job, ray_actor_options or {})
        with _opened(out) as stream:
            for row in _completed(spans, job, concurrency, taken):
                key = row["id"]
                if key not in todo:
                    raise RuntimeError(f"row {key!r} was returned twice, or is unknown: an input file has changed")
                todo.remove(key)
                num_failed += "error" in row
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                stream.flush()
        if todo:
            raise RuntimeError(f"{len(todo)} rows are missing, {min(todo)!r} among them: an input file has changed")
    num_skipped = len(ids & done.keys())
    return Summary(str(out), len(ids), num_skipped, len(ids) - num_skipped, num_failed)


def check_engine_options(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for what ``Engine.load`` does not take: in an actor it would be a traceback of Ray's."""
    taken = signature(Engine.load).parameters.values()
    known = [one.name for one in taken if one.kind is one.KEYWORD_ONLY and one.name != "speculative"]
    check_keys(given, known, "in engine_options")


def row_seed(seed: int, row_id: str) -> int:
    """The seed of one row, in [0, ``MAX_SEED``]: ``Engine.generate`` with it and the prompt gives the same tokens."""
    digest = hashlib.sha256(row_id.encode()).digest()
    return derive_seed(seed, int.from_bytes(digest[:8], "big")) & MAX_SEED


def finished(out: Path) -> tuple[dict[str, int | None], set[str]]:
    """Id to seed of the rows that an earlier run wrote (None: it failed), and the runs that they are of ("": not said).
    An incomplete last line is removed. Raises ConfigError where the file is something else."""
    rows: dict[str, int | None] = {}
    runs: set[str] = set()
    if not out.exists():
        return rows, runs
    whole = 0
    with _readable(out) as stream:
        for number, line in enumerate(stream, 1):
            cut = not line.endswith(b"\n")
            if cut and line[: len(BEGIN)] == BEGIN[: len(line)]:
                break  # the run died while it wrote this one
            try:
                row = parse_json(b"" if cut else line)
                rows[row["id"]] = row.get("seed")
                runs.add(str(row.get("run", "")))
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ConfigError(
                    f"{out}:{number} is not a row of an earlier run: name another out, or remove the file"
                ) from None
            whole += len(line)
    if whole < out.stat().st_size:
        os.truncate(out, whole)
    return rows, runs


def _check_runs(runs: set[str], mine: str, out: Path) -> None:
    """Raises ConfigError where a row is of a run with other settings than this one."""
    for run in sorted(runs - {mine}):
        parts = zip(PARTS, run.split("-"), mine.split("-"), strict=False)
        other = [name for name, was, now in parts if was != now] if run.count("-") == mine.count("-") else ["settings"]
        raise ConfigError(
            f"{str(out)!r} has rows that were written with other {' and other '.join(other)}: give those, or another out"
        )


def _opened(out: Path) -> TextIO:
    """The file to write rows to, behind those that it has. Raises ConfigError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out = {str(out)!r} cannot be written: {error.strerror}") from None


def _readable(path: Path) -> BinaryIO:
    """A file. Raises ConfigError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None


def plan(
    files: Sequence[Path], job: RayJob, done: Mapping[str, object], batch_size: int
) -> tuple[list[Span], set[str]]:
    """Batches of the remaining rows, and all ids. Raises ConfigError with FILE:LINE where a line cannot be used."""
    spans: list[Span] = []
    places: dict[str, str] = {}
    for path in files:
        begun: Span | None = None
        for number, offset, key, _ in read(path, job):
            place = f"{path}:{number}"
            if key in places:
                raise ConfigError(f"{place} has the id {key!r} of {places[key]}: every id must be unique")
            places[key] = place
            if begun is not None and (key in done or begun.count == batch_size):
                spans.append(begun)
                begun = None
            if key in done:
                continue
            begun = Span(str(path), offset, number, 1) if begun is None else replace(begun, count=begun.count + 1)
        if begun is not None:
            spans.append(begun)
    return spans, set(places)


def read(path: Path, job: RayJob, offset: int = 0, line: int = 1) -> Iterator[tuple[int, int, str, Any]]:
    """(line number, offset in bytes, id, prompt) of a file's lines from one on. Raises ConfigError with FILE:LINE."""
    with _readable(path) as stream:
        stream.seek(offset)
        for number, text in enumerate(stream, line):
            if text.strip():
                place = f"{path}:{number}"
                try:
                    row = parse_json(text)
                except JSONDecodeError as error:
                    raise ConfigError(f"{place} is not JSON: {error.msg} (character {error.pos})") from None
                if job.prompt_key == "prompt" and isinstance(row, dict):
                    row |= _as_prompt(row, place)
                if not isinstance(row, dict) or job.prompt_key not in row:
                    raise ConfigError(f"{place} is not an object with the key {job.prompt_key!r}")
                prompt = row[job.prompt_key]
                is_list = _is_list_of(prompt, int) or _is_list_of(prompt, dict)
                if not is_list and not isinstance(prompt, str | Conversation):
                    raise ConfigError(f"{place}: {job.prompt_key!r} must be a text, token ids or chat messages")
                given = row.get(job.id_key)
                if isinstance(given, bool | list | dict):
                    raise ConfigError(f"{place}: the id {given!r:.60} must be a text or a number")
                key = f"{path.name}:{number}" if given is None else str(given)
                if any("\ud800" <= letter <= "\udfff" for letter in key):
                    raise ConfigError(f"{place}: the id {key!a} is no text: it has half a surrogate pair")
                yield number, offset, key, prompt
            offset += len(text)


def _as_prompt(row: dict[str, Any], place: str) -> dict[str, Any]:
    """The key "prompt" of a line with ``messages`` or ``turns`` in its place, or whose ``format`` says what its text is.
    Raises ConfigError."""
    text = row.get("prompt")
    is_said = {"messages", "turns"} & row.keys() if "prompt" not in row else text and isinstance(text, str)
    if not is_said or ("prompt" in row and "format" not in row):
        return {}
    asked = conversation(PromptEntry(place, 0, row))
    if asked.messages:
        return {"prompt": list(asked.messages)}
    return {"prompt": [{"role": "user", "content": asked.texts[0]}] if asked.format == "chat" else asked}


class Generator:
    """An actor: an engine, and batches of lines to complete."""

    def __init__(self, job: RayJob) -> None:
        """Loads the model."""
        self.job = job
        self.engine = Engine.load(job.target, speculative=job.speculative, **job.engine_options)

    @cached_property
    def as_messages(self) -> bool:
        """Whether texts are messages."""
        line = (
            f"foretell: texts go into the chat template of {self.engine.model.spec.display_name!r}, an instruct model; "
            'raw=True, or "format": "text" in a line, keeps them as they are'
        )
        return takes_messages(
            self.engine.model.spec,
            self.engine.tokenizer,
            [True],
            raw=self.job.raw,
            notice=lambda _: print(line, file=sys.stderr, flush=True),
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Spans, a column a field, to rows as JSON: as texts, since prompts and outputs have no common Arrow type."""
        rows: list[str] = []
        for path, offset, line, count in zip(
            *(batch[name] for name in ("path", "offset", "line", "count")), strict=True
        ):
            lines = read(Path(path), self.job, int(offset), int(line))
            pairs = [(key, prompt) for (_, _, key, prompt), _ in zip(lines, range(int(count)), strict=False)]
            rows += [json.dumps(row, ensure_ascii=False) for row in self.complete(pairs)]
        return {"row": rows}

    def complete(self, pairs: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
        """A row for each (id, prompt)."""
        try:
            requests = [self._request(key, prompt) for key, prompt in pairs]
            completions = self.engine.generate_batch(requests, batch_size=max(1, len(requests)))
        except (PromptError, ModelError) as error:  # of one of them: a text that cannot be, or has no next token
            if len(pairs) == 1:
                return [{"id": pairs[0][0], "error": str(error), "run": self.job.run}]
            return [row for pair in pairs for row in self.complete([pair])]  # batching does not change tokens
        return [_row(key, completion, self.job.run) for (key, _), completion in zip(pairs, completions, strict=True)]

    def _request(self, key: str, prompt: Any) -> Request:
        if isinstance(prompt, Conversation):
            prompt = prompt.texts[0]
        elif isinstance(prompt, str) and self.as_messages:
            check_text(prompt)  # here its own places count, not the template's
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = self.engine.chat_prompt(prompt)
        seed = self.job.params.seed
        assert seed is not None
        return Request(prompt, replace(self.job.params, seed=row_seed(seed, key)))


def _row(key: str, completion: Completion, run: str) -> dict[str, Any]:
    return {
        "id": key,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "run": run,
    }


def _completed(
    spans: Sequence[Span], job: RayJob, concurrency: int, ray_actor_options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The rows of all spans, as they come. Raises ConfigError or ModelError where the actors cannot load the model."""
    import ray.data  # here, so that files can be planned and read where there is no Ray
    from ray.exceptions import RayError

    # One block per batch, so that rows are written soon after they are done.
    data = ray.data.from_items([asdict(span) for span in spans], override_num_blocks=min(len(spans), MAX_BLOCKS))
    completed = data.map_batches(
        Generator,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(concurrency, len(spans))),
        **ray_actor_options,
    )
    try:
        for batch in completed.iter_batches(batch_size=None, batch_format="pyarrow"):
            table: Any = batch
            for text in table.column("row").to_pylist():
                yield parse_json(text)
    except RayError as error:
        told = str(error)
        own = list(OWN_ERROR.finditer(told))
        if not own:  # Ray's words are all that is known
            raise
        kind = ModelError if own[-1][1] == "ModelError" else ConfigError
        raise kind(told[own[-1].end() :].strip()) from None


def _actor_options(job: RayJob, given: Mapping[str, Any]) -> dict[str, Any]:
    """What one actor takes. Raises ConfigError for what Ray does not know."""
    if given:
        import ray

        try:
            ray.remote(**given)(Generator)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Ray refuses ray_actor_options = {dict(given)}: {error}") from None
        return dict(given)
    on_cpu = str(job.engine_options.get("device", "cpu")).startswith("cpu")
    return {"num_cpus": 1} if on_cpu else {"num_cpus": 1, "num_gpus": 1}


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
