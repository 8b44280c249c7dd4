"""Labels of a scripted pair of models, the features of a swap, the regression against optima by hand, the whole run."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine
from foretell.core.tree import TokenTree, chain_tree, layout
from foretell.heads.formats import load_head
from foretell.methods.acceptance.objective import area_under_curve as roc_auc
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights, features
from foretell.model.load import from_module
from foretell.model.target import CausalModel, Target
from foretell.train import judge as training
from foretell.train.judge import collect, cut_of, fit_logistic, fold, held_out, standardised, train_judge
from foretell.train.mining import Mined, Swap, mine, read_labels
from foretell.verify import Judge
from tests.model.table import TableLM
from tests.model.tiny import tiny_module

END, VOCAB = 0, 10


class Digits:
    """A token is a digit; the end token has no text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(digit) for digit in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(str(token) for token in token_ids if not (skip_special_tokens and token == END))


def scripted(script: dict[str, int], *, ends: bool = True) -> TableLM:
    """After the last two tokens (or the last one) comes what the script says."""

    def probs(context: tuple[int, ...]) -> Tensor:
        digits = "".join(str(token) for token in context if token >= 0)[-2:]
        weight = torch.full((VOCAB,), 0.01)
        weight[script.get(digits, script.get(digits[-1:], END))] = 1.0
        return weight / weight.sum()

    return TableLM(VOCAB, probs=probs, context=2, num_layers=2, eos_token_ids=(END,) if ends else ())


# After 1: 2 3 4 5 and the end; other ways lead on to 5 through 4, or end in a 7 or an 8.
TARGET = {"1": 2, "2": 3, "3": 4, "4": 5, "6": 4, "7": END, "8": END, "9": 2}
# The draft would say 6 after 12, 7 after 26, and end after 45 as the target does.
DRAFT = TARGET | {"12": 6, "26": 7, "93": END}
PROMPTS = [[1], [9, 1], [9], [5, 4], [1, 9, 1]]


def last(index: int, text: str) -> str | None:
    """The outcome: the last digit, if it is 5 or 7."""
    return text[-1] if text and text[-1] in "57" else None


def engine(**options: bool) -> Engine:
    return Engine(scripted(TARGET, **options), Digits(), speculative="none")


def mined(prompts: Sequence[Sequence[int]], out: Path, *, batch_size: int = 4, max_new_tokens: int = 8) -> list[Mined]:
    found = mine(engine(), scripted(DRAFT), prompts, last, out, batch_size=batch_size, max_new_tokens=max_new_tokens)
    return sorted(found, key=lambda one: one.index)


def test_labels_of_a_scripted_pair(tmp_path: Path) -> None:
    found = mined(PROMPTS, tmp_path / "labels.jsonl")
    swaps = [Swap(1, 6, important=False), Swap(2, 7, important=True)]
    # 1 2 | 6 in the place of 3: 4 5 all the same, so it stays. Then 7 in the place of 4: the outcome is 7.
    assert found[0] == Mined(0, [1], [2, 6, 4, 5, END], "5", swaps)
    assert [one.swaps for one in (found[1], found[4])] == [swaps, swaps]
    # 9 | 2 3 4 5: the draft agrees everywhere.
    assert found[2] == Mined(2, [9], [2, 3, 4, 5, END], "5")
    assert found[3] == Mined(3, [5, 4], [5, END], "5")


def test_an_end_is_a_token_like_others(tmp_path: Path) -> None:
    """The draft ends after 23, where the target goes on: nothing is asked of the target, and the outcome is gone."""
    draft = scripted(TARGET | {"23": END})
    (found,) = mine(engine(), draft, [[1]], last, tmp_path / "a.jsonl")
    assert found == Mined(0, [1], [2, 3, 4, 5, END], "5", [Swap(2, END, important=True)])


