"""The block drafter in decoding: its logits are those of training on the same text, and its memory holds features alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.core.errors import ConfigError, ModelError
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, Plan, TokenTree, layout
from foretell.draft.base import Commit, Context, PromptChunk
from foretell.draft.config import check_stop
from foretell.draft.shapes import parse_shape
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.dflash.drafter import DFlash, DFlashDrafter
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.model import prefill
from foretell.model.hf.adapter import TransformersModel
from foretell.model.prefill import feed
from foretell.model.target import Target
from tests.draft.growing.grown import noise_for
from tests.model.tiny import VOCAB, tiny_module

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "markov": {"markov_rank": 6},
    "anchor": {"sample_from_anchor": True},
    "all": {"causal": True, "markov_rank": 6, "sample_from_anchor": True, "confidence": True},
    "confidence": {"confidence": True},
    "reduced": {"draft_vocab_size": 23, "markov_rank": 6, "confidence": True},
    "windows": {"windows": (6, 0)},
    "windows-whole": {"windows": (5, 7), "windows_causal": False},
}
CONFIG = DFlashHeadConfig(
    hidden_size=32, vocab_size=VOCAB, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2,
    block_size=5, layer_ids=(0, 2, 3), mask_token_id=VOCAB - 1,
)  # fmt: skip
PARENTS = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 0, 2, 2, -1, -1], [-1, 0, 1, 2, -1, -1, -1], [-1, 0, 1, 2, 3, 4, 5]]
STEPS = [  # nodes kept in each row: of different number, side branches among them
    [[0, 2, 5], [0, 2, 4], [0], [0, 1, 2, 3, 4, 5, 6]],
    [[0], [0, 1], [0, 1, 2, 3], [0, 1]],
    [[0, 1, 4], [0, 2, 3], [0, 1], [0]],
]
TEXTS = [[7], [5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [11, 12, 13, 14, 15]]  # one is a prompt of a single token


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return TransformersModel(tiny_module("qwen3"))


def random_head(model: TransformersModel, **changes: Any) -> DFlashHead:
    """Weights of which none is 0 or 1, so that each matters."""
    config = replace(CONFIG, **changes)
    some = config.draft_vocab_size and draft_vocabulary((torch.arange(VOCAB) * 7) % 11, config.draft_vocab_size)
    head = DFlashHead.fresh(config, seed=5, model=model, vocabulary=some or None)
    random = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return head.eval()


@dataclass
class Seen:
    """One distribution that the drafter gave."""

    ids: list[int]  # the row's text, the pending token last
    depth: int  # of the node
    token: int  # of the node
    logits: Tensor  # [V]
    chance: float | None = None  # of the node
    above: int = -1  # token of the node's parent, where the chance was told


class Spy(DFlashDrafter):
    """Writes down all distributions that shapes are grown from."""

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, base = super().begin(context, limits)
        self.texts, self.limits = [list(ids) for ids in context.history.ids], list(limits)
        self.seen: list[Seen] = getattr(self, "seen", [])
        self.token_at = {(row, 0): text[-1] for row, text in enumerate(self.texts)}  # by (row, column of the tree)
        self._note(context.pending[:, None], torch.zeros_like(context.pending)[:, None], logits)
        return logits, base

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        logits = super().logits(tokens, plan)
        self._note(tokens, plan.positions - plan.length[:, None], logits, plan)
        return logits

    def _note(self, tokens: Tensor, depth: Tensor, logits: Tensor, plan: Plan | None = None) -> None:
        for row, (ids, limit) in enumerate(zip(self.texts, self.limits, strict=True)):
            for node in range(tokens.shape[1]):
                at = int(depth[row, node])
                if at >= limit:
                    continue
                one = Seen(ids, at, int(tokens[row, node]), logits[row, node].clone())
                self.seen.append(one)
                if plan is None:
                    continue
                column = int(plan.slots[row, node] - plan.length[row])
                self.token_at[row, column] = one.token
                if self.chance is not None and at:
                    seen = plan.ancestry[row, node].nonzero()[:, 0].tolist()
                    assert seen[-1] == column
                    one.chance, one.above = float(self.chance[row, node]), self.token_at[row, seen[-2]]


def in_training(head: DFlashHead, model: TransformersModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """(normed [Q, H], logits [Q, V] without Markov term) of the block at a text's last token, by the training forward."""
    batch = TeacherBatch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([1]))
    taps = Teacher(model).label(batch, head.taps).taps
    row = [ids[-1]] + [head.config.mask_token_id] * (head.config.block_size - 1)
    with torch.no_grad():
        normed = head(taps, model.embed(torch.tensor([[row]])), torch.tensor([[len(ids) - 1]]))[0]
        return normed[0], head.logits(normed, model)[0]


