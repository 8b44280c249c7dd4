"""Self-speculation: nothing is computed twice, and what is handed on is what a fresh pass would compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine, Request, SamplingParams, speculative_config
from foretell.core.errors import ModelError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan
from foretell.draft.base import Commit, Method
from foretell.draft.shapes import parse_shape
from foretell.heads.modules import causal_mask
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.kangaroo.drafter import Kangaroo, KangarooDrafter
from foretell.methods.kangaroo.head import KangarooHead
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run.lean import LeanModel
from foretell.model.target import CausalModel
from tests.engine.conftest import audited  # noqa: F401 - every step is followed by adding up the books
from tests.engine.harness import ToyTokenizer, plain, prompts
from tests.engine.test_cache import assert_like_prefill
from tests.methods.decoding import CAPACITY, Decoding, Recording, prompts as texts_of
from tests.methods.kangaroo.test_head import random_head
from tests.model.tiny import VOCAB, path_to, tiny_module

NUMBERS = ToyTokenizer([f"w{i} ".encode() for i in range(VOCAB)], special=(2,))
CONFIGS = ["chain", "adaptive/threshold=0.2", "static/branching=2x2x1", "sequoia/size=9"]
PREFILL_CHUNK = 4


@pytest.fixture(scope="module")
def hf() -> TransformersModel:
    return TransformersModel(tiny_module("qwen3"))


@pytest.fixture(scope="module")
def lean() -> LeanModel:
    return LeanModel.from_hf(tiny_module("qwen3"))


# -- step by step, with paths chosen by the test -------------------------------------------------------------------


class Recorded(Recording, KangarooDrafter):
    """Keeps every answer."""


class Walk(Decoding):
    """Rows of random texts by one implementation, and another that says what training computes."""

    def __init__(self, model: CausalModel, oracle: CausalModel, lengths: Sequence[int]) -> None:
        self.oracle = oracle
        super().__init__(model, random_head(), texts_of(lengths))

    def open(self) -> KangarooDrafter:
        return Recorded(self.head, self.target, self.context, CAPACITY)

    def check(self, shape: str, choose: Callable[[int, list[int]], int], **options: Any) -> None:
        """A step, and its drafted and verified logits against whole texts."""
        self.drafter.passes.clear()
        tree = self.step(shape, choose=choose, **options)
        passes, parents, tokens = self.drafter.passes, tree.parent.tolist(), tree.tokens.tolist()
        seen = [
            (row, node, [*text, *(tokens[row][above] for above in path_to(parents[row], node)[1:])])
            for row, text in enumerate(self.before)
            for node in range(tree.num_nodes)
            if node == 0 or parents[row][node] >= 0
        ]
        texts = [[*one.text, *one.path] for one in passes] + [text for _, _, text in seen]
        head: Any = self.head
        draft, target = whole(self.oracle, head, texts)
        if passes:
            told = torch.stack([one.logits for one in passes])
            torch.testing.assert_close(told, draft[: len(passes)], atol=2e-5, rtol=1e-5)
        assert self.out.logits is not None
        found = torch.stack([self.out.logits[row, node] for row, node, _ in seen])
        torch.testing.assert_close(found, target[len(passes) :], atol=2e-5, rtol=1e-5)

    def check_cache(self) -> None:
        """The target's cache against a prefill."""
        state: Any = self.context
        assert_like_prefill(self.target, state, state.lengths)


