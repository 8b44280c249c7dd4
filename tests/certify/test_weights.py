"""The distance of quantised weights from unquantised ones, and the bundled pair with its weights quantised."""

import math
from pathlib import Path

import pytest
import torch

from foretell import Engine
from foretell.certify import certify, weights_distance
from foretell.certify.plain import reference
from foretell.certify.report import log_probs, unquantised_of
from foretell.core.errors import ConfigError
from foretell.model.llama.run import native
from foretell.model.load import load_model
from tests.model.llama.family import make_model

REASON = native.supports(make_model("llama").config, torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(2, 61)) + list(range(2, 61))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


def test_distances_are_those_of_the_definitions(saved: Path) -> None:
    """Over every position, also behind the first pass; int4 is further away than int8, a model is not away from itself."""
    plain = load_model(str(saved), dtype="float32")
    models = {weights: load_model(str(saved), weights=weights, dtype="float32") for weights in ("int8", "int4")}
    found = {weights: weights_distance(model, plain, TEXTS) for weights, model in models.items()}
    assert found["int8"].num_positions == sum(map(len, TEXTS))
    assert 0 < found["int8"].mean_kl < found["int4"].mean_kl < 1
    assert found["int8"].same_top > 0.9
    assert (found["int8"].weights, found["int4"].weights) == ("int8", "int4+int8")
    itself = weights_distance(plain, plain, TEXTS)
    assert (itself.mean_kl, itself.largest_tv, itself.same_top) == (0, 0, 1)
    p, q = (torch.cat(log_probs(model, TEXTS[0])).exp() for model in (plain, models["int4"]))
    kl = [
        sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in zip(p.tolist(), q.tolist(), strict=True)
    ]
    alone = weights_distance(models["int4"], plain, TEXTS[:1])
    assert alone.mean_kl == pytest.approx(sum(kl) / len(kl))
    assert alone.largest_kl == pytest.approx(max(kl))
    assert alone.largest_tv == pytest.approx(float((p - q).abs().sum(-1).max() / 2))
    assert f"KL {alone.mean_kl:.1e} nats" in alone.words
    with pytest.raises(ConfigError, match="no text"):
        weights_distance(plain, plain, [])


def test_the_unquantised_model_is_loaded_again(saved: Path) -> None:
    model = load_model(str(saved), weights="int8")
    again = unquantised_of(model)
    assert (again.spec.name, again.spec.dtype, again.spec.is_quantised) == (str(saved), torch.float32, False)
    assert reference(model) is model  # what replays doubtful cases has the quantised model's distribution


def test_the_bundled_pair_in_8_and_4_bits() -> None:
    """Speculation does not change the quantised model's text, and the certificate says how far that model is away."""
    speculative = {"method": "draft_model", "num_speculative_tokens": 3, "draft_weights": "int4"}
    engine = Engine.load("bundled", speculative=speculative, weights="int8")
    assert (engine.resolved()["weights"], engine.resolved()["dtype"]) == ("int8", str(engine.model.spec.dtype)[6:])
    assert set(engine.choice().method.model.spec.weights.split("+")) == {"int4", "int8"}  # type: ignore[attr-defined]
    plain = engine.with_method("none")
    for temperature in (0.0, 1.0):
        texts = [
            one.generate("def add(a, b):", temperature=temperature, seed=3, max_new_tokens=24)
            for one in (plain, engine)
        ]
        assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].num_accepted_tokens > 0
    certificate = certify(
        engine, ["def add(a, b):"], verifiers=["coupled"], shapes=["chain"], temperatures=[1.0], max_new_tokens=4
    )
    assert certificate.passed
    distance = certificate.weights_distance
    assert 0 < distance.mean_kl < 0.05
    assert certificate.to_dict()["weights_distance"]["weights"] == "int8"


def test_draft_weights_are_checked() -> None:
    with pytest.raises(ConfigError, match="draft_weights = 'int3' must be one of auto, fp32, bf16, int8, int4, least"):
        Engine.load("bundled", speculative={"method": "draft_model", "draft_weights": "int3"})
