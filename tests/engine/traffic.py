"""Random traffic on a loop over table models: arrivals, cancellations, preemptions, every kind of request."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell import Engine, Request, SamplingParams, speculative_config
from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.engine.integrity import check_loop
from foretell.engine.loop import Limits, Loop
from foretell.engine.prefix import PrefixStore
from foretell.engine.request.result import Update
from foretell.engine.request.submission import Submission
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.target import CausalModel
from foretell.planner.acceptance import Acceptance
from foretell.planner.costs import CostTable
from foretell.planner.observations import RowView
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from tests.engine.harness import EOS, VOCAB, ToyTokenizer, restless, table

WAYS: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "draft_model", "num_speculative_tokens": 5},
    {"method": "draft_model", "num_speculative_tokens": 3, "shape": "static/branching=2x2x1"},
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "recycling", "num_speculative_tokens": 3},
    {"method": "prediction", "num_speculative_tokens": 4},
)


class RandomPlanner(Planner):
    """Caps at random, so that drafters lag, catch up and are asked for less than they could do."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(CostTable({(1, 1): 1.0}, {}), Acceptance(16), mode="on")
        self.rng = rng

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        return self.rng.random() < 0.5

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        plan = super().plan(rows, arriving)
        quiet = self.rng.random() < 0.2
        plan.caps = [0 if quiet else self.rng.randint(0, max(0, min(row.max_depth, row.depth_limit))) for row in rows]
        return plan


@dataclass
class Told:
    """What the sink of one request heard."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: Update | None = None

    def hear(self, update: Update) -> None:
        assert self.last is None, "nothing is told after the end"
        self.token_ids += [piece.token_id for piece in update.pieces]
        self.text += "".join(piece.text for piece in update.pieces) + update.tail
        if update.is_last:
            self.last = update


class Traffic:
    """Requests at random, from a pool of shared prompt beginnings, and the plain completion of each as the oracle."""

    def __init__(
        self,
        seed: int,
        *,
        kv_tokens: int = 200,
        max_rows: int = 6,
        prefixes: bool = True,
        max_new_tokens: Sequence[int] = (1, 8, 20, 45, 60),
        models: tuple[CausalModel, CausalModel] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """models: target and draft, tables by default; trees are asked for where the target reads them."""
        self.max_new_tokens = max_new_tokens
        self.rng = random.Random(seed)
        self.target, draft = models or (table(1), table(2, blur=0.3))
        self.tokenizer = tokenizer or ToyTokenizer()
        self.engine = Engine(self.target, self.tokenizer, speculative="none")
        methods: dict[str, Method] = {"draft_model": DraftModel(draft)}
        loader = Loader(self.target, lambda name: draft)
        self.choices = []
        for way in WAYS:
            config = speculative_config(way)
            if self.target.spec.chains_only and not config.proposal_shape.is_chain:
                continue
            key = config.method if config.method == "draft_model" else str(way)
            if key not in methods:
                methods[key] = config.load(loader)
            self.choices.append(Speculation(config, methods[key], config.load_verifier(self.target)))
        limits = Limits(max_rows, 1000, kv_tokens, 192, 0.05)
        store = PrefixStore(1 << 20) if prefixes else None
        self.loop = Loop(self.target, limits, RandomPlanner(self.rng), prefixes=store)
        self.told: dict[str, Told] = {}
        self.cancelled: set[str] = set()
        self.heads = [[self.rng.randrange(EOS) for _ in range(self.rng.choice((16, 20, 40)))] for _ in range(4)]
        self._number = 0

    def arrive(self) -> None:
        """One more request."""
        rng, number = self.rng, self._number
        self._number += 1
        head = rng.choice(self.heads) if rng.random() < 0.5 else []
        prompt = head + [rng.randrange(EOS) for _ in range(rng.choice((1, 2, 5, 12, 30)))]
        params = SamplingParams(
            seed=number,
            max_new_tokens=rng.choice(self.max_new_tokens),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((0, 0, 6)),
            top_p=rng.choice((1.0, 0.9)),
            presence_penalty=rng.choice((0.0, 0.4)),
            logit_bias={3: 1.0} if rng.random() < 0.2 else {},
            stop=("ab",) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.5,
            logits_processor=restless if rng.random() < 0.1 else None,
        )
        guess = [rng.randrange(VOCAB) for _ in range(10)]
        request = Request(prompt, params, guess)
        request_id = f"r{number}"
        self.told[request_id] = told = Told(request)
        submission = Submission(request_id, prompt, params, guess)
        self.loop.submit(self.engine.row_of(number, submission, rng.choice(self.choices)), told.hear)

    @torch.inference_mode()
    def round(self) -> None:
        """One tick, with the events that may precede it; invariants are checked after it."""
        rng, loop = self.rng, self.loop
        while len(loop.jobs) < 12 and rng.random() < 0.25:
            self.arrive()
        if loop.jobs and rng.random() < 0.02:
            request_id = rng.choice(list(loop.jobs))
            self.cancelled.add(request_id)
            loop.cancel(request_id)
        loop.tick()
        check_loop(loop)

    @torch.inference_mode()
    def finish(self) -> None:
        """No more arrivals: until all have ended."""
        while self.loop.has_work:
            self.loop.tick()
            check_loop(self.loop)

    def check(self) -> int:
        """Compare every request with its solo plain completion; how many were compared whole."""
        plain = Engine(self.target, self.tokenizer, speculative="none")
        whole = 0
        for request_id, told in self.told.items():
            assert told.last is not None, request_id
            assert told.last.error is None, told.last.error
            completion = told.last.completion
            assert completion is not None
            assert completion.token_ids == told.token_ids
            assert completion.text == told.text
            solo = plain.generate(told.request.prompt, told.request.params)
            if completion.finish_reason == "cancelled":
                assert request_id in self.cancelled
                assert solo.token_ids[: len(told.token_ids)] == told.token_ids
                continue
            assert (told.token_ids, told.text) == (solo.token_ids, solo.text), request_id
            assert completion.finish_reason == solo.finish_reason
            whole += 1
        return whole