def test_the_longest_answer_is_not_exceeded(tmp_path: Path) -> None:
    """With five tokens 2 3 4 5 5 has room; a swap at the last place leaves none to go on."""
    target, draft = scripted(TARGET | {"5": 5}, ends=False), scripted(TARGET | {"5": 5, "55": 7}, ends=False)
    made = Engine(target, Digits(), speculative="none")
    (found,) = mine(made, draft, [[1]], last, tmp_path / "a.jsonl", max_new_tokens=6)
    assert found == Mined(0, [1], [2, 3, 4, 5, 5, 5], "5", [Swap(5, 7, important=True)])


def test_answers_without_an_outcome_are_kept_without_labels(tmp_path: Path) -> None:
    made = mine(engine(), scripted(DRAFT), [[1]], lambda index, text: None, tmp_path / "a.jsonl")
    assert made == [Mined(0, [1], [2, 3, 4, 5, END], None)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_and_interruptions_change_nothing(tmp_path: Path, batch_size: int) -> None:
    whole = mined(PROMPTS, tmp_path / "whole.jsonl")
    out = tmp_path / "part.jsonl"
    stopped = mine(
        engine(),
        scripted(DRAFT),
        PROMPTS,
        last,
        out,
        batch_size=batch_size,
        progress=lambda done, total, one: done == 2,
    )
    assert len(stopped) == 2
    with out.open("a") as stream:
        stream.write('{"index": 3, "prom')  # cut short
    assert len(read_labels(out)) == 2
    assert mined(PROMPTS, out, batch_size=batch_size) == whole
    assert sorted(read_labels(out), key=lambda one: one.index) == whole
    assert all(json.loads(line) for line in out.read_text().splitlines())


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    out = tmp_path / "labels.jsonl"
    mined(PROMPTS[:1], out)
    with pytest.raises(ConfigError, match="labels of other prompts"):
        mined(PROMPTS[1:], out)
    out.write_text('{"index": 1}\n')
    with pytest.raises(ConfigError, match="not a label"):
        read_labels(out)
    with pytest.raises(ConfigError, match="no such file"):
        read_labels(tmp_path / "none")
    lossy = Engine(scripted(TARGET), Digits(), speculative={"method": "none", "verify": "typical"})
    with pytest.raises(ConfigError, match="is lossy"):
        mine(lossy, scripted(DRAFT), PROMPTS, last, tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="tokenizer"):
        mine(Engine(scripted(TARGET)), scripted(DRAFT), PROMPTS, last, tmp_path / "b.jsonl")


# Features.


@pytest.fixture(scope="module")
def tiny() -> CausalModel:
    return from_module(tiny_module("qwen3"))


def labels(generator: torch.Generator, count: int, *, bad: Sequence[int] = ()) -> list[Mined]:
    """Random texts with a swap at every second place; a swap is important iff its token is in bad (or at random)."""
    made = []
    for index in range(count):
        length = int(torch.randint(3, 9, (), generator=generator))
        prompt, answer = (torch.randint(3, 61, (n,), generator=generator).tolist() for n in (2 + index % 3, length))
        swaps = []
        for place in range(0, length, 2):
            token = int(torch.randint(3, 61, (), generator=generator))
            important = token in bad if bad else bool(torch.rand((), generator=generator) < 0.5)
            swaps.append(Swap(place, token, important))
            if not important:
                answer[place] = token
        made.append(Mined(index, prompt, answer, "x", swaps))
    return made


def alone(model: CausalModel, ids: Sequence[int], layer: int) -> Tensor:
    """The layer's output at the last of these tokens, read in one pass without company."""
    tokens = torch.tensor([list(ids)])
    plan = layout(chain_tree(tokens, torch.tensor([len(ids)])).parent, torch.zeros(1, dtype=torch.int64), len(ids))
    taps = Target(model, 1, len(ids)).forward(tokens, plan, taps=(layer,), head=False).taps
    return taps[0, -1]


@torch.inference_mode()
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_feature_is_the_state_of_the_swapped_token_in_its_own_text(tiny: CausalModel, batch_size: int) -> None:
    made = labels(torch.Generator().manual_seed(0), 6)
    config = JudgeHeadConfig(32, tiny.spec.vocab_size, 2, 24)
    found = collect(tiny, made, config, batch_size=batch_size)
    expected = {
        (one.index, swap.position): features(
            alone(tiny, [*one.prompt, *one.answer[: swap.position], swap.token], 2), config
        )
        for one in made
        for swap in one.swaps
    }
    assert len(found.x) == len(expected)
    assert 0 < int(found.important.sum()) < len(found.x)
    at = {one.index: iter(one.swaps) for one in made}
    for x, important, index in zip(found.x, found.important.tolist(), found.prompt.tolist(), strict=True):
        swap = next(at[index])
        assert swap.important == important
        assert torch.allclose(x, expected[index, swap.position], atol=1e-5)


@torch.inference_mode()
def test_the_rules_head_is_the_trained_one(tiny: CausalModel) -> None:
    """From the taps of a tree that is decoded behind a cached text: what the training-time forward gives, 1e-6."""
    config = JudgeHeadConfig(32, tiny.spec.vocab_size, 3, 32)
    head = JudgeWeights(config)
    head.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(3)) / 32)
    head.bias.fill_(0.3)
    text = [5, 9, 17, 33]
    target = Target(tiny, 1, 64)
    tokens = torch.tensor([text])
    nothing = torch.zeros(1, dtype=torch.int64)
    target.forward(tokens, layout(chain_tree(tokens, torch.tensor([4])).parent, nothing, 64), head=False)
    tree = TokenTree(
        torch.tensor([[7, 8, 11, 12]]), torch.tensor([[-1, 0, 0, 1]]), torch.zeros(1, 4, dtype=torch.int64)
    )
    taps = target.forward(tree.tokens, layout(tree.parent, torch.tensor([4]), 64), taps=(0, 3)).taps
    judge = head.verifier(Judge())
    assert judge.taps == (3,)
    found = judge.head(taps[..., 32:])[0]
    paths = [[7], [7, 8], [7, 11], [7, 8, 12]]
    expected = torch.stack([head(alone(tiny, [*text, *path], 3)) for path in paths])
    assert torch.allclose(found, expected.flatten(), atol=1e-6)


