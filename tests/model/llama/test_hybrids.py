"""Native hybrids: logits of the transformers module, and bits that no tree, batch, pass, thread or commit changes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.model.llama.mixture import mixture_of
from foretell.model.llama.run.native import NativeModel, supports
from foretell.model.target import PassOptions
from tests.model.llama.hybrid import (
    CASES,
    KINDS,
    Plain,
    Texts,
    draw,
    hybrid_config,
    hybrid_module,
    line,
    native_hybrid,
    plain_logits,
    random_parents,
    step,
)

REASON = supports(hybrid_config("lfm2"), torch.float32, torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.filterwarnings("ignore"),  # transformers tells which kernels are not installed
]
TOLERANCE = 1e-4
"""Of float32 logits, whose standard deviation is about 1, from those of the module in float64."""
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {}, "bf16": {"dtype": torch.bfloat16}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"},
}  # fmt: skip


def in_float64(module: Any) -> Any:
    """The module in float64, its experts by a product that has that type."""
    if mixture_of(module.config) is not None:
        module.set_experts_implementation("eager")
    return module.double()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    module = hybrid_module(case)
    assert supports(module.config, torch.float32, torch.device("cpu")) is None
    model, text = NativeModel.from_hf(module), draw(random.Random(0), 20)
    logits = Texts(model, [[]]).logits([text], line(20).tolist())[0]
    expected = plain_logits(in_float64(module), text).float()
    assert expected.std() > 0.2
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("case", KINDS)
def test_rounded_weights_are_near(case: str, form: str) -> None:
    """Random models are chaotic; what would be read wrongly has nothing in common with float32's logits."""
    text, rows = draw(random.Random(0), 20), []
    for options in ({}, FORMATS[form]):
        model = native_hybrid(case, **options)
        rows.append(Texts(model, [[]]).logits([text], line(20).tolist())[0])
    likeness = torch.nn.functional.cosine_similarity(rows[0], rows[1]).mean()
    assert {"bf16": 0.98, "int8": 0.85, "int4": 0.6}[form] < likeness < 0.999999


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", KINDS)
def test_nodes_of_trees_have_the_bits_of_their_own_text(case: str, form: str) -> None:
    """Ragged rows, random trees read whole and in parts, before and after ragged commits."""
    model, rng = native_hybrid(case, **FORMATS[form]), random.Random(case)
    plain, rows = Plain(model), Texts(model, [draw(rng, count) for count in (3, 1, 7)])
    rows.read(5)
    compared = step(rows, plain, rng, nodes=9)
    compared += step(rows, plain, rng, nodes=8, cuts=[1, 4, 5])
    compared += step(rows, plain, rng, nodes=1)
    compared += step(rows, plain, rng, nodes=12, cuts=[3])
    assert compared > 45


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nodes_of_trees_at_length(case: str) -> None:
    for form, options in FORMATS.items():
        model, rng = native_hybrid(case, **options), random.Random(case + form)
        plain, rows = Plain(model), Texts(model, [draw(rng, count) for count in (130, 1, 37, 60)])
        rows.read(129)
        for _ in range(12):
            nodes = rng.choice((1, 2, 5, 16, 40))
            step(
                rows,
                plain,
                rng,
                nodes=nodes,
                cuts=sorted(rng.sample(range(1, nodes), min(nodes - 1, rng.randrange(4)))),
            )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", KINDS)
def test_a_line_token_by_token(case: str, form: str) -> None:
    model, text = native_hybrid(case, **FORMATS[form]), draw(random.Random(1), 40)
    whole, single = (Texts(model, [[]]) for _ in range(2))
    logits = whole.logits([text], line(40).tolist())[0]
    for i, token in enumerate(text):
        assert torch.equal(single.logits([[token]], [[-1]])[0, 0], logits[i]), i
        single.commit([[token]], [[0]])


def states(rows: Texts, row: int) -> list[torch.Tensor]:
    """A row's states after all that is committed."""
    saved = rows.hybrid.rows(row, row + 1).save(rows.length[row])
    assert saved.position == rows.length[row]
    return [memory for tensors in saved.tensors for memory in tensors.values()]


@pytest.mark.parametrize("case", KINDS)
def test_prompts_in_chunks_of_any_size(case: str) -> None:
    """More than 128 nodes are committed at once, fewer are kept as terms: the states are the same bit by bit."""
    model, text = native_hybrid(case), draw(random.Random(2), 290)
    expected = None
    for chunk in (290, 1, 17, 128, 129, 200):
        rows = Texts(model, [text])
        rows.read(chunk)
        found = [*states(rows, 0), rows.logits([[5, 9, 11]], [[-1, 0, 0]])]
        if expected is None:
            expected = found
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), chunk


@pytest.mark.parametrize("case", KINDS)
def test_ragged_prompts_in_one_batch(case: str) -> None:
    """Rows that end in an earlier chunk, with one token in this, or with none at all: nothing of the padding is left."""
    model, rng = native_hybrid(case), random.Random(3)
    texts = [draw(rng, count) for count in (0, 1, 131, 300, 150, 170)]
    rows, plain = Texts(model, texts), Plain(model)
    rows.read(150)
    for row, text in enumerate(texts):
        if text:
            alone = Texts(model, [text])
            alone.read(400)
            assert all(torch.equal(a, b) for a, b in zip(states(rows, row), states(alone, 0), strict=True)), row
    step(rows, plain, rng, nodes=3)
    step(rows, plain, rng, nodes=3)


