"""Random traffic on a loop over table models: arrivals, cancellations, preemptions, every kind of request."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams, speculative_config
from foretell.costs.table import CostTable
from foretell.draft.base import Method
from foretell.draft.config import Loader
from foretell.engine.event import StepEvent
from foretell.engine.loop import Limits, Loop
from foretell.engine.prefix import PrefixStore
from foretell.engine.request.job import Job
from foretell.engine.request.result import Update
from foretell.engine.request.row import Row, Submission
from foretell.engine.request.scoring import Scoring
from foretell.engine.speculation import Speculation
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowView
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from tests.engine.harness import EOS, VOCAB, ToyTokenizer, audit_table, restless, table
from tests.engine.integrity import check_loop

WAYS: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "draft_model", "num_speculative_tokens": 5},
    {"method": "draft_model", "num_speculative_tokens": 3, "shape": "static/branching=2x2x1"},
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 4},
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
    began: float = 0.0

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
        stall_target_s: float = 0.05,
    ) -> None:
        """models: target and draft, tables by default; trees are asked for where the target reads them. stall_target_s: 0
        reads prompts in the smallest chunks beside rows that decode."""
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
        limits = Limits(max_rows, 1000, kv_tokens, 192, stall_target_s)
        store = PrefixStore(1 << 20) if prefixes else None
        self.now = 0.0  # the loop's clock, where a test turns it
        self.counted = Counted()
        self.loop = Loop(
            self.target, limits, RandomPlanner(self.rng), prefixes=store, observers=[self.counted.observe],
            clock=lambda: self.now,
        )  # fmt: skip
        self.told: dict[str, Told] = {}
        self.cancelled: set[str] = set()
        self.admitted: set[str] = set()
        self.in_chunks: set[str] = set()
        self.ended: dict[str, float] = {}
        self.heads = [[self.rng.randrange(EOS) for _ in range(self.rng.choice((16, 20, 40)))] for _ in range(4)]
        self._number = 0

    def arrive(self, way: Speculation | None = None, *, least: int = 0, whole: bool = False, **fields: Any) -> str:
        """One more request; its id. way: who guesses for it; least: tokens of its prompt; whole: nothing but its length
        ends it; fields: of its submission."""
        rng, number = self.rng, self._number
        self._number += 1
        head = rng.choice(self.heads) if rng.random() < 0.5 else []
        prompt = head + [rng.randrange(EOS) for _ in range(max(least, rng.choice((1, 2, 5, 12, 30))))]
        params = SamplingParams(
            seed=number,
            max_new_tokens=rng.choice(self.max_new_tokens),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((0, 0, 6)),
            top_p=rng.choice((1.0, 0.9)),
            presence_penalty=rng.choice((0.0, 0.4)),
            logit_bias={3: 1.0} if rng.random() < 0.2 else {},
            stop=("ab",) if rng.random() < 0.2 and not whole else (),
            ignore_eos=rng.random() < 0.5 or whole,
            logits_processor=restless if rng.random() < 0.1 else None,
        )
        guess = [rng.randrange(VOCAB) for _ in range(10)]
        request = Request(prompt, params, guess)
        request_id = f"r{number}"
        self.told[request_id] = told = Told(request)
        submission = Submission(request_id, prompt, params, guess, **fields)
        scored = submission.num_prompt_logprobs
        scoring = None if scored is None else Scoring(self.target, self.tokenizer, prompt, scored)
        row = self.engine.row_of(number, submission, way or rng.choice(self.choices))
        told.began = self.now
        self.loop.submit(row, told.hear, scoring)
        return request_id

    def tick(self) -> None:
        """One tick of the loop, a second after the last, and its audit."""
        loop = self.loop
        self.now += 1.0
        loop.tick()
        check_loop(loop)
        self.admitted |= {job.row.request_id for job in loop.running.values()}
        batch = loop.batch
        self.in_chunks |= {one.row.request_id for one in batch.arrivals}
        self._end()
        if type(batch.pool) is KVCache:  # a table's keys and values are the text: whoever moves rows moves all of it
            for one in batch.arrivals:
                audit_table(one.target, one.state, [one.filled])
            if batch.state is not None:
                audit_table(batch.target, batch.state, batch.state.lengths)

    def _end(self) -> None:
        """Note when requests ended."""
        self.ended |= {key: self.now for key, told in self.told.items() if told.last and key not in self.ended}

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
            self._end()
        self.tick()

    @torch.inference_mode()
    def finish(self) -> None:
        """No more arrivals: until all have ended."""
        while self.loop.has_work:
            self.tick()

    def run(self, rounds: int) -> int:
        """So many rounds, and what comes to its end after them; as ``check``."""
        for _ in range(rounds):
            self.round()
        self.finish()
        return self.check()

    def check(self) -> int:
        """Compare every request with its solo plain completion, and all counters with slow counts; how many requests were
        compared whole."""
        self._end()
        self._check_counters()
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
            if completion.finish_reason in ("cancelled", "timeout"):
                assert request_id in self.cancelled
                assert solo.token_ids[: len(told.token_ids)] == told.token_ids
                continue
            assert (told.token_ids, told.text) == (solo.token_ids, solo.text), request_id
            assert completion.finish_reason == solo.finish_reason
            whole += 1
        return whole

    def _check_counters(self) -> None:
        """Each request counts once, however often it gave its row up; and each figure is its events'."""
        recorder, counted = self.loop.recorder, self.counted
        done = {key: told.last.completion for key, told in self.told.items() if told.last and told.last.completion}
        self.admitted |= {key for key, one in done.items() if one.token_ids}
        prompts = {key: len(self.told[key].request.prompt) for key in self.admitted}
        assert recorder.num_submitted == len(self.told)
        assert recorder.num_prompt_tokens == sum(prompts.values())
        assert recorder.num_cached_prompt_tokens == sum(one.num_cached_tokens for one in done.values())
        assert all(one.num_cached_tokens < one.num_prompt_tokens for one in done.values())
        assert recorder.num_generated_tokens == sum(one.num_tokens for one in done.values())
        assert recorder.num_preemptions == sum(one.num_preemptions for one in done.values())
        assert recorder.num_finished == Counter(one.finish_reason for one in done.values())
        assert recorder.num_steps == counted.num_steps
        for key, one in done.items():
            # No second counts twice. Those are not counted in which a prompt is read, and which a row lost its place in.
            seconds, passed = one.seconds_queue + one.seconds_decode, self.ended[key] - self.told[key].began
            assert passed - one.num_preemptions <= seconds <= passed or (key in self.in_chunks and seconds < passed), (
                key
            )
        for key, one in done.items():
            drafted, accepted = (counted.of_request[key, which] for which in ("drafted", "accepted"))
            assert one.num_draft_tokens_per_pos == by_place(drafted)
            assert one.num_accepted_tokens_per_pos == by_place(accepted, len(one.num_draft_tokens_per_pos))
            assert one.steps == list(zip(drafted, accepted, strict=True))
            assert (one.num_draft_tokens, one.num_accepted_tokens) == (sum(counted.nodes[key]), sum(accepted))
        assert set(recorder.methods) == {
            name for name, steps in counted.of_method.items() if any(d for d, _, _ in steps)
        }
        for name, sums in recorder.methods.items():
            steps = [step for step in counted.of_method[name] if step[0]]
            drafted, accepted, nodes = (list(column) for column in zip(*steps, strict=True))
            found = sums.figures()
            assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (
                len(steps), sum(nodes), sum(accepted),
            )  # fmt: skip
            assert list(found.drafted_per_pos) == by_place(drafted)
            assert list(found.accepted_per_pos) == by_place(accepted, max(drafted))


