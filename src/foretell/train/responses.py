"""The target's own texts, on which drafters are trained: generated once, stored in one file, reused by later runs.

A drafter imitates what the target writes, so the responses of a data set are replaced by the target's own (the sources
in the notes call this the largest single improvement). On disk: ``responses.safetensors`` with ``tokens`` int32 [N, L]
padded with zeros on the right, ``length`` and ``start`` int64 [N], and as metadata what they were made by. Each one is
appended to a journal when it is done, so that a killed run continues there.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretell import __version__
from foretell.core.errors import ConfigError, PromptError
from foretell.core.journal import Journal
from foretell.core.jsontext import parse_json
from foretell.core.noise import derive_seed
from foretell.core.params import SamplingParams
from foretell.core.prompts import PromptEntry, conversation, entries, is_plain, read_text
from foretell.engine.engine import Engine, Request
from foretell.engine.request.conversation import takes_messages, template_of
from foretell.engine.request.request import token_ids
from foretell.heads.teacher import TeacherBatch
from foretell.model.identity import target_hash


def chat_ids(messages: list[Any], engine: Engine, where: str) -> list[int]:
    """Token ids of a conversation in the chat template.

    where: file and line, for messages. Raises ConfigError where the template refuses.
    """
    try:
        return engine.chat_prompt(messages)
    except PromptError as error:
        raise ConfigError(f"{where}: {error}, or drop the line") from None


def entry_ids(entry: PromptEntry, engine: Engine, *, as_message: bool) -> list[int]:
    """Token ids of one prompt of a file, in the chat template where it is a conversation.

    as_message: a text of which its line does not say what it is (``format``) is a message too. Raises ConfigError,
    PromptError.
    """
    asked = conversation(entry)
    if asked.messages:
        return chat_ids(list(asked.messages), engine, entry.where)
    is_message = asked.format == "chat" or (as_message and asked.is_bare)
    if is_message and template_of(engine.tokenizer):
        return chat_ids([{"role": "user", "content": asked.texts[0]}], engine, entry.where)
    return text_ids(asked.texts[0], engine)


def text_ids(text: str, engine: Engine) -> list[int]:
    """Token ids of a text as it is. Raises ConfigError without a tokenizer."""
    if engine.tokenizer is None:
        raise ConfigError("prompts are texts, and this target has no tokenizer: give a file of responses")
    return token_ids(text, engine.tokenizer)


def check_room(
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    file: Path | str,
    engine: Engine,
    max_new_tokens: int | None,
    max_length: int | None,
) -> None:
    """Refuse prompts that are all too long, before any is answered. names: of each prompt, for messages.

    max_new_tokens is how long answers may be, max_length where training cuts texts; None: no limit. Raises PromptError.
    """
    spec, limits = engine.model.spec, {}
    if max_new_tokens is not None:
        why = f"the context of {spec.name!r}, {spec.max_positions}, less max_new_tokens = {max_new_tokens}"
        limits[why] = spec.max_positions - max_new_tokens
    if max_length is not None:
        limits[f"max_length = {max_length}, where training cuts texts, less one token of an answer"] = max_length - 1
    if not limits or not prompts:
        return
    why, most = min(limits.items(), key=lambda item: item[1])
    if min(map(len, prompts)) > most:
        index = min(range(len(prompts)), key=lambda index: len(prompts[index]))
        raise PromptError(
            f"data {str(file)!r}: all {len(prompts)} prompts are too long: the shortest, {names[index]}, has "
            f"{len(prompts[index])} tokens, and at most {max(0, most)} can be used ({why}): shorten the "
            "prompts, or change that limit"
        )


FILE = "responses.safetensors"
TEXT_PROMPT = 48
"""Tokens of a prompt cut from plain text."""
WINDOW = 2048
"""Number of prompts that are sorted by length together. Results keep the prompts' order."""


