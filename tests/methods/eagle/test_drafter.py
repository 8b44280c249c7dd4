"""EAGLE drafters: what decoding computes, tree-shaped and cached, is what training computes on the same text.

A lossless verifier hides a broken head, so nothing else would notice features of the wrong position.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.core.errors import ModelError
from foretell.core.tree import DrawMode, Plan, TokenTree
from foretell.draft.base import Commit, PromptChunk
from foretell.heads.modules import RopeScaling
from foretell.heads.pair_head import PairHead
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.eagle.drafter import Eagle1, Eagle2, Eagle3, EagleDrafter
from foretell.methods.eagle.eagle1 import Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.eagle.objective import unrolled
from foretell.methods.features import TOGETHER, FeatureBuffer
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run.lean import LeanModel
from foretell.model.target import CausalModel
from tests.engine.harness import VOCAB as TOY, ToyTokenizer, mixed_requests, outcome, plain, table
from tests.methods.decoding import Decoding, Pass, Recording, prompts
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.model.tiny import VOCAB, tiny_module


class Recorded(Recording, EagleDrafter):
    """Keeps every answer."""


def trained(head: PairHead, passes: Sequence[Pass]) -> Tensor:
    """[P, V] the training-time forward's logits after each path behind its text: all of them in one padded batch."""
    texts = [one.text + one.path for one in passes]
    length = torch.tensor([len(text) for text in texts])
    tokens = torch.tensor([text + [0] * (int(length.max()) - len(text)) for text in texts])
    batch = TeacherBatch(tokens, length, torch.ones_like(length))
    features = head.features(Teacher(ORACLE).label(batch, head.taps).taps, ORACLE)
    steps = unrolled(head, batch, features, ORACLE, 1 + max(len(one.path) for one in passes))
    # The last feature known is that of the token before the pending one.
    reads = [steps[len(one.path)][1][row, len(one.text) - 2] for row, one in enumerate(passes)]
    logits = head.logits(torch.stack(reads)[None], ORACLE)[0]
    if head.vocabulary is None:
        return logits
    return torch.full((len(passes), VOCAB), -torch.inf).index_copy(1, head.vocabulary, logits)


def largest_error(decoding: Decoding) -> float:
    """Of any logit of any pass, against training; tokens outside the draft vocabulary must be the same ones."""
    passes = decoding.drafter.passes
    with torch.no_grad():
        expected = trained(decoding.head, passes)
    given = torch.stack([one.logits for one in passes])
    known = expected > -torch.inf
    assert torch.equal(given > -torch.inf, known)
    return float((given - expected)[known].abs().max())


MODULE = tiny_module("llama")
ORACLE = TransformersModel(MODULE)
MODELS: dict[str, CausalModel] = {"transformers": ORACLE, "lean": LeanModel.from_hf(MODULE)}
CONFIGS: dict[str, Eagle1HeadConfig | Eagle3HeadConfig] = {
    "eagle1": EAGLE1,
    "eagle3": EAGLE3,
    "eagle3.1": replace(EAGLE3, fc_norm=True, norm_output=True, draft_vocab_size=VOCAB),
    "eagle3-normed": replace(EAGLE3, norm_before_residual=True, own_embedding=True),
    "eagle1-layers": replace(EAGLE1, num_layers=2, windows=(3, 0), attention_bias=True, output_bias=True),
    "eagle3-layers": replace(
        EAGLE3, num_layers=3, windows=(0, 4, 4), qk_norm=True, norm_before_fc=True,
        rope_scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.2),
    ),
}  # fmt: skip
STEPS = [
    ("chain", DrawMode.COUPLED),
    ("chain", DrawMode.IID),
    ("static/branching=2x2x1", DrawMode.FIXED),
    ("chain", DrawMode.COUPLED),
    ("eagle2/size=8/width=3", DrawMode.COUPLED),
    ("dyspec/size=8/width=3", DrawMode.IID),
    ("static/branching=1x2x1", DrawMode.IID),
]