class Counted:
    """What the steps of a loop did, counted from nothing but their trees and verdicts."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.of_request: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # depths drafted and accepted
        self.nodes: defaultdict[str, list[int]] = defaultdict(list)
        self.of_method: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)  # drafted, accepted, nodes

    def observe(self, event: StepEvent) -> None:
        self.num_steps += 1
        assert [part.start for part in event.parts] == [0, *(part.stop for part in event.parts[:-1])]
        assert event.parts[-1].stop == len(event.rows)
        assert len(event.light_steps) == len(event.depth_limit) == len(event.rows)
        for part in event.parts:
            for row in range(part.start, part.stop):
                assert event.rows[row].method == part.method
                assert event.rows[row].choice.verifier == part.verifier
                parent, depth = event.commit.tree.parent[row].tolist(), [0]
                for node in range(1, len(parent)):
                    depth.append(depth[parent[node]] + 1 if parent[node] >= 0 else 0)
                assert max(depth) <= event.depth_limit[row]
                kept = int(event.verdict.count[row]) - 1
                nodes = sum(above >= 0 for above in parent)
                key = event.rows[row].request_id
                self.of_request[key, "drafted"].append(max(depth))
                self.of_request[key, "accepted"].append(kept)
                self.nodes[key].append(nodes)
                self.of_method[part.method].append((max(depth), kept, nodes))


def by_place(reached: Sequence[int], width: int = 0) -> list[int]:
    """How many of these reached each place, by the definition."""
    return [sum(one > place for one in reached) for place in range(max([width, *reached]))]


def left_of(root: Any, ids: Collection[str]) -> list[str]:
    """Where an object still holds one of these request ids, or a request's row: paths of attributes."""
    found, seen, todo = [], set[int](), [(type(root).__name__, root)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen or isinstance(one, (Tensor, type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, (Row, Job)) or (isinstance(one, str) and one in ids):
            found.append(path)
        elif isinstance(one, Mapping):
            todo += [(f"{path}[{key!r}]", each) for key, value in one.items() for each in (key, value)]
        elif isinstance(one, (list, tuple, set, frozenset, deque)):
            todo += [(f"{path}[]", each) for each in one]
        elif isinstance(one, MethodType):
            todo.append((path, one.__self__))
        elif not isinstance(one, (str, int, float, bytes)):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            known = {
                **{name: getattr(one, name) for name in slots if hasattr(one, name)},
                **getattr(one, "__dict__", {}),
            }
            todo += [(f"{path}.{name}", value) for name, value in known.items()]
    return found