@dataclass(frozen=True)
class Responses:
    """N texts: a prompt each, and what the target wrote after it."""

    tokens: Tensor  # [N, L] int32
    length: Tensor  # [N] int64
    start: Tensor  # [N] int64 first token of the response
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.length.numel())

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses, prompts left out."""
        return int((self.length - self.start).sum())

    def response(self, index: int) -> list[int]:
        """Token ids of one text's response."""
        return self.text(index)[int(self.start[index]) :]

    def text(self, index: int) -> list[int]:
        """Token ids of one text, prompt and response."""
        ids: list[int] = self.tokens[index, : self.length[index]].tolist()
        return ids

    def batch(self, index: Sequence[int]) -> TeacherBatch:
        """Some of the texts, padded to the longest of them."""
        chosen = torch.as_tensor(index, dtype=torch.int64)
        length = self.length[chosen]
        return TeacherBatch(self.tokens[chosen, : int(length.max())].long(), length, self.start[chosen])

    def take(self, index: Sequence[int]) -> "Responses":
        """Some of the texts, as a set of their own."""
        chosen = torch.as_tensor(index, dtype=torch.int64)
        width = int(self.length[chosen].max()) if len(index) else 0
        return replace(self, tokens=self.tokens[chosen, :width], length=self.length[chosen], start=self.start[chosen])

    def cut(self, most: int) -> "Responses":
        """Texts cut to at most that many tokens (``max_length``); those left without a response are dropped. Raises
        ConfigError where none is left."""
        kept = (self.start < most).nonzero()[:, 0].tolist()
        if not kept:
            shortest = f", and the shortest prompt has {int(self.start.min())}" if len(self) else ""
            raise ConfigError(
                f"no response begins within max_length = {most} tokens{shortest}: raise max_length, or give shorter prompts"
            )
        cut = replace(self, length=self.length.clamp(max=most))
        return cut.take(kept)

    def split(self, held_out: float = 0.05) -> tuple["Responses", "Responses"]:
        """(to learn from, held out): by the hash of the prompt, so that no prompt is in both sets, and a growing set
        keeps its split. At least one text is held out; with one text alone it is on both."""
        marks = [
            int.from_bytes(hashlib.sha256(json.dumps(self.text(i)[: int(self.start[i])]).encode()).digest()[:8], "big")
            for i in range(len(self))
        ]
        bound = max(int(held_out * 2**64), min(marks) + 1)
        out = [i for i, mark in enumerate(marks) if mark < bound]
        learn = [i for i, mark in enumerate(marks) if mark >= bound]
        return self.take(learn or out), self.take(out)

    @property
    def fault(self) -> str | None:
        """What makes these no texts; None where nothing does."""
        tensors = {"tokens": (self.tokens, 2), "length": (self.length, 1), "start": (self.start, 1)}
        for name, (tensor, ndim) in tensors.items():
            if tensor.ndim != ndim or tensor.is_floating_point() or len(tensor) != len(self.tokens):
                return f"{name} is {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        bounds = (self.start < 0) | (self.start > self.length) | (self.length > self.tokens.shape[1])
        if bool(bounds.any()):
            return f"text {int(bounds.nonzero()[0, 0])} has no place for its response"
        return "there are negative tokens" if self.tokens.numel() and int(self.tokens.min()) < 0 else None

    @property
    def fingerprint(self) -> str:
        """sha256 of the training texts."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.length, self.start):
            digest.update(str(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, file: Path) -> None:
        """Write ``responses.safetensors`` atomically. Raises OSError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        try:
            tensors = {"tokens": self.tokens, "length": self.length, "start": self.start}
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                part,
                metadata={key: json.dumps(value) for key, value in self.metadata.items()},
            )
            part.replace(file)
        except SafetensorError as error:  # of a full disk, for one
            raise OSError(errno.EIO, str(error), str(file)) from None
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, file: Path | str) -> "Responses":
        """Read a file of responses. Raises ConfigError for any other file."""
        try:
            with safe_open(str(file), framework="pt") as opened:
                metadata = {key: _read(value) for key, value in (opened.metadata() or {}).items()}
                found = {name: opened.get_tensor(name) for name in ("tokens", "length", "start")}
        except Exception as error:  # safetensors raises its own errors, which are not OSErrors
            raise ConfigError(
                f"{file} is not a file of responses ({error}); 'foretell train' writes such files"
            ) from None
        made = cls(**found, metadata=metadata)
        fault = made.fault
        if fault is not None:
            raise ConfigError(f"{file} is damaged: {fault}; write the responses again")
        return made

    def check_target(self, target: str, *, name: str) -> None:
        """Raise ConfigError where another target wrote these. target: ``target_hash`` of the one to be trained for."""
        wrote = self.metadata.get("target_hash")
        if wrote != target:
            raise ConfigError(
                f"{name}: these responses were written by {self.metadata.get('target', 'an unknown model')!r} (hash "
                f"{wrote}), not by this target (hash {target}), and a drafter is trained on its target's text: give the "
                "prompts, and they are answered by this target"
            )


def _read(value: str) -> Any:
    try:
        return parse_json(value)
    except ValueError:
        return value  # a plain text


def pack(texts: Sequence[tuple[Sequence[int], int]], metadata: Mapping[str, Any] | None = None) -> Responses:
    """Responses from (token ids, index of the response's first token)."""
    length = torch.tensor([len(ids) for ids, _ in texts], dtype=torch.int64)
    tokens = torch.zeros(len(texts), int(length.max()) if texts else 0, dtype=torch.int32)
    for row, (ids, _) in enumerate(texts):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return Responses(tokens, length, torch.tensor([start for _, start in texts], dtype=torch.int64), metadata or {})