def decoded(head: PairHead, model: CausalModel, lengths: Sequence[int], **options: Any) -> Decoding:
    """Rows after a few steps of many shapes; with several rows, some go without room and one is dropped on the way."""
    decoding = Decoding(model, head, prompts(lengths), **{"drafter_class": Recorded, **options})
    several = len(lengths) > 1
    with torch.inference_mode():
        for number, (shape, draws) in enumerate(STEPS):
            depth_limit = None
            if several and number in (1, 2, 4):
                depth_limit = [(0, 2, 100, 1)[(row + number) % 4] for row in range(decoding.context.num_rows)]
            decoding.step(shape, draws, depth_limit=depth_limit)
            if several and number == 3:
                decoding.keep([3, 0, 1])
    return decoding


@pytest.mark.parametrize("implementation", MODELS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(7,), (5, 1, 12, 2)], ids=["one", "ragged"])
def test_decoding_computes_what_training_does(name: str, implementation: str, lengths: tuple[int, ...]) -> None:
    decoding = decoded(random_head(CONFIGS[name]), MODELS[implementation], lengths)
    passes = decoding.drafter.passes
    assert max(len(one.path) for one in passes) >= 3
    assert decoding.drafter.widest >= 3
    assert len(passes) >= 20 * len(lengths)
    assert largest_error(decoding) < 1e-5


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.methods.eagle.drafter.PREFILL_CHUNK", 5)
    monkeypatch.setattr("foretell.model.prefill.PREFILL_CHUNK", 4)
    for lengths in ((19,), (19, 3, 1, 11)):
        assert largest_error(decoded(random_head(EAGLE3), ORACLE, lengths)) < 1e-5


def test_a_text_of_one_token_is_guessed_only_from_its_second_step_on() -> None:
    decoding = Decoding(ORACLE, random_head(EAGLE3), prompts([1]), Recorded)
    with torch.inference_mode():
        assert decoding.step("chain", DrawMode.COUPLED).num_nodes == 1
        assert not decoding.drafter.passes
        assert decoding.step("chain", DrawMode.COUPLED).num_nodes == 5
    assert largest_error(decoding) < 1e-5


# -- planted mistakes ------------------------------------------------------------------------------------------------


class LateFeatures(FeatureBuffer):
    """Features of a step are those of one node further."""

    def observe(self, commit: Commit) -> None:
        assert commit.taps is not None
        super().observe(replace(commit, taps=commit.taps.roll(-1, 1)))


class LatePrompt(FeatureBuffer):
    """Features of the prompt are those of one token further."""

    def read_prompt(self, chunk: PromptChunk) -> None:
        super().read_prompt(replace(chunk, taps=chunk.taps.roll(-1, 1)))


class WrongBuffer(Recorded):
    buffer_class: type[FeatureBuffer] = FeatureBuffer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        prepare = self.features.prepare
        self.features = self.buffer_class(len(self.filled), prepare)


class LateSteps(WrongBuffer):
    buffer_class = LateFeatures


class LatePrompts(WrongBuffer):
    buffer_class = LatePrompt


class SameToken(Recorded):
    """A pair holds the token of the feature's own position, not the next one."""

    def _read(self, features: Tensor, ids: list[list[int]], starts: list[int]) -> Any:
        return super()._read(features, [[0, *row][:-1] for row in ids], starts)


class Grandparent(Recorded):
    """A node feeds on the root's output, whatever its parent is."""

    def run(self, tokens: Tensor, features: Tensor, plan: Plan) -> Any:
        if features.shape[1] == tokens.shape[1] and plan.ancestry.shape[2] > plan.num_nodes:
            features = self._outputs[:, :1].expand_as(features)
        return super().run(tokens, features, plan)


class Drifting(Recorded):
    """Pairs that were drafted right are not computed again from the true features: their guessed ones stay."""

    def _read(self, features: Tensor, ids: list[list[int]], starts: list[int]) -> Any:
        last = len(ids[0]) - 1
        return super()._read(features[:, last:], [ids[0][last:]], [starts[0] + last])