# The regression.


def test_the_optimum_by_hand() -> None:
    """Points +1 and -1: the gradient sigmoid(-w) = strength * w has the root w = 1 at strength 1 / (1 + e). Three times as
    many of one class change nothing: classes have equal weight."""
    x = torch.tensor([[1.0], [-1.0], [1.0], [1.0]], dtype=torch.float64)
    y = torch.tensor([True, False, True, True])
    for count in (2, 4):
        weight, bias = fit_logistic(x[:count], y[:count], 1 / (1 + math.e))
        assert weight.item() == pytest.approx(1.0, abs=1e-6)
        assert bias.item() == pytest.approx(0.0, abs=1e-6)


def test_the_optimum_has_no_gradient() -> None:
    """Written out without autograd: sum of importance * (sigmoid - y) * x + strength * w."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    y = x[:, 0] + torch.randn(60, generator=generator, dtype=torch.float64) > 0.8
    weight, bias = fit_logistic(x, y, 0.05)
    importance = torch.where(y, 0.5 / y.double().sum(), 0.5 / (~y).double().sum())
    residual = importance * (torch.sigmoid(x @ weight + bias) - y.double())
    assert torch.allclose(residual @ x + 0.05 * weight, torch.zeros(5, dtype=torch.float64), atol=1e-6)
    assert residual.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_folding_the_standardisation_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64) * torch.tensor([1e-3, 1, 10, 5, 2, 0.0]) + 3
    z, mean, scale = standardised(x)
    assert torch.allclose(z.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(z.std(0, correction=0), torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64))
    weight, bias = torch.randn(6, generator=generator, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    folded, shifted = fold(weight, bias, mean, scale)
    assert torch.allclose(x @ folded + shifted, z @ weight + bias, atol=1e-9)


def test_auc_counts_pairs() -> None:
    score = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0, 5.0])
    y = torch.tensor([True, False, True, False, False, False])
    pairs = [(float(a), float(b)) for a, b in itertools.product(score[y], score[~y])]
    assert roc_auc(score, y) == pytest.approx(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert math.isnan(roc_auc(score, torch.ones(6, dtype=torch.bool)))


@pytest.mark.parametrize(("recall", "cut"), [(1.0, 9.0), (0.9, 8.0), (0.85, 8.0), (0.5, 4.0), (0.0, -math.inf)])
def test_the_cut_has_the_recall(recall: float, cut: float) -> None:
    score = torch.cat([torch.arange(10.0), torch.tensor([8.5, 20.0])])  # ten important ones, two that are not
    important = torch.arange(12) < 10
    assert cut_of(score, important, recall) == cut
    assert (score[important] <= cut).double().mean() >= recall


def test_the_split_is_by_prompt_and_stays() -> None:
    prompt = torch.arange(400).repeat_interleave(3)
    chosen = held_out(prompt, 0)
    assert torch.equal(chosen.view(400, 3).all(1), chosen.view(400, 3).any(1))
    assert 20 < int(chosen.view(400, 3)[:, 0].sum()) < 60
    assert torch.equal(held_out(prompt[:300], 0), chosen[:300])
    assert not torch.equal(held_out(prompt, 1), chosen)


# The whole run.


def test_a_judge_learns_which_tokens_matter(tmp_path: Path) -> None:
    """Small tokens matter, and a table's hidden states hold the token itself."""
    table = TableLM(61, context=1, num_layers=2)
    made = labels(torch.Generator().manual_seed(4), 240, bad=range(3, 30))
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(one.line() + "\n" for one in made))
    figures = train_judge(table, file, tmp_path / "judge", batch_size=64)
    assert figures["auc"] > 0.9
    assert figures["labels"] == sum(len(one.swaps) for one in made)
    head = load_head(str(tmp_path / "judge"), table.spec, JudgeWeights, dtype=torch.float32)
    assert head.taps == (1,)
    assert head.config.training["auc"] == figures["auc"]
    # The stored head at 0.5 refuses the share of the important that was asked for, and its table says what it does.
    examples = collect(table, made, head.config)
    unseen = examples.at(held_out(examples.prompt, 0))
    accepted = unseen.x @ head.weight + head.bias > Judge().cut + 1e-5
    recall = 1 - accepted[unseen.important].double().mean().item()
    assert recall >= 0.9
    (row,) = [row for row in figures["thresholds"] if row["threshold"] == 0.5]
    assert row["recall"] == pytest.approx(recall, abs=1e-3)
    assert row["unimportant_accepted"] == pytest.approx(accepted[~unseen.important].double().mean().item(), abs=0.02)
    assert row["unimportant_accepted"] > 0.5
    thresholds = [row["threshold"] for row in figures["thresholds"]]
    assert thresholds == sorted(thresholds, reverse=True)


def test_what_cannot_be_trained(tiny: CausalModel, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    made = labels(torch.Generator().manual_seed(4), 30, bad=[1])
    file.write_text("".join(one.line() + "\n" for one in made))
    with pytest.raises(ConfigError, match=r"0 of .* labels are important"):
        train_judge(tiny, file, tmp_path / "judge")
    file.write_text("")
    with pytest.raises(ConfigError, match="0 of 0 labels"):
        train_judge(tiny, file, tmp_path / "judge")
    with pytest.raises(ConfigError, match="layer = 4"):
        train_judge(tiny, file, tmp_path / "judge", layer=4)
    with pytest.raises(ConfigError, match="recall = 2"):
        train_judge(tiny, file, tmp_path / "judge", recall=2)
    assert not (tmp_path / "judge").exists()
    assert training.RECALLS[0] == 1.0
