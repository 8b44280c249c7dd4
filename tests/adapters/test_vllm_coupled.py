"""``adapters/vllm_coupled.py`` on a runner whose noise is enumerated: the law is exact, the text is that of plain decoding,
and each thing that the plugin changes is needed."""

import sys
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch

from foretell import ConfigError
from foretell.adapters import vllm_coupled as plugin
from foretell.adapters.vllm_coupled import COUPLED, SUPPORTED, accept, register
from tests.adapters.vllm_runner import SALT, Installed, Runner

GRID, LENGTH, PROMPT = 4, 3, (0,)
P = torch.tensor([[2, 1, 1], [1, 3, 0], [1, 1, 2]], dtype=torch.float64) / GRID
Q = torch.tensor([[1, 2, 1], [1, 2, 1], [2, 0, 2]], dtype=torch.float64) / GRID
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": COUPLED}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    found = Installed(monkeypatch)
    register()
    return found


def law() -> dict[tuple[int, ...], Fraction]:
    """The target's own, of all texts."""
    out: dict[tuple[int, ...], Fraction] = {}
    for text in product(range(3), repeat=LENGTH):
        chance = Fraction(1)
        for before, token in zip((*PROMPT, *text), text, strict=False):
            chance *= Fraction(P[before, token].item())
        if chance:
            out[text] = chance
    return out