@pytest.mark.parametrize("mistake", [LateSteps, LatePrompts, SameToken, Grandparent, Drifting])
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_planted_mistake_is_seen(name: str, mistake: type[EagleDrafter]) -> None:
    assert largest_error(decoded(random_head(CONFIGS[name]), ORACLE, (7,), drafter_class=mistake)) > 1e-2


def test_a_layer_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head(EAGLE3)
    decoding = decoded(head, ORACLE, (7,))
    monkeypatch.setattr(Eagle3Head, "taps", (1, 2, 3))
    assert largest_error(decoding) > 1e-2


# -- features waiting to be read -------------------------------------------------------------------------------------


def test_the_buffer_hands_out_every_feature_once_in_order() -> None:
    buffer = FeatureBuffer(3)
    taps = torch.arange(3 * 4 * 2).float().view(3, 4, 2)
    buffer.read_prompt(PromptChunk([0, 0, 0], [4, 1, 0], taps))
    buffer.read_prompt(PromptChunk([4, 1, 0], [2, 0, 0], taps + 100))
    assert buffer.ends == [6, 1, 0]
    features, start, count = buffer.take([1, 0, 1])
    assert (start, count) == ([0, 0, 0], [6, 0, 0])
    torch.testing.assert_close(features[0], torch.cat([taps[0], taps[0, :2] + 100]))
    tree = TokenTree(torch.zeros(3, 4).long(), torch.tensor([[-1, 0, 1, 1]] * 3), torch.zeros(3, 4).long())
    paths = [[0, 1, 3], [0], [0, 1]]
    buffer.observe(Commit(tree, torch.tensor([6, 1, 0]), paths, [[1] * len(path) for path in paths], taps))
    features, start, count = buffer.take()
    assert (start, count) == ([6, 0, 0], [3, 2, 2])
    torch.testing.assert_close(features[0], taps[0, [0, 1, 3]])
    torch.testing.assert_close(features[1, :2], taps[1, [0, 0]])
    torch.testing.assert_close(features[2, :2], taps[2, [0, 1]])
    assert buffer.take() == (None, [9, 2, 2], [0, 0, 0])


