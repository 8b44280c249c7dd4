"""The same tokens with and without speculation on the bundled pair: a few prompts, or the whole comparison."""

import pytest

from tests.stress import equality, size

SETTINGS = ["--prompts", str(size(2, 50)), "--tokens", str(size(16, 128))]


@pytest.mark.parametrize("implementation", ["lean", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_equality(implementation: str, temperature: str) -> None:
    variants = "none,draft_model:3,ngram,prediction,nonsense"
    arguments = [*SETTINGS, "--implementations", implementation, "--temperature", temperature, "--variants", variants]
    assert equality.main(arguments) == 0


def test_a_difference_that_is_no_tie_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one token of one variant is another."""
    run = equality.run

    def spoilt(engine: object, requests: object, batch: int, label: str) -> object:
        for index, completion in run(engine, requests, batch, label):
            if "ngram" in label and index == 0:
                completion.token_ids[5] += 1
            yield index, completion

    monkeypatch.setattr(equality, "run", spoilt)
    arguments = "--prompts 1 --tokens 8 --implementations lean --variants ngram --batches 1"
    assert equality.main(arguments.split()) == 1
