"""Serving and learning on the caller's thread, request after request: the loop over files, experiments and tests.

Everything is a function of the requests and the seed: an update is made as soon as it is due, and swapped in before the
next step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.core.prompts import conversation, entries, read_text
from foretell.costs.table import CostTable
from foretell.engine.engine import Engine
from foretell.engine.loop import Limits, Loop
from foretell.engine.request.conversation import takes_messages
from foretell.engine.request.result import Completion, Update
from foretell.engine.request.row import Submission
from foretell.engine.speculation import Speculation
from foretell.learn.learner import Learner
from foretell.learn.options import LearnOptions
from foretell.model.prefill import round_up
from foretell.planner.acceptance import Acceptance
from foretell.planner.planner import Planner
from foretell.train.responses import entry_ids

MARGIN = 64
"""Cache slots of a row beyond its text."""


class Session:
    """An engine's method that learns from what it is given. Not thread-safe."""

    def __init__(
        self, engine: Engine, options: LearnOptions | None, *, max_rows: int = 4, max_model_len: int | None = None
    ) -> None:
        """options: None serves without learning; ``where`` is always "inline". Raises ConfigError."""
        spec = engine.model.spec
        longest = min(max_model_len or 2048, spec.max_positions)
        self.engine, self.longest = engine, longest
        self.choice = Speculation(engine.speculative, engine.method, engine.verifier)
        self.learner = None if options is None else Learner(engine, [self.choice], replace(options, where="inline"))
        planner = Planner(CostTable({(1, 1): 1.0}, {}), Acceptance(max(16, self.choice.depth)), mode="on")
        limits = Limits(max_rows, 1 << 30, max_rows * longest, round_up(longest + MARGIN, 64), None)
        self.loop = Loop(engine.model, limits, planner)
        if self.learner is not None:
            self.loop.observers.append(self.learner.observe)
            self.loop.batch.prompts.on_prompt = self.learner.prompt
        self._number = 0

    def run(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams,
        *,
        tenant: str | None = None,
        store: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> Iterator[Completion]:
        """Complete prompts in their order, ``max_rows`` at a time; each as it ends. A request's seed is that of params and
        its number. between is called after every step."""
        waiting = iter(prompts)
        ended: list[Update] = []
        left = True
        with torch.inference_mode():
            while left or self.loop.has_work:
                while left and len(self.loop.jobs) < self.loop.limits.max_rows:
                    ids = next(waiting, None)
                    left = ids is not None
                    if ids is not None:
                        self._submit(ids, params, tenant, store, ended)
                self.loop.tick()
                if self.learner is not None:
                    self.learner.swap()
                between()
                done, ended[:] = list(ended), []
                if done:
                    self.learn()
                for update in done:
                    if update.error is not None:
                        raise update.error
                    assert update.completion is not None
                    yield update.completion

    def _submit(
        self, ids: Sequence[int], params: SamplingParams, tenant: str | None, store: bool, ended: list[Update]
    ) -> None:
        number, self._number = self._number, self._number + 1
        seed = None if params.seed is None else params.seed + number
        submission = Submission(f"r{number}", list(ids), replace(params, seed=seed), store=store, tenant=tenant)
        choice, capture = self.choice, None
        if self.learner is not None:
            choice, capture = self.learner.assign(choice, submission)
        row = self.engine.row_of(number, submission, choice)
        row.max_tokens = min(row.max_tokens, self.longest - len(row.prompt_ids))
        row.capture = capture
        self.loop.submit(row, lambda update: ended.append(update) if update.is_last else None)

    def learn(self) -> None:
        """Make all updates that are due, and swap in what passed."""
        if self.learner is None:
            return
        while self.learner.train_idle():
            self.learner.swap()
        self.learner.swap()

    def close(self) -> None:
        """End."""
        if self.learner is not None:
            self.learner.close()


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