def test_taps_that_the_prefix_store_holds_wait_until_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, and whatever of later positions is made before them; the features are those of a text that
    was read anew."""
    monkeypatch.setattr("foretell.methods.features.MOST_BYTES", 8 * 40)
    made: list[int] = []

    def prepare(taps: Tensor) -> Tensor:
        made.append(taps.shape[1])
        return taps[..., :1] * 10.0

    tree = TokenTree(torch.zeros(1, 1).long(), torch.full((1, 1), -1), torch.zeros(1, 1).long())
    known = torch.arange(200.0).view(1, 100, 2)
    buffers = [FeatureBuffer(1, prepare) for _ in range(2)]
    for buffer, stored in zip(buffers, (True, False), strict=True):
        made.clear()
        buffer.read_prompt(PromptChunk([0], [100], known, stored))
        assert made == ([] if stored else [100])
        buffer.read_prompt(PromptChunk([100], [3], 7.0 * known[:, :3]))
        for step in range(60):
            taps = torch.full((1, 1, 2), 1000.0 + step)
            buffer.observe(Commit(tree, torch.tensor(buffer.ends), [[0]], [[1]], taps))
        assert made == [*([] if stored else [100]), 40]
        assert buffer.ends == [163]
    one, other = (torch.cat([buffer.take_first(0, 70), buffer.take()[0][0]]) for buffer in buffers)  # type: ignore
    assert torch.equal(one, other)
    assert one.shape == (163, 1)


@pytest.mark.parametrize("together", [False, True])
def test_features_are_made_late_and_together(monkeypatch: pytest.MonkeyPatch, *, together: bool) -> None:
    """Nothing is made of a prompt's or a plain step's taps until it is asked for, or until a row has many; and all are
    made once, in order."""
    monkeypatch.setattr("foretell.methods.features.MOST_BYTES", 8 * 50)  # the taps of 50 positions
    made: list[int] = []

    def prepare(taps: Tensor) -> Tensor:
        made.append(taps.shape[0] * taps.shape[1])
        return taps[..., :1] * 10.0

    buffer = FeatureBuffer(2, prepare)
    tree = TokenTree(torch.zeros(2, 1).long(), torch.full((2, 1), -1), torch.zeros(2, 1).long())
    buffer.read_prompt(PromptChunk([0, 0], [40, 3], torch.arange(160.0).view(2, 40, 2)))
    assert not made
    seen = torch.arange(160.0).view(2, 40, 2)[..., :1] * 10.0
    rows, commits = [seen[0], seen[1, :3]], []
    for step in range(2 * TOGETHER + 3):
        taps = torch.full((2, 1, 2), 1000.0 + step)
        taps[1] += 0.5
        commits.append(Commit(tree, torch.tensor(buffer.ends), [[0], [0]], [[1], [1]], taps))
        if not together:
            buffer.observe(commits[-1])
            taps.fill_(-1.0)  # the next pass writes them over
        new = [1000.0 + step, 1000.5 + step]
        rows = [torch.cat([known, torch.tensor([[value * 10.0]])]) for known, value in zip(rows, new, strict=True)]
    if together:
        buffer.observe_all(commits)
    assert made == ([107, 70] if together else [50, 50, 50])
    first = buffer.take_first(1, 5)
    assert torch.equal(first, rows[1][:5])
    assert made[3:] == ([] if together else [20]), "of this row alone"
    last = Commit(tree, torch.tensor(buffer.ends), [[0], [0]], [[1], [1]], torch.tensor([[[7.0, 0.0]], [[8.0, 0.0]]]))
    (buffer.observe_all([last]) if together else buffer.observe(last))
    rows = [torch.cat([known, torch.tensor([[value]])]) for known, value in zip(rows, (70.0, 80.0), strict=True)]
    buffer.keep([1, 0])
    features, start, count = buffer.take()
    assert (start, count) == ([5, 0], [len(rows[1]) - 5, len(rows[0])])
    assert torch.equal(features[0, : count[0]], rows[1][5:])
    assert torch.equal(features[1, : count[1]], rows[0])
    assert sum(made) == len(rows[0]) + len(rows[1]), "each once"
    other = FeatureBuffer(1, prepare)
    other.read_prompt(PromptChunk([0], [2], torch.ones(1, 2, 2)))
    buffer.join(other)
    features, _, count = buffer.take([0, 0, 1])
    assert features[2].tolist() == [[10.0], [10.0]]
    assert count == [0, 0, 2]


@pytest.mark.parametrize("path", [[0, 1], [0, 2]])
def test_the_buffer_keeps_no_view_of_taps(path: list[int]) -> None:
    buffer = FeatureBuffer(1, lambda taps: taps)
    taps = torch.ones(1, 3, 2)
    tree = TokenTree(torch.zeros(1, 3).long(), torch.tensor([[-1, 0, 0]]), torch.zeros(1, 3).long())
    buffer.observe(Commit(tree, torch.tensor([0]), [path], [[1, 1]], taps))
    taps.zero_()  # the next pass writes over it
    features, _, _ = buffer.take()
    assert features.sum() == 4


def test_the_buffer_drops_rows_and_refuses_a_gap() -> None:
    buffer = FeatureBuffer(3)
    buffer.read_prompt(PromptChunk([0, 0, 0], [1, 2, 3], torch.arange(9.0).view(3, 3, 1)))
    buffer.keep([2, 0])
    features, start, count = buffer.take()
    assert (start, count) == ([0, 0], [3, 1])
    assert features[0, :, 0].tolist() == [6, 7, 8]
    assert features[1, 0, 0] == 0
    with pytest.raises(RuntimeError, match="features from position 4"):
        buffer.read_prompt(PromptChunk([4, 1], [1, 1], torch.zeros(2, 1, 1)))


# -- in the engine ---------------------------------------------------------------------------------------------------


def toy_head(target: CausalModel, draft_vocab_size: int = TOY - 4) -> Eagle3Head:
    config = replace(
        EAGLE3,
        hidden_size=target.spec.hidden_size,
        vocab_size=TOY,
        draft_vocab_size=draft_vocab_size,
        layer_ids=(0, 1, 2),
    )
    head = random_head(config)
    return head.double()  # as the table


def toy_engine(shape: str, verify: str, *, draft_vocab_size: int = TOY - 4) -> Engine:
    target = table(num_layers=3)
    config = {"method": "draft_model", "num_speculative_tokens": 4, "shape": shape, "verify": verify}
    method = Eagle3(toy_head(target, draft_vocab_size), target)
    return Engine(target, ToyTokenizer(), speculative=config, method=method)


@lru_cache
def toy_expected() -> list[Any]:
    return [outcome(each) for each in plain(table(num_layers=3), mixed_requests(12))]


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2x1", "eagle2/size=8/width=3", "dyspec/size=8"])
def test_text_is_the_same_with_and_without_the_head(shape: str) -> None:
    requests = mixed_requests(12)
    engine = toy_engine(shape, "coupled")
    batched = engine.generate_batch(requests, batch_size=4)
    assert [outcome(each) for each in batched] == toy_expected()
    alone = [outcome(engine.generate(request.prompt, request.params)) for request in requests[:2]]
    assert alone == toy_expected()[:2]
    assert sum(each.num_accepted_tokens for each in batched) > 0


@pytest.mark.parametrize(("shape", "verify"), [("chain", "rejection"), ("chain", "block"), ("static", "traversal")])
def test_drawn_guesses_are_verified_by_their_law(shape: str, verify: str) -> None:
    completions = toy_engine(shape, verify).generate_batch(mixed_requests(12), batch_size=3)
    assert sum(each.num_draft_tokens for each in completions) > 50
    assert all(set(each.token_ids) <= set(range(TOY)) for each in completions)


def test_a_banned_draft_vocabulary_guesses_nothing_wrong() -> None:
    """Every token that the head can say is banned: its distribution is empty, the text is the target's."""
    target = table(num_layers=3)
    head = toy_head(target, 2)
    banned = tuple(head.target_ids.tolist())
    params = SamplingParams(max_new_tokens=12, banned_token_ids=banned, seed=1, ignore_eos=True)
    config = {"method": "draft_model", "num_speculative_tokens": 3, "verify": "coupled"}
    engine = Engine(target, ToyTokenizer(), speculative=config, method=Eagle3(head, target))
    expected = plain(target, [Request([3, 4, 5], params)])[0]
    assert engine.generate([3, 4, 5], params).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", [Eagle1, Eagle2])
def test_text_is_the_same_with_and_without_an_eagle1_head(kind: type[Eagle1]) -> None:
    head = random_head(EAGLE1)
    model = MODELS["lean"]
    requests = [Request(ids, SamplingParams(max_new_tokens=12, seed=7, ignore_eos=True)) for ids in prompts([6, 1, 9])]
    config = {"method": "draft_model", "shape": "eagle2/size=6/width=2", "num_speculative_tokens": 3}
    tokenizer = ToyTokenizer([b"%d " % token for token in range(VOCAB)], special=())
    engine = Engine(model, tokenizer, speculative=config, method=kind(head, model))
    given = [each.token_ids for each in engine.generate_batch(requests)]
    assert given == [each.token_ids for each in plain(model, requests, tokenizer=tokenizer)]


def test_a_head_for_another_target_is_refused() -> None:
    eagle3, eagle1 = random_head(replace(EAGLE3, hidden_size=64)), random_head(replace(EAGLE1, tap_layer=2))
    with pytest.raises(ModelError, match="hidden size 64"):
        Eagle3(eagle3, ORACLE)
    with pytest.raises(ModelError, match="must read the last one, 3"):
        Eagle1(eagle1, ORACLE)