def worlds(installed: Installed, runner: Runner, depth: int) -> list[tuple[int, ...]]:
    """The texts under every noise: a batch, each row's seed its noise. A draft's salted number at a position is the
    target's at the next one, so it is independent of the one that it races with."""
    count = GRID ** (LENGTH + 2)

    def noise(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        place = (positions % SALT + positions // SALT) % (LENGTH + 2)
        return ((seeds % (1 << 32) // GRID**place) % GRID + 0.5) / GRID

    installed.gumbel.noise = noise
    depths = [depth] * count if depth else []
    return runner.decode([PROMPT] * count, LENGTH, seeds=range(count), temperature=[1.0] * count, depths=depths)


def test_the_law_is_the_targets_and_the_text_plain_decodings(installed: Installed) -> None:
    plain = worlds(installed, installed.runner(P, Q), 0)
    counts = Counter(plain)
    assert {text: Fraction(count, len(plain)) for text, count in counts.items()} == law()
    for depth in (1, 2):
        runner = installed.runner(P, Q, **DRAFT_MODEL)
        assert worlds(installed, runner, depth) == plain
        assert 0 < runner.num_accepted < runner.num_guesses


def test_a_drafter_with_the_targets_probabilities_is_always_right(installed: Installed) -> None:
    runner = installed.runner(P, P, **DRAFT_MODEL)
    worlds(installed, runner, 2)
    assert runner.num_accepted == runner.num_guesses > 0


def test_a_salted_draft_keeps_the_text_and_is_accepted_less(installed: Installed) -> None:
    plain = worlds(installed, installed.runner(P, Q), 0)
    coupled = installed.runner(P, Q, **DRAFT_MODEL)
    worlds(installed, coupled, 2)
    salted = installed.runner(P, Q, **DRAFT_MODEL)
    salted.speculator.draft_watermarker = None  # vLLM's own noise of drafts
    assert worlds(installed, salted, 2) == plain
    share = coupled.num_accepted / coupled.num_guesses
    assert 0 < salted.num_accepted / salted.num_guesses < 0.7 * share


def test_a_salted_target_changes_the_text(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = worlds(installed, installed.runner(P, Q), 0)

    def salted(*args: Any, **options: Any) -> Any:
        return installed.gumbel.gumbel_sample(*args, is_drafting=True, **options)

    monkeypatch.setattr(plugin, "_race", salted)
    assert worlds(installed, installed.runner(P, Q, **DRAFT_MODEL), 2) != plain


@pytest.mark.parametrize("drafts", ["probabilistic", "greedy"])
def test_texts_of_a_batch_are_those_of_each_alone(installed: Installed, drafts: str) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = torch.rand(2, 7, 7, generator=generator, dtype=torch.float64).softmax(-1)
    table = torch.rand(89, generator=generator, dtype=torch.float64)
    installed.gumbel.noise = lambda seeds, positions: table[(seeds * 31 + positions * 7) % 89]
    prompts, seeds, heats = [(0,), (1, 2, 3), (4, 5), (6,)], [3, 4, 5, 6], [1.0, 0.6, 0.0, 1.4]
    plain = [
        installed.runner(p, q).decode([prompt], 12, seeds=[seed], temperature=[heat])[0]
        for prompt, seed, heat in zip(prompts, seeds, heats, strict=True)
    ]
    options = {**DRAFT_MODEL, "num_speculative_tokens": 3, "draft_sample_method": drafts}
    runner = installed.runner(p, q, **options)
    assert runner.decode(prompts, 12, seeds=seeds, temperature=heats, depths=[3, 0, 2, 1]) == plain
    assert 0 < runner.num_accepted < runner.num_guesses


def test_no_forbidden_guess_is_accepted(installed: Installed) -> None:
    runner = installed.runner(P, P, **DRAFT_MODEL)
    (text,) = runner.decode([PROMPT], 6, seeds=[1], temperature=[1.0], depths=[2], forbidden=[0, 1, 2])
    assert runner.num_accepted == 0
    assert [text] == installed.runner(P, P).decode([PROMPT], 6, seeds=[1], temperature=[1.0])


def test_acceptance_is_its_twins() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        most = int(torch.randint(1, 5, (), generator=generator))
        counts = torch.randint(1, most + 2, (4,), generator=generator)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        winners = torch.randint(0, 2, (int(starts[-1]),), generator=generator)
        guesses = torch.randint(-1, 2, (int(starts[-1]),), generator=generator)
        tokens, emitted = accept(winners, guesses, starts.to(torch.int32), most)
        assert tokens.shape == (4, most + 1)
        for row, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            expected = [int(winners[start])]
            for at in range(start + 1, end):
                if guesses[at] != expected[-1]:
                    break
                expected.append(int(winners[at]))
            assert tokens[row, : emitted[row]].tolist() == expected


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "0.34.0", "0.33.1.dev7+g1234"])
def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed = Installed(monkeypatch, version)
    register()
    with pytest.raises(ConfigError, match=rf"is for vLLM 0\.32\.0 and 0\.33\.0, .*this is vLLM {version[:4]}.*install"):
        installed.SpeculativeConfig(**DRAFT_MODEL)
    assert installed.SpeculativeConfig(rejection_sample_method="block").draft_sample_method == "greedy"


@pytest.mark.parametrize("name", ["VllmConfig", "SpeculativeConfig"])
def test_a_release_without_these_names_starts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Installed(monkeypatch, "0.6.0")
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base")
    monkeypatch.delattr(sys.modules["vllm.config"], name)
    before = dict(vars(sys.modules["vllm.config"]))
    register()
    assert vars(sys.modules["vllm.config"]) == before


@pytest.mark.parametrize("version", [*SUPPORTED, "0.32.0+cpu"])
def test_the_word_is_admitted_and_drafts_race(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed = Installed(monkeypatch, version)
    register()
    register()  # vLLM may load a plugin more than once
    config = installed.SpeculativeConfig(**DRAFT_MODEL)
    assert (config.rejection_sample_method, config.draft_sample_method) == (COUPLED, "probabilistic")
    assert installed.SpeculativeConfig(**DRAFT_MODEL, draft_sample_method="greedy").draft_sample_method == "greedy"
    with pytest.raises(ValueError, match="should be"):
        installed.SpeculativeConfig(rejection_sample_method="couple")


def test_the_older_runner_is_refused(installed: Installed) -> None:
    config = installed.SpeculativeConfig(**{**DRAFT_MODEL, "method": "suffix"})
    with pytest.raises(
        ConfigError, match=r"needs vLLM's model runner V2, and vLLM takes V1 .*'suffix'.*leave the option"
    ):
        installed.VllmConfig(config, use_v2_model_runner=False)
    standard = installed.SpeculativeConfig(method="suffix")
    assert not installed.VllmConfig(standard, use_v2_model_runner=False).use_v2_model_runner


def test_a_model_with_a_verifier_of_its_own_is_refused(installed: Installed) -> None:
    class Diffusion:
        pass

    worker = installed.worker(installed.SpeculativeConfig(**DRAFT_MODEL), P, Q)
    worker.load_model()
    worker.model_runner.rejection_sampler = Diffusion()
    with pytest.raises(ConfigError, match="brings Diffusion: leave the option out"):
        plugin.couple(worker.model_runner)


def test_vllms_own_verifier_stays_where_it_is_asked_for(installed: Installed) -> None:
    runner = installed.runner(P, Q, method="draft_model", num_speculative_tokens=2)
    with pytest.raises(AssertionError, match="vLLM's own verifier"):
        runner.decode([PROMPT], 3, seeds=[1], temperature=[1.0], depths=[2])


def test_a_rank_that_samples_nothing_and_a_drafter_without_noise_are_left_alone(installed: Installed) -> None:
    runner = installed.runner(P, Q)
    plugin.couple(runner)
    assert runner.rejection_sampler is None
    runner = installed.runner(P, Q, **DRAFT_MODEL)
    runner.speculator = object()  # n-grams
    plugin.couple(runner)
    assert not hasattr(runner.speculator, "draft_watermarker")


def test_noise_that_a_drafter_keeps_is_told(installed: Installed) -> None:
    runner = installed.runner(P, Q, **DRAFT_MODEL)
    kind = type("DFlash2Speculator", (type(runner.speculator),), {})
    runner.speculator.__class__ = type("LiLiCorrSpeculator", (kind,), {})
    assert installed.warnings == []
    plugin.couple(runner)
    assert installed.warnings == [
        "coupled: LiLiCorrSpeculator draws by noise of its own: the text is the same, and fewer guesses are accepted"
    ]