def read_prompts(
    file: Path | str,
    engine: Engine,
    *,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    raw: bool = False,
    notice: Callable[[str], None] = lambda line: None,
) -> list[list[int]]:
    """Token ids of the prompts in a file (``core.prompts``). Raises ConfigError that names the line.

    An instruct model gets a text as a message, unless its line has ``"format": "text"`` or all are to be raw; notice is
    called with a line that says so.

    Plain text is a text to learn from here: it is cut into prompts of 48 tokens, whatever its lines.

    max_new_tokens is how long answers may be, max_length where training cuts texts. Raises PromptError where no prompt is
    short enough for them; where some are, ``regenerate`` leaves out the others.
    """
    name = f"data {str(file)!r}"
    text = read_text(file, name)
    if text.strip() and is_plain(text, Path(file).suffix):
        ids = text_ids(text, engine)
        prompts = [ids[at : at + TEXT_PROMPT] for at in range(0, len(ids), TEXT_PROMPT)][:limit]
        names = [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    else:
        found = entries(text, name, suffix=Path(file).suffix)[:limit]
        are_bare = [conversation(entry).is_bare for entry in found]
        as_message = takes_messages(engine.model.spec, engine.tokenizer, are_bare, raw=raw, notice=notice)
        prompts = [entry_ids(entry, engine, as_message=as_message) for entry in found]
        names = [entry.where.removeprefix(f"{name}, ") for entry in found]
    check_room(prompts, names, file, engine, max_new_tokens, max_length)
    return prompts


def regenerate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 160,
    seed: int = 0,
    batch_size: int = 48,
    progress: Callable[[int, int, int], None] | None = None,
    journal: Path | str | None = None,
    source: str | None = None,
    source_sha256: str | None = None,
    judge: Callable[[Sequence[int]], None] = lambda tokens: None,
) -> Responses:
    """Let the target answer every prompt, prompt i at temperature i mod their number, with seed (seed, i).

    engine: of the target alone (its drafter, if any, changes no token). Prompts of like length share a batch, which
    changes no token either. Prompts that leave no room for a response are skipped and counted.
    progress(done, total, tokens written) is called after each answer.
    judge is called with each answer's tokens, and may raise.
    journal: a file that each answer is appended to as it is made. Answers in an existing journal are reused; it must
    come from the same target, prompts and settings.

    Raises PromptError where every prompt is too long, ConfigError where the journal is of another run.
    """
    limit = engine.model.spec.max_positions - max_new_tokens
    fit = [index for index, prompt in enumerate(prompts) if 0 < len(prompt) <= limit]
    if not fit:
        raise PromptError(
            f"none of {len(prompts)} prompts can be answered: expected 1 to {limit} tokens, which leaves max_new_tokens = "
            f"{max_new_tokens} of the context of {engine.model.spec.max_positions}: shorten the prompts or lower that"
        )
    made_by = {
        "target": engine.model.spec.name,
        "target_hash": target_hash(engine.model),
        "implementation": engine.model.spec.implementation,
        "dtype": str(engine.model.spec.dtype).removeprefix("torch."),
        "seed": seed,
        "temperatures": list(temperatures),
        "max_new_tokens": max_new_tokens,
        "num_prompts": len(prompts),
    }

    def request(index: int) -> Request:
        temperature = temperatures[index % len(temperatures)]
        own = derive_seed(seed, index) & (2**63 - 1)
        return Request(
            list(prompts[index]), SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=own)
        )

    with ExitStack() as stack:
        kept = None
        if journal is not None:
            asked = {key: value for key, value in made_by.items() if key != "target"}  # its directory may have moved
            kept = stack.enter_context(Journal(journal, {**asked, "prompts_sha256": _sha256(prompts)}))
        answers: dict[int, list[int]] = {record["prompt"]: record["tokens"] for record in kept.records} if kept else {}
        written = sum(map(len, answers.values()))
        if progress is not None and answers:
            progress(len(answers), len(fit), written)
        left = [index for index in fit if index not in answers]
        order = [
            index
            for at in range(0, len(left), WINDOW)
            for index in sorted(left[at : at + WINDOW], key=lambda index: (len(prompts[index]), index))
        ]
        for number, completion in engine.completions([request(index) for index in order], batch_size=batch_size):
            index = order[number]
            answers[index] = completion.token_ids
            if kept is not None:
                kept.append({"prompt": index, "tokens": completion.token_ids})
            judge(completion.token_ids)
            written += completion.num_tokens
            if progress is not None:
                progress(len(answers), len(fit), written)
    metadata = {
        **made_by,
        "num_skipped": len(prompts) - len(fit),
        "source": source,
        "source_sha256": source_sha256,
        "versions": {"foretell": __version__, "torch": str(torch.__version__)},
    }
    return pack([([*prompts[index], *answers[index]], len(prompts[index])) for index in fit], metadata)


def _sha256(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


def file_sha256(file: Path | str) -> str:
    """sha256 of a file's bytes."""
    with Path(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
