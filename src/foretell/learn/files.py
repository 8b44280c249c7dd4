"""Learning from a file of prompts, as a service learns from its requests: each is answered, and then learned from."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.core.prompts import conversation, entries, read_text
from foretell.engine.engine import Engine
from foretell.engine.request.conversation import takes_messages
from foretell.learn.options import LearnOptions
from foretell.learn.session import Session
from foretell.train.prompts import entry_ids


def read_prompts(
    file: Path | str, engine: Engine, *, raw: bool = False, notice: Callable[[str], None] = lambda line: None
) -> list[list[int]]:
    """Token ids of a file's prompts, in their order; raw and notice as ``train.responses.read_prompts`` has them. Raises
    ConfigError, PromptError."""
    text = read_text(file, f"data {str(file)!r}")
    found = entries(text, str(file), suffix=Path(file).suffix)
    are_bare = [conversation(entry).is_bare for entry in found]
    as_message = takes_messages(engine.model.spec, engine.tokenizer, are_bare, raw=raw, notice=notice)
    return [entry_ids(entry, engine, as_message=as_message) for entry in found]


def learn_from(
    engine: Engine,
    file: Path | str,
    options: LearnOptions,
    params: SamplingParams,
    *,
    epochs: int = 1,
    max_rows: int = 4,
    raw: bool = False,
    progress: Callable[[int, int, float], None] = lambda done, total, acceptance: None,
    notice: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Answer the file's prompts ``epochs`` times and learn from the answers; the learner's state at the end.

    progress is called after each answer with how many there are, of how many, and the share of its guesses that was
    kept; notice with a line where texts go into the chat template (raw: never) and where
    prompts are left out. Where options name a folder, checkpoints are saved there at the
    end. Raises ConfigError, PromptError."""
    prompts = read_prompts(file, engine, raw=raw, notice=notice)
    options = replace(options, learn_share=1.0)  # nobody waits for these answers
    session = Session(engine, options, max_rows=max_rows)
    longest = session.longest - 2
    fit = [ids for ids in prompts if len(ids) <= longest]
    if not fit:
        raise ConfigError(f"data {str(file)!r}: no prompt is shorter than {longest} tokens: shorten them")
    if len(fit) < len(prompts):
        notice(
            f"{len(prompts) - len(fit)} of {len(prompts)} prompts of {file} are left out: more than {longest} tokens"
        )
    prompts = fit
    total = epochs * len(prompts)
    learner = session.learner
    assert learner is not None

    def all_of_them() -> Iterator[list[int]]:
        for _ in range(epochs):
            yield from prompts

    try:
        for done, one in enumerate(session.run(all_of_them(), params), start=1):
            progress(done, total, one.acceptance_rate)
        if options.learn_dir is not None:
            learner.act("save")
            session.learn()
        return learner.state()
    finally:
        session.close()