def whole(model: CausalModel, head: KangarooHead, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Logits [M, V] after each text, as training computes them, of the draft and of the target."""
    length = torch.tensor([len(text) for text in texts])
    size, ends = int(length.max()), (torch.arange(len(texts)), length - 1)
    batch = TeacherBatch(torch.tensor([text + [0] * (size - len(text)) for text in texts]), length, length)
    labeled = Teacher(model).label(batch, head.taps)
    features = head(labeled.taps, torch.arange(size)[None], causal_mask(length, size))
    return model.head(features)[ends], labeled.logits[ends]


def deepest(parents: list[int]) -> int:
    """The last of the deepest nodes: full acceptance, and in a tree a side branch."""
    return max((len(path_to(parents, node)), node) for node in range(len(parents)) if parents[node] >= 0 or not node)[1]


CHOICES: dict[str, Callable[[int, list[int]], int]] = {
    "all": lambda row, parents: deepest(parents),
    "last": lambda row, parents: max(node for node in range(len(parents)) if parents[node] >= 0 or not node),
    "none": lambda row, parents: 0,
    "some": lambda row, parents: path_to(parents, deepest(parents))[:-1][-1],
    "ragged": lambda row, parents: deepest(parents) if row % 2 else 0,
    "leading": lambda row, parents: 1 if parents[1:2] == [0] else 0,
}


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [*((shape, (1, 9, 3, 6)) for shape in CONFIGS), ("chain", (7,)), (CONFIGS[2], (7,)), (CONFIGS[-1], (7,))],
)
def test_decoding_is_training(
    shape: str, lengths: tuple[int, ...], hf: TransformersModel, lean: LeanModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every logit that was drafted by, over steps of all kinds, as the training-time forward has it on the same tokens."""
    monkeypatch.setattr("foretell.model.prefill.PREFILL_CHUNK", PREFILL_CHUNK)
    with torch.inference_mode():
        walk = Walk(lean if shape != "chain" else hf, hf, lengths)
        kept, moved = 0, 0
        for kind in ("all", "last", "none", "some", "ragged", "all", "leading"):
            walk.check(shape, CHOICES[kind])
            kept += sum(path[-1] in walk.drafter.leaves for path in walk.paths)
            moved += sum(path != list(range(len(path))) for path in walk.paths)
        walk.check_cache()
        if not shape.startswith("adaptive"):  # which may have read its last guess too
            assert kept >= 2, "leaves without keys of the adapter were kept"
        assert (moved > 0) == (not shape.startswith(("chain", "adaptive")))


def test_rows_without_room(hf: TransformersModel, lean: LeanModel) -> None:
    """A row without room has a tree of one node, and its adapter's cache stays whole."""
    with torch.inference_mode():
        walk = Walk(lean, hf, (5, 2, 8))
        for depth_limit in ([3, 0, 1], [0, 0, 0], [0, 2, 4], [9, 9, 9]):
            walk.check("static/branching=2x2x1", CHOICES["all"], depth_limit=depth_limit)
            assert [len(path) - 1 for path in walk.paths] == [min(most, 3) for most in depth_limit]
        walk.check_cache()


def test_dropped_rows(hf: TransformersModel) -> None:
    """Rows go between steps, right after their neighbours were accepted whole."""
    with torch.inference_mode():
        walk = Walk(hf, hf, (5, 2, 8))
        walk.step("chain", choose=CHOICES["all"])
        walk.keep([2, 1])
        for _ in range(2):
            walk.check("static/branching=2x2", CHOICES["ragged"])
        walk.check_cache()


@pytest.mark.parametrize("fault", ["full acceptance", "side branch"])
def test_the_classic_faults_are_seen(fault: str, hf: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: an adapter that forgets the last leaf, or leaves a kept branch where it was."""
    observe = KangarooDrafter.observe

    def wrong(self: KangarooDrafter, commit: Commit) -> None:
        if fault == "side branch":
            commit = replace(commit, path=[list(range(len(path))) for path in commit.path])
        observe(self, commit)
        if fault == "full acceptance":
            self.last = None

    monkeypatch.setattr(KangarooDrafter, "observe", wrong)
    with torch.inference_mode():
        walk = Walk(hf, hf, (6,))
        walk.step("static/branching=2x2x1", choose=CHOICES["all"])
        with pytest.raises(AssertionError, match="not close"):
            walk.check("chain", CHOICES["none"])


# -- through the engine ------------------------------------------------------------------------------------------------


def engine(target: CausalModel, method: Method, shape: str, tokenizer: Any = NUMBERS, **options: Any) -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": 4, "shape": shape, **options}
    return Engine(target, tokenizer, speculative=config, method=method)


def requests(count: int = 5) -> list[Request]:
    texts = [[3 + token % (VOCAB - 3) for token in ids] for ids in prompts()]
    return [
        Request(ids, SamplingParams(max_new_tokens=3 + 3 * i, seed=i, temperature=0.2 * i, ignore_eos=True))
        for i, ids in enumerate(texts[:count])
    ]


@pytest.fixture(scope="module")
def expected(hf: TransformersModel) -> list[list[int]]:
    return [one.token_ids for one in plain(hf, requests(), tokenizer=NUMBERS)]


@pytest.mark.parametrize("shape", CONFIGS)
def test_the_same_text(shape: str, lean: LeanModel, expected: list[list[int]]) -> None:
    """Ragged batches: the tokens of plain decoding by the other implementation."""
    found = engine(lean, Kangaroo(random_head(), lean), shape).generate_batch(requests(), batch_size=4)
    assert [one.token_ids for one in found] == expected
    assert sum(one.num_draft_tokens for one in found) > 20


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2x1", "sequoia/size=9"])
def test_the_same_text_by_transformers(shape: str, hf: TransformersModel, expected: list[list[int]]) -> None:
    found = engine(hf, Kangaroo(random_head(), hf), shape).generate_batch(requests(4))
    assert [one.token_ids for one in found] == expected[:4]


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
def test_a_drawn_law(verify: str, lean: LeanModel) -> None:
    """Drawn nodes carry q, hidden states and all, through rules that read it: no row's text depends on its company."""
    method = Kangaroo(KangarooHead.fresh(lean, exit_layer=3, head_dim=8), lean)
    alone, together = (
        engine(lean, method, "static/branching=2x2", verify=verify).generate_batch(requests(), batch_size=size)
        for size in (1, 5)
    )
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]
    assert sum(one.num_accepted_tokens for one in alone) > 5


def test_one_fixed_width(lean: LeanModel, expected: list[list[int]]) -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    method = Kangaroo(random_head(), lean)
    found = Engine(lean, NUMBERS, speculative=config, method=method, width=8).generate_batch(requests())
    assert [one.token_ids for one in found] == expected


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2x1", "sequoia/size=9"])
def test_no_layer_reads_a_node_twice(
    shape: str,
    audited: list[Any],  # noqa: F811
) -> None:
    """Attention of every layer counts the tokens it computes: the prompt and every node of every tree, once each."""
    module = tiny_module("llama")
    model = TransformersModel(module)
    seen: Counter[int] = Counter()
    for index, layer in enumerate(module.model.layers):
        layer.self_attn.register_forward_hook(
            lambda module, args, output, index=index: seen.update({index: output[0].shape[0] * output[0].shape[1]})
        )
    nodes: list[int] = []
    audited.append(lambda state, target, drafter, report: nodes.append(report.commit.tree.num_nodes))
    method = Kangaroo(random_head(), model)
    prompt = [5, 9, 11, 4, 30]
    found = engine(model, method, shape).generate(prompt, SamplingParams(max_new_tokens=14, seed=3, ignore_eos=True))
    assert len(nodes) >= 3
    assert sum(nodes) == len(nodes) + found.num_draft_tokens
    assert dict(seen) == dict.fromkeys(range(4), len(prompt) - 1 + sum(nodes))


def test_shapes_and_refusals(hf: TransformersModel) -> None:
    grown = {config.split("/")[0] for config in CONFIGS}
    assert set(Kangaroo.capabilities.shapes) == grown
    assert Kangaroo.capabilities.needs_head
    kangaroo = Kangaroo(random_head(), hf)
    assert (kangaroo.taps, kangaroo.prompt_taps) == ((), (1,))
    with pytest.raises(ConfigError, match="'kangaroo' cannot grow the shape 'eagle2'"):
        speculative_config({"method": "kangaroo", "shape": "eagle2"})
    with pytest.raises(ModelError, match="at least one layer"):
        Kangaroo(random_head(exit_layer=4), hf)


def test_kangaroos_second_exit(hf: TransformersModel) -> None:
    """The published stop, as a shape: a chain ends where the most probable guess has less than 0.6."""
    shape = parse_shape("adaptive/rule=probability/threshold=0.6", 4)
    method = Kangaroo(random_head(exit_layer=3), hf)
    with torch.inference_mode():
        walk = Walk(hf, hf, (7,))
        drafter = method.open(walk.context, CAPACITY, walk.target)
        told: list[float] = []
        logits = drafter.logits

        def listening(tokens: Tensor, plan: Plan) -> Tensor:
            out = logits(tokens, plan)
            told.append(float(out[0, -1].softmax(-1).max()))
            return out

        drafter.logits = listening  # type: ignore[method-assign]
        tree = drafter.propose(walk.context, shape, DrawMode.COUPLED, Noise(torch.tensor([0]), walk.context.length))
    sure = [chance >= 0.6 for chance in told]
    assert tree.num_nodes - 1 == (1 + sure.index(False) if False in sure else 4)