def check(head: DFlashHead, model: TransformersModel, seen: list[Seen]) -> float:
    """The largest difference between what was seen and the training forward, logits and chances."""
    known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    worst = 0.0
    for one in seen:
        key = tuple(one.ids)
        if key not in known:
            known[key] = in_training(head, model, one.ids)
        normed, logits = known[key]
        row = one.depth + head.config.first_row
        with torch.no_grad():
            expected = logits[row]
            if head.markov_head is not None:
                expected = expected + head.bias(torch.tensor(one.token))
            told = one.logits
            if head.vocabulary is not None:
                outside = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, head.vocabulary, False)
                assert bool((told[outside] == -torch.inf).all())
                told = told[head.vocabulary]
            worst = max(worst, float((told - expected).abs().max()))
            if one.chance is not None:  # the guess that the node is was made by the row before
                foreseen = head.confidence(normed[row - 1], torch.tensor(one.above)).sigmoid()
                worst = max(worst, abs(one.chance - float(foreseen)))
    return worst


class Played:
    """Rows driven through a drafter's whole life by a script: the drafter guesses, the script says what was kept."""

    def __init__(
        self, model: TransformersModel, head: DFlashHead, texts: list[list[int]], spy: type[Spy] = Spy
    ) -> None:
        self.model, self.head = model, head
        self.texts = [list(text) for text in texts]
        self.random = torch.Generator().manual_seed(9)
        self.target = Target(model, len(texts), 48)
        self.drafter = spy(head, model, self.context(), 48)
        feed(
            self.target, [text[:-1] for text in texts], [0] * len(texts), head=False, taps=head.taps,
            on_chunk=lambda start, count, taps: self.drafter.read_prompt(PromptChunk(start, count, taps)),
        )  # fmt: skip

    def context(self, depth_limit: Sequence[int] = ()) -> Context:
        lengths = [len(text) - 1 for text in self.texts]
        params = [SamplingParams(temperature=1.0)] * len(lengths)
        processors = Processors(params, vocab_size=VOCAB, end_token_ids=(), device=torch.device("cpu"))
        return Context(
            History([list(text) for text in self.texts], [1] * len(lengths)), processors, torch.tensor(lengths), lengths,
            torch.tensor([text[-1] for text in self.texts]), [[] for _ in lengths], list(depth_limit) or [9] * len(lengths),
        )  # fmt: skip

    def step(
        self, paths: list[list[int]], *, shape: str = "static/branching=2x2x1x1", depth_limit: Sequence[int] = ()
    ) -> None:
        """Propose, then commit the paths of another tree, of random tokens."""
        context, parsed = self.context(depth_limit), parse_shape(shape, 4)
        context.depth_limit = [min(limit, parsed.depth) for limit in context.depth_limit]
        with torch.inference_mode():
            proposed = self.drafter.propose(context, parsed, DrawMode.COUPLED, noise_for(context))
            proposed.check()
            parent = torch.tensor(PARENTS[: len(paths)])
            tokens = torch.randint(0, VOCAB, parent.shape, generator=self.random)
            tokens[:, 0] = context.pending
            out = self.target.forward(tokens, layout(parent, context.length, 48), taps=self.head.taps)
            bonus = torch.randint(0, VOCAB, (len(paths),), generator=self.random).tolist()
            emitted = [[*ids[path[1:]].tolist(), more] for ids, path, more in zip(tokens, paths, bonus, strict=True)]
            width = max(map(len, paths))
            src = torch.tensor([path + list(range(len(path), width)) for path in paths])
            self.target.commit(context.length[:, None] + src, context.length[:, None] + torch.arange(width))
            tree = TokenTree(tokens, parent, torch.zeros_like(parent))
            self.drafter.observe(Commit(tree, context.length, paths, emitted, out.taps))
        for text, more in zip(self.texts, emitted, strict=True):
            text += more

    def keep(self, rows: list[int]) -> None:
        self.target.keep(torch.tensor(rows))
        self.drafter.keep(rows)
        self.texts = [self.texts[row] for row in rows]

    def audit(self) -> None:
        """The memory is what the features of each row's text project to, and nothing of any block."""
        for row, text in enumerate(self.texts):
            ids = text[: self.drafter.features.rows[row].start]  # what was taken is in memory
            if not ids:
                continue
            batch = TeacherBatch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([1]))
            context = self.head.fuse(Teacher(self.model).label(batch, self.head.taps).taps)
            positions = torch.arange(len(ids))[None]
            for layer, block in enumerate(self.head.layers):
                attention: Any = block.self_attn
                held = (
                    self.drafter.cache.keys[layer][row, :, : len(ids)],
                    self.drafter.cache.values[layer][row, :, : len(ids)],
                )
                with torch.no_grad():
                    torch.testing.assert_close(held[0], attention.keys(context, positions)[0], rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(held[1], attention.values(context)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_training_in_a_ragged_batch(
    kind: str, model: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 4)  # prompts of several chunks
    head = random_head(model, **KINDS[kind])
    played = Played(model, head, TEXTS)
    played.step(STEPS[0])
    played.audit()
    played.step(STEPS[1], shape="dyspec/size=8", depth_limit=[4, 0, 2, 1])
    played.audit()
    played.keep([0, 2, 3])
    played.step([STEPS[2][row] for row in (0, 2, 3)], shape="eagle2")
    played.step([[0]] * 3, depth_limit=[0, 0, 0])  # nothing is proposed: what became known waits
    played.step([[0]] * 3, shape="chain")
    played.audit()
    seen = played.drafter.seen
    assert {one.depth for one in seen} == {0, 1, 2, 3}
    assert len(seen) > 40
    assert any(one.chance is not None for one in seen) == head.config.confidence
    told = torch.stack([one.logits for one in seen])
    assert check(head, model, seen) < 1e-5 * max(1.0, float(told[told.isfinite()].std()))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_training_alone(kind: str, model: TransformersModel) -> None:
    head = random_head(model, **KINDS[kind])
    for text in (TEXTS[0], TEXTS[2]):
        played = Played(model, head, [text])
        for paths, shape in zip(STEPS, ("chain", "static/branching=3x2", "dyspec/size=5"), strict=True):
            played.step([paths[0]], shape=shape)
        played.audit()
        assert check(head, model, played.drafter.seen) < 1e-5


class LatePrompt(Spy):
    """A mutant: features of the prompt one place too late."""

    def read_prompt(self, chunk: PromptChunk) -> None:
        super().read_prompt(replace(chunk, taps=chunk.taps.roll(1, 1)))


class LateStep(Spy):
    """A mutant: features of kept nodes are those of the nodes before them."""

    def observe(self, commit: Commit) -> None:
        assert commit.taps is not None
        super().observe(replace(commit, taps=commit.taps.roll(1, 1)))


class LeftBehind(Spy):
    """A mutant: rows of the block are taken for text."""

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        moved = replace(context, length=context.length + 1, lengths=[length + 1 for length in context.lengths])
        for row in self.features.rows:
            row.start += 1
        try:
            return super().begin(moved, limits)
        finally:
            for row in self.features.rows:
                row.start -= 1


@pytest.mark.parametrize("mutant", [LatePrompt, LateStep, LeftBehind])
def test_features_in_the_wrong_place_are_caught(mutant: type[Spy], model: TransformersModel) -> None:
    head = random_head(model)
    played = Played(model, head, [TEXTS[2]], mutant)
    played.step([[0, 1, 3]])
    played.step([[0]])
    assert check(head, model, played.drafter.seen) > 1e-2


def test_a_block_bounds_the_depth(model: TransformersModel) -> None:
    for changes, guesses in (({}, 4), ({"sample_from_anchor": True}, 5), ({"causal": True}, 4)):
        played = Played(model, random_head(model, **changes), [TEXTS[2]])
        context = played.context(depth_limit=[9])
        tree = played.drafter.propose(context, parse_shape("chain", 8), DrawMode.COUPLED, noise_for(context))
        assert tree.num_nodes == 1 + guesses


def test_a_causal_block_runs_only_the_rows_it_needs(model: TransformersModel) -> None:
    played = Played(model, random_head(model, causal=True), [TEXTS[2]])
    widths: list[int] = []
    rows = played.head.rows
    played.head.rows = lambda blocks, *rest: (widths.append(blocks.shape[1]), rows(blocks, *rest))[1]  # type: ignore[method-assign]
    played.step([[0]], shape="chain/depth=2")
    assert widths == [3]


def test_a_head_of_another_target_is_refused(model: TransformersModel) -> None:
    with pytest.raises(ModelError, match="trained for a target of vocabulary 7"):
        DFlash(DFlashHead(replace(CONFIG, vocab_size=7, mask_token_id=0)), model)
    with pytest.raises(ModelError, match="output of target layer 4"):
        DFlash(DFlashHead(replace(CONFIG, layer_ids=(1, 4))), model)


@torch.inference_mode()
def test_the_confidence_head_can_stop_a_chain(model: TransformersModel) -> None:
    played = Played(model, random_head(model, markov_rank=6, confidence=True), TEXTS)
    context = played.context()
    for threshold, nodes in ((0.0, 2), (1.0, 5)):  # at once; never
        shape = parse_shape(f"specdec/threshold={threshold}", 4)
        assert played.drafter.propose(context, shape, DrawMode.COUPLED, noise_for(context)).num_nodes == nodes
    check_stop(DFlash(played.head, model), shape)
    chance = played.drafter.chance
    assert bool(((chance > 0) & (chance < 1)).all())
    played = Played(model, random_head(model, markov_rank=6), TEXTS)
    with pytest.raises(ConfigError, match="none is loaded"):
        played.drafter.propose(context, shape, DrawMode.COUPLED, noise_for(context))
    with pytest.raises(ConfigError, match="none is loaded"):
        check_stop(DFlash(played.head, model), shape)


@pytest.mark.parametrize("of_head", [torch.float32, torch.bfloat16])
def test_a_target_in_bfloat16(of_head: torch.dtype) -> None:
    small = TransformersModel(tiny_module("qwen3", dtype=torch.bfloat16))
    head = random_head(small, **KINDS["all"]).to(of_head)
    found = Engine(small, speculative=ENGINE, method=DFlash(head, small)).generate_batch(REQUESTS)
    assert [len(completion.token_ids) for completion in found] == [12, 13, 14, 15]
    assert sum(completion.num_accepted_tokens for completion in found) > 0


# -- through the engine ----------------------------------------------------------------------------------------------

ENGINE = {"method": "draft_model", "num_speculative_tokens": 4, "verify": "coupled"}
REQUESTS = [
    Request(
        text, SamplingParams(max_new_tokens=12 + row, temperature=(0.0, 0.7, 1.0, 1.0)[row], seed=row, ignore_eos=True)
    )
    for row, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def expected(model: TransformersModel) -> list[list[int]]:
    engine = Engine(model, speculative={"method": "none"})
    return [completion.token_ids for completion in engine.generate_batch(REQUESTS)]


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("shape", ["chain", "static/branching=3x2x1", "dyspec/size=6"])
def test_the_same_text_as_plain(kind: str, shape: str, model: TransformersModel, expected: list[list[int]]) -> None:
    method = DFlash(random_head(model, **KINDS[kind]), model)
    found = Engine(model, speculative={**ENGINE, "shape": shape}, method=method).generate_batch(REQUESTS)
    assert [completion.token_ids for completion in found] == expected
    assert all(completion.num_draft_tokens > 0 for completion in found)


def test_drawn_blocks_carry_their_law(model: TransformersModel) -> None:
    """Rejection sampling over draws of the block's marginals runs, trees being legal at every step."""
    method = DFlash(random_head(model, **KINDS["markov"]), model)
    found = Engine(model, speculative={**ENGINE, "verify": "rejection"}, method=method).generate_batch(REQUESTS)
    assert [len(completion.token_ids) for completion in found] == [12, 13, 14, 15]
