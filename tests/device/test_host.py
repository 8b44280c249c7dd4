"""On an accelerator without float64 passes run there and draws on the host: ``model/host.py``."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Engine, SamplingParams
from foretell.core.spec import method_words
from foretell.model import host
from foretell.model.host import HostModel
from foretell.model.load import load_model, load_tokenizer
from tests.device import pretend
from tests.device.counting import engine_on, requests, run
from tests.device.pretend import NAME, device

SHORT = SamplingParams(max_new_tokens=10, ignore_eos=True)
ROWS = [SHORT, replace(SHORT, temperature=0.0), replace(SHORT, top_k=20, top_p=0.9, min_p=0.02, presence_penalty=0.3)]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretend device without float64."""
    outside = pretend._outside
    device()

    def checked(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
            raise TypeError("this device has no float64")
        return outside(x)

    monkeypatch.setattr(pretend, "_outside", checked)
    monkeypatch.setattr(host, "lacks_float64", lambda where: where.type == NAME)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("words", ["none", "draft_model:4", "draft_model:rejection:static/branching=2x1", "eagle3"])
def test_the_tokens_are_the_cpus(words: str) -> None:
    config = method_words(words)[0]
    target = load_model("bundled/target", device=NAME, implementation="lean", dtype="float32")
    assert isinstance(target, HostModel)
    engine = Engine.load(target, tokenizer=load_tokenizer("bundled/target"), speculative=config, drafter_errors="raise")
    assert run(engine, requests(ROWS)).tokens == run(engine_on("cpu", config), requests(ROWS)).tokens


@pytest.mark.usefixtures("narrow")
def test_the_device_is_used_and_has_no_float64() -> None:
    target = load_model("bundled/target", device=NAME, implementation="lean", dtype="float32")
    assert isinstance(target, HostModel)
    assert target.spec.device.type == "cpu"
    assert target.new_cache(1, 8).keys[0].device.type == NAME
    assert target.embed(torch.tensor([[3]])).is_cpu
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(2, device=device()).double()


def test_processes_that_share_a_model_go_on_sharing() -> None:
    """A wrapper asks the model that it wraps, or each process would decide and seed for itself."""
    inner = load_model("bundled/target")
    inner.is_shared, inner.is_leader = True, False
    inner.share, inner.fresh_seed = lambda value: "the leader's", lambda: 7  # type: ignore[method-assign, assignment]
    wrapped = HostModel(inner)
    assert (wrapped.is_shared, wrapped.is_leader) == (True, False)
    assert (wrapped.share("mine"), wrapped.fresh_seed()) == ("the leader's", 7)