def test_guesses_that_stand_in_a_wide_pass_are_not_committed() -> None:
    """A pass of a fixed width has more nodes than a prompt's, most of them padding: its guesses may be rejected."""
    model, rng = native_hybrid("qwen3_5"), random.Random(4)
    plain, rows = Plain(model), Texts(model, [draw(rng, 9), draw(rng, 4)])
    rows.read(16)
    for kept in (3, 1, 6):
        tokens = [draw(rng, 150) for _ in range(2)]
        logits = rows.logits(tokens, [[*range(-1, count), *[-1] * (149 - count)] for count in (5, 0)])
        assert torch.equal(logits[0, 5], plain.after(rows.texts[0] + tokens[0][:6]))
        assert torch.equal(logits[1, 0], plain.after(rows.texts[1] + tokens[1][:1]))
        rows.commit(tokens, [list(range(kept)), [0]])
    step(rows, plain, rng, nodes=4)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", KINDS)
def test_bits_do_not_depend_on_threads(case: str, form: str) -> None:
    model, rng = native_hybrid(case, **FORMATS[form]), random.Random(5)
    text, parent, tokens = draw(rng, 150), random_parents(rng, 14, 2), draw(rng, 14)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        rows = Texts(model, [text])
        rows.read(140)
        found.append(rows.logits([tokens], [parent]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("case", KINDS)
def test_a_pass_reads_any_nodes_of_a_tree(case: str) -> None:
    """Drafters read levels, in the slots that their nodes will have: apart, parents in this pass or another."""
    model, rng = native_hybrid(case), random.Random(8)
    rows, plain = Texts(model, [draw(rng, 6), draw(rng, 3)]), Plain(model)
    rows.read(8)
    for parts in (
        [[0], [1, 3, 5], [2, 4, 7, 8], [6, 9]],
        [[0, 3, 4, 9], [1, 2, 5], [6, 7, 8]],
        [[0, 2, 5], [1, 3, 4, 6, 7, 8, 9]],
    ):
        parent, tokens = [-1, 0, 0, 0, 3, 0, 1, 2, 2, 4], [draw(rng, 10) for _ in range(2)]
        plan, ids = rows.plan([parent, parent]), torch.tensor(tokens)
        for part in parts:
            here = replace(
                plan,
                ancestry=plan.ancestry[:, part],
                slots=plan.slots[:, part],
                positions=plan.positions[:, part],
                real=None,
            )
            logits = model.forward(ids[:, part], here, rows.cache).logits
            assert logits is not None
            for place, node in enumerate(part):
                for row in range(2):
                    path = [tokens[row][i] for i in path_of(parent, node)]
                    assert torch.equal(logits[row, place], plain.after(rows.texts[row] + path)), (part, node)
        rows.commit(tokens, [path_of(parent, rng.choice((4, 7, 9))) for _ in range(2)])


@pytest.mark.parametrize("case", KINDS)
def test_a_tree_after_its_root_was_fed(case: str) -> None:
    """As a drafter reads: its root as text, committed at once, and then a level after another of the tree behind it."""
    model, rng = native_hybrid(case), random.Random(9)
    rows, plain = Texts(model, [draw(rng, 6), draw(rng, 3)]), Plain(model)
    rows.read(8)
    parent, tokens = [-1, 0, 0, 1, 1, 3], [draw(rng, 6) for _ in range(2)]
    plan, ids = rows.plan([parent, parent]), torch.tensor(tokens)
    model.forward(ids[:, :1], replace(plan.nodes(0, 1), known=torch.ones(2, dtype=torch.int64)), rows.cache)
    for start, stop in ((1, 3), (3, 6)):
        logits = model.forward(ids[:, start:stop], plan.nodes(start, stop), rows.cache).logits
        assert logits is not None
        for node in range(start, stop):
            for row in range(2):
                path = [tokens[row][i] for i in path_of(parent, node)]
                assert torch.equal(logits[row, node - start], plain.after(rows.texts[row] + path)), node


@pytest.mark.parametrize("case", KINDS)
def test_lower_layers_and_then_upper_ones(case: str) -> None:
    """As a drafter reads that is the target's own lower layers: level by level, and the rest at once."""
    model, rng = native_hybrid(case), random.Random(6)
    for split in (1, 3):
        rows = Texts(model, [draw(rng, 5), draw(rng, 2)])
        rows.read(8)
        plain = Plain(model)
        for _ in range(3):
            parents, tokens = [random_parents(rng, 7, 2) for _ in range(2)], [draw(rng, 7) for _ in range(2)]
            plan, ids, hidden = rows.plan(parents), torch.tensor(tokens), []
            for start, stop in ((0, 1), (1, 4), (4, 7)):
                part = plan.nodes(start, stop)
                hidden.append(
                    model.forward(ids[:, start:stop], part, rows.cache, PassOptions(layers=(0, split))).hidden
                )
            whole = torch.cat(hidden, 1)
            out = model.forward(ids, plan, rows.cache, PassOptions(layers=(split, model.spec.num_layers), hidden=whole))
            assert out.logits is not None
            for row in range(2):
                path = [tokens[row][node] for node in path_of(parents[row], 4)]
                assert torch.equal(out.logits[row, 4], plain.after(rows.texts[row] + path))
            rows.commit(tokens, [path_of(parent, rng.randrange(5)) for parent in parents])


def path_of(parent: list[int], node: int) -> list[int]:
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


def test_a_text_that_is_not_the_committed_one_is_refused() -> None:
    model = native_hybrid("lfm2")
    rows = Texts(model, [draw(random.Random(7), 6)])
    rows.read(6)
    rows.logits([[5, 6]], [[-1, 0]])
    for length in (8 + 1, 5):  # a token that no pass has read, and one that is committed for good
        rows.length = [length]
        with pytest.raises(RuntimeError, match="states of a recurrent layer are not those of the committed tokens"):
            rows.logits([[5]], [[-1]])
