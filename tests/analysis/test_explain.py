"""A step taken apart: what is shown is what happened."""

import pytest
import torch

from foretell import Engine
from foretell.analysis.explain import ExplainedStep, Watch, explain, number_game
from foretell.analysis.words import words
from foretell.core.errors import ConfigError
from foretell.core.noise import int64_seed

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    one = Engine.load("bundled", speculative="draft_model")
    configs = {
        "coupled": {"method": "draft_model"},
        "rejection": {"method": "draft_model", "verify": "rejection"},
        "tree": {"method": "draft_model", "shape": "static/branching=2x2x1", "num_speculative_tokens": 3},
        "ngram": {"method": "ngram"},
    }
    return {name: one.with_method(config) for name, config in configs.items()}


def test_the_number_game_agrees_always_by_one_noise_and_in_a_tenth_by_two() -> None:
    """100,000 rounds: the standard error is 0.00095; four of them have a false-alarm rate of 6e-5."""
    game = number_game()
    assert game.shared == 1.0
    assert abs(game.independent - 0.1) < 4 * 0.00095
    assert game.times[game.winner - 1] == min(game.times)
    assert number_game(seed=1).times != game.times


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, 10**24])
def test_a_seed_of_any_size_is_taken(seed: int) -> None:
    """generate took them; the game, doctor, certify, train and theory ended in an internal error."""
    assert number_game(10, seed=seed).shared == 1.0
    assert torch.Generator().manual_seed(int64_seed(seed)).initial_seed() & (2**64 - 1) == seed & (2**64 - 1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["coupled", "tree", "ngram"])
def test_the_emitted_tokens_are_those_of_plain_decoding(
    engines: dict[str, Engine], name: str, temperature: float
) -> None:
    engine = engines[name]
    found = explain(engine, PROMPT, temperature=temperature, seed=3, step=1)
    plain = engine.with_method("none").generate(
        PROMPT, temperature=temperature, seed=3, max_new_tokens=len(found.emitted)
    )
    assert engine.tokenizer is not None
    assert found.emitted == [engine.tokenizer.decode([token]) for token in plain.token_ids]


def winners_are_first(found: ExplainedStep) -> bool:
    """Whether at every place the token that was taken has the least time of those shown."""
    return all(
        place.winner
        == min((one for one in place.runners if one.time_p is not None), key=lambda one: one.time_p or 0).text
        for place in found.places
    )


@pytest.mark.parametrize("name", ["coupled", "tree"])
def test_the_winner_of_the_race_is_written(engines: dict[str, Engine], name: str) -> None:
    for seed in range(5):
        found = explain(engines[name], PROMPT, seed=seed)
        assert found.is_race
        assert winners_are_first(found)
        assert [place.winner for place in found.places] == found.emitted
        assert found.num_kept == sum(guess.kept for guess in found.guesses)
        assert found.num_kept == sum(place.was_guessed for place in found.places)


def test_a_guess_with_which_the_text_ends_is_kept(engines: dict[str, Engine]) -> None:
    """A commit leaves it out of its path: it was shown as the target's own token, though it says that it was kept."""
    engine = engines["coupled"]
    asked = 'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n'
    ends = [found for seed in range(3, 9) if (found := _last(engine, asked, seed)).num_kept == len(found.emitted)]
    assert ends, "no text of these ended with a guess"
    for found in ends:
        assert sum(guess.kept for guess in found.guesses) == found.num_kept
        assert all(place.was_guessed for place in found.places)


def _last(engine: Engine, prompt: str, seed: int) -> ExplainedStep:
    """The last step of a text of at most 40 tokens."""
    watch = Watch(engine.tokenizer, 0.7, most=40)
    watched = engine.with_method(engine.speculative, method=engine.method)
    watched.observers.append(lambda event: watch(event, 0))
    watched.generate(prompt, temperature=0.7, seed=seed, max_new_tokens=40)
    return watch.steps[-1]


def test_the_drafter_guessed_the_winner_of_its_own_race(engines: dict[str, Engine]) -> None:
    found = explain(engines["coupled"], PROMPT, seed=1)
    for place in found.places:
        timed = [one for one in place.runners if one.time_q is not None]
        if place.guesses:
            assert place.guesses == [min(timed, key=lambda one: one.time_q or 0.0).text]


def test_a_step_with_both_outcomes_is_chosen(engines: dict[str, Engine]) -> None:
    found = explain(engines["coupled"], PROMPT, seed=0)
    assert 0 < found.num_kept < len(found.guesses)


def test_rejection_shows_its_coin(engines: dict[str, Engine]) -> None:
    found = explain(engines["rejection"], PROMPT, seed=2)
    assert not found.is_race
    for place in found.places:
        if place.guesses:
            (guess,) = (one for one in found.guesses if one.parent == place.node)
            assert guess.q is not None
            assert place.accept == pytest.approx(min(1.0, guess.p / guess.q), rel=1e-4)
    reach = [guess.reach for guess in found.guesses]
    assert reach == sorted(reach, reverse=True)  # a chain: each guess is kept only if those before it are


def test_mistakes(engines: dict[str, Engine]) -> None:
    with pytest.raises(ConfigError, match="guesses nothing"):
        explain(engines["coupled"].with_method("none"), PROMPT)
    tokenizer = engines["coupled"].tokenizer
    assert tokenizer is not None
    long = PROMPT * (4000 // len(tokenizer.encode(PROMPT)))  # so that the context ends soon
    with pytest.raises(ConfigError, match="ended after"):
        explain(engines["coupled"], long, step=2000, temperature=0.0)


def test_words_of_a_rejected_tree_name_the_chance_of_the_first_guess_alone(engines: dict[str, Engine]) -> None:
    engine = engines["tree"].with_method(
        {"method": "draft_model", "verify": "rejection", "shape": "static/branching=2x2", "num_speculative_tokens": 2}
    )
    steps = [explain(engine, PROMPT, seed=seed, temperature=1.0) for seed in range(4)]
    assert "alternatives" in words(steps[0]).check[1]
    for step in steps:
        for place, said in zip(step.places, words(step).verdicts, strict=True):
            first = bool(place.guesses) and place.was_guessed and place.winner == place.guesses[0]
            assert ("which had a chance" in said) == first, said


def test_tokens_of_one_text_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that make no character are all "\ufffd": the one that was taken is known by its id."""
    engine = Engine.load("bundled", speculative="draft_model")
    monkeypatch.setattr(engine.tokenizer, "decode", lambda ids, **_: "\ufffd" * len(ids))
    found = explain(engine, "x", temperature=0.7, seed=3)
    for place in found.places:
        assert place.winner_token in [runner.token for runner in place.runners]
        times = {runner.token: runner.time_p for runner in place.runners if runner.time_p is not None}
        assert min(times, key=lambda token: times[token]) == place.winner_token
        assert place.was_guessed == (place.winner_token in place.guess_tokens)
