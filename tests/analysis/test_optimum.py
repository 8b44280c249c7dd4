"""What a pair of models could do: contexts by teacher forcing, rules beside their optima, the tree that suits."""

import csv
import io

import pytest
import torch
from benchmarks.theory import coupling
from benchmarks.theory.figures import csv_of, optimum_rows
from benchmarks.theory.pairs import Pairs, PairText, collect
from benchmarks.theory.table import coupled, distributions_at, optimum_table
from benchmarks.theory.trees import choose_tree, pass_seconds, positional_acceptance

from foretell import ConfigError
from foretell.core.tree import DrawMode
from foretell.verify import Coupled, Exact, Rejection
from tests.model.table import TableLM

torch.set_num_threads(1)


def pairs(vocab_size: int = 12, contexts: int = 24, noise: float = 0.8, seed: int = 0) -> Pairs:
    """Logits of a target and of a draft that is the same but for noise."""
    generator = torch.Generator().manual_seed(seed)
    target = 2.0 * torch.randn(contexts, vocab_size, generator=generator)
    draft = target + noise * torch.randn(contexts, vocab_size, generator=generator)
    return Pairs(target, draft, torch.arange(contexts) // 4)


def test_contexts_are_those_of_the_output_and_logits_those_of_decoding() -> None:
    target, draft = (TableLM(7, seed=seed, context=2, num_layers=1) for seed in (1, 2))
    texts = [PairText([1, 2, 3, 4, 5, 6], 2), PairText([3], 1), PairText([0, 1, 2], 1)]
    found = collect(target, draft, texts, per_text=2)
    assert found.num_contexts == 4, "the text without output has none"
    assert found.text.tolist() == [0, 0, 2, 2]
    for logits, model in ((found.target, target), (found.draft, draft)):
        for row, context in zip(logits, ([1, 2], [1, 2, 3, 4], [0], [0, 1]), strict=True):
            probs = model.probs_after(context).float()
            assert torch.allclose(torch.softmax(row, -1), probs, atol=1e-6)
    with pytest.raises(ConfigError, match="no text has an output"):
        collect(target, draft, [PairText([1], 1)])


def test_a_draft_of_fewer_tokens_never_proposes_the_others() -> None:
    found = collect(TableLM(7, seed=1, num_layers=1), TableLM(5, seed=2, num_layers=1), [PairText([6, 6, 1], 1)])
    assert bool((found.draft[:, 5:] == -torch.inf).all())
    assert float(distributions_at(found, 1.0)[1][:, 5:].sum()) == 0


def test_no_rule_accepts_more_than_the_optimum_and_more_drafts_accept_more() -> None:
    table = optimum_table(pairs(), temperatures=(0.0, 0.6, 1.0), num_drafts=(1, 2, 4))
    assert {cell.rule for cell in table.cells} == {
        "rejection", "k_seq", "importance", "transport", "exact", "coupled",
    }  # fmt: skip
    for cell in table.cells:
        assert 0 <= cell.acceptance <= 1 + 1e-12
        if cell.optimum is not None:
            slack = 5e-3 if cell.draws == "without_replacement" else 1e-9  # that one is an estimate
            assert cell.acceptance <= cell.optimum + slack, cell
            assert cell.share_of_optimum == pytest.approx(cell.acceptance / cell.optimum)
    by_rule = {(cell.temperature, cell.rule, cell.draws, cell.num_drafts): cell.acceptance for cell in table.cells}
    for (temperature, rule, draws, count), value in by_rule.items():
        fewer = by_rule.get((temperature, rule, draws, count // 2))
        if fewer is not None and rule in ("rejection", "transport", "k_seq", "exact"):
            assert value >= fewer - 5e-3
    assert all(cell.draws == "fixed" for cell in table.cells if cell.temperature == 0), "greedy: only what was drafted"


def test_races_agree_with_the_quadrature() -> None:
    p, q = distributions_at(pairs(vocab_size=8), 1.0)
    exact = coupling.gumbel_top_k(p, q, 3, tolerance=0.0).middle
    seen = coupled(p, q, 3)
    # 24 rows of 512 races: a standard error of at most .0045 on the mean; 5 of them are a false alarm of 6e-7.
    assert abs(float(seen.mean() - exact.mean())) < 0.0225
    assert abs(float(coupled(p, q.flip(1), 3).mean() - exact.mean())) > 0.0225, "control: another draft"


def test_wrong_tables_are_refused() -> None:
    for options in ({"temperatures": ()}, {"num_drafts": (0,)}, {"num_drafts": (17,)}, {"temperatures": (-1.0,)}):
        with pytest.raises(ConfigError, match="between 1 and 16"):
            optimum_table(pairs(), **options)


def test_a_seed_of_any_size_is_taken() -> None:
    for seed in (-1, 10**24):
        assert optimum_table(pairs(), temperatures=(1.0,), num_drafts=(1,), seed=seed).cells


def test_text_and_csv_have_every_cell() -> None:
    table = optimum_table(pairs(), temperatures=(0.0, 1.0), num_drafts=(1, 2))
    rows = list(csv.DictReader(io.StringIO(csv_of(table))))
    assert len(rows) == len(table.cells)
    assert float(rows[0]["acceptance"]) == table.cells[0].acceptance
    shown = str(list(optimum_rows(table)))
    assert all(f"{cell.acceptance:.4f}" in shown for cell in table.cells)


def test_positional_acceptance() -> None:
    found = pairs(contexts=200)
    p, q = distributions_at(found, 1.0)
    one = positional_acceptance(found, 1.0, Rejection(), DrawMode.IID, max_children=1)
    # Drawn once a context: the mean of min(1, p(x) / q(x)) over draws is 1 - TV, within 5 standard errors of 200 draws.
    assert one[0] == pytest.approx(float(torch.minimum(p, q).sum(1).mean()), abs=0.15)
    rates = positional_acceptance(found, 1.0, Coupled(), DrawMode.COUPLED, max_children=4)
    assert sum(rates) <= 1 + 1e-9
    assert rates[0] > rates[1] > rates[3]
    greedy = positional_acceptance(found, 0.0, Exact(), DrawMode.FIXED, max_children=12)
    assert sum(greedy) == pytest.approx(1.0), "all tokens are there"


def test_the_chosen_tree_is_what_costs_say() -> None:
    found = pairs(contexts=60)
    flat = dict.fromkeys(range(1, 65), 1.0)
    free = choose_tree(found, 1.0, Coupled(), seconds_target=flat, seconds_draft={1: 1e-9, 4: 1e-9})
    assert free.num_guesses == 63, "width for nothing: all that is allowed"
    assert free.spec.startswith("sequoia/")
    steep = {n: float(n) for n in range(1, 65)}
    none = choose_tree(found, 1.0, Coupled(), seconds_target=steep, seconds_draft={1: 5.0, 4: 5.0})
    assert (none.num_guesses, none.spec, none.expected_speedup) == (0, "", 1.0)


def test_passes_are_timed() -> None:
    taken = pass_seconds(TableLM(7, num_layers=1), (1, 3), context=8, rounds=2)
    assert set(taken) == {1, 3}
    assert all(seconds > 0 for seconds in taken.values())
