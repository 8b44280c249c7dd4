"""Parts of packages that break their contract in any way: each is named with its package, is a DEFECT to ``certify``, one
error to whoever measures or generates, and harms no other request of a service."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import METHODS, VERIFIERS, Engine, MethodConfig, SamplingParams, Service, ServiceOptions, Submission
from foretell.bench import run_bench
from foretell.certify import CertifyBudget, certify
from foretell.core.errors import ConfigError, DrafterError, VerifierError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.config import Loader
from foretell.draft.shapes import Shape
from foretell.model.target import Target
from foretell.verify import Evidence, Rejection, Walk
from foretell.verify.base import stops_from_edges
from tests.engine.harness import VOCAB, ToyTokenizer, outcome, table
from tests.engine.integrity import check_service
from tests.extend.packages import lay
from tests.service.test_service import Mailbox

RULE = {
    "raises": r"stops\(\) raised KeyError: 'no such row'",
    "edges": r"stops\(\) raised RuntimeError: the children of a node are reached with probability 2",
    "no walk": r"stops\(\) returned Tensor; expected a Walk",
    "shape": r"stops\(\) returned torch.float64 \(\d+, 1\); expected probabilities",
    "whole numbers": r"stops\(\) returned torch.int64",
    "NaN": r"stops\(\) returned NaN",
    "negative": r"stops\(\) returned -0.5",
    "sum": r"stops\(\) sum to 0.5 in a row",
    "residual raises": r"residual\(\) raised ValueError: out of order",
    "residual shape": r"residual\(\) returned torch.float64 \(\d+,\)",
    "residual negative": r"residual\(\) returned -1;",
    "residual infinite": r"residual\(\) returned infinity",
    "decide": r"decide\(\) returned \[999.*\] as bonus; expected 0 to 23",
    "decide type": r"decide\(\) returned list; expected",
    "walk": r"walk\(\) returned str",
}
"""Ways in which a rule breaks its contract, and how it is said."""


@dataclass(frozen=True)
class Odd(Rejection):
    """Rejection, broken in one way."""

    name = "odd"
    summary = "broken on purpose"
    how: str = "raises"

    def stops(self, evidence: Evidence) -> Any:
        found = super().stops(evidence)
        match self.how:
            case "raises":
                raise KeyError("no such row")
            case "edges":
                return Walk(stops_from_edges(evidence.tree.parent, torch.full(evidence.shape[:2], 2.0)))
            case "no walk":
                return found.stops
            case "shape":
                return replace(found, stops=found.stops[:, :1])
            case "whole numbers":
                return replace(found, stops=found.stops.long())
            case "NaN":
                return replace(found, stops=found.stops * torch.nan)
            case "negative":
                return replace(found, stops=found.stops - 0.5)
            case "sum":
                return replace(found, stops=found.stops / 2)
        return found

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        found = super().residual(evidence, walk, at)
        match self.how:
            case "residual raises":
                raise ValueError("out of order")
            case "residual shape":
                return found[:, 0]
            case "residual negative":
                return found - 1
            case "residual infinite":
                return found + torch.inf
        return found

    def decide(self, evidence: Evidence) -> Any:
        if self.how == "decide type":
            return [1, 2]
        at = torch.zeros(evidence.shape[0], dtype=torch.int64)
        return (at, at + 999) if self.how == "decide" else None

    def walk(self, evidence: Evidence) -> Any:
        return "far" if self.how == "walk" else None


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a rule that is broken in one way."""

    def made(how: str) -> str:
        monkeypatch.setitem(VERIFIERS, "odd", Odd(how=how))  # type: ignore[arg-type]
        return "odd"

    return made


def engine(**config: Any) -> Engine:
    return Engine(table(1), ToyTokenizer(), speculative={"method": "ngram", **config})


LOOPING = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("how", RULE)
def test_a_rule_is_named_with_what_is_wrong(how: str, rule: Any) -> None:
    rule(how)
    told = rf"^verifier 'odd' \(tests\.extend\.test_contract\) breaks the contract of verifiers: {RULE[how]}"
    with pytest.raises(VerifierError, match=told):
        engine(verify="odd").generate(LOOPING, max_new_tokens=20, seed=1)


@pytest.mark.parametrize("how", ["edges", "NaN", "sum", "residual shape"])
def test_a_rule_is_a_defect_and_cannot_be_measured(how: str, rule: Any) -> None:
    rule(how)
    found = certify(
        engine(), [LOOPING], verifiers=["rejection", "odd"], shapes=["chain"], temperatures=(1.0,), max_new_tokens=6,
        replay=lambda: table(1), budget=CertifyBudget(seeds=1000),
    )  # fmt: skip
    assert found.verdict == "DEFECT"
    (check,) = found.defects
    assert (check.name, check.verifier, check.shape) == ("contract", "odd", "chain")
    assert "verifier 'odd' (tests.extend.test_contract) breaks the contract" in check.findings[0].what
    assert {check.verifier for check in found.checks if check.passed} == {"rejection"}, (
        "the others are checked all the same"
    )
    with pytest.raises(VerifierError, match=r"verifier .odd. .* breaks the contract of verifiers"):
        run_bench(Engine(table(1), ToyTokenizer()), ["abcabcab"], ["ngram:3", "ngram:3:odd"], max_new_tokens=8)


def test_a_rule_that_is_wrong_only_on_small_trees_is_a_defect(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Odd.stops

    def stops(self: Odd, evidence: Evidence) -> Any:
        return original(replace(self, how="sum" if evidence.shape[2] == 4 else ""), evidence)

    monkeypatch.setattr(Odd, "stops", stops)
    rule("")
    found = certify(
        engine(), [LOOPING], verifiers=["odd"], shapes=["chain"], temperatures=(1.0,), max_new_tokens=6,
        replay=lambda: table(1), budget=CertifyBudget(seeds=1000),
    )  # fmt: skip
    (check,) = found.defects
    assert (check.name, check.shape) == ("contract", "small trees")


def test_a_row_whose_logits_are_no_numbers_is_no_fault_of_the_rule(rule: Any) -> None:
    rule("")

    def spoilt(ids: Tensor, logits: Tensor) -> Tensor:
        return logits + (torch.nan if len(ids) > 10 else 0.0)

    with pytest.raises(Exception, match="no token is possible after 1"):
        engine(verify="odd").generate(LOOPING, max_new_tokens=20, logits_processor=spoilt, ignore_eos=True)


def test_in_a_service_only_the_requests_of_the_rule_end(rule: Any) -> None:
    rule("edges")
    service = Service(engine(), ServiceOptions(speculation="on", max_num_seqs=4, max_model_len=128))
    service.start()
    try:
        box = Mailbox()
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=3)
        broken = service.method({"method": "ngram", "verify": "odd"})
        for name, way in (("a", None), ("b", broken), ("c", None)):
            service.submit(Submission(name, LOOPING, params, speculative=way or service.default), box.hear)
        error = box.last("b").error
        assert isinstance(error, VerifierError)
        assert "verifier 'odd'" in str(error)
        alone = engine().generate(LOOPING, params)
        for name in ("a", "c"):
            completion = box.last(name).completion
            assert completion is not None
            assert outcome(completion) == outcome(alone)
        check_service(service)
    finally:
        service.close()


# -- drafters --------------------------------------------------------------------------------------------------------

DRAFTER = {
    "raises": r"failed \(KeyError: 'no such row'",
    "token": r"failed \(VocabularyMismatchError: .* has token id 999",
    "rows": r"failed \(ModelError: a proposal has 2 rows",
    "no tree": r"failed \(AttributeError",
    "q NaN": r"breaks the contract of drafters: q, from which a guess was drawn, holds NaN",
    "q negative": r"breaks the contract of drafters: q, from which a guess was drawn, holds -0\.5",
    "q sum": r"breaks the contract of drafters: q, from which a guess was drawn, sums to 12",
    "q elsewhere": r"breaks the contract of drafters: q gives a guess that was drawn from it no chance",
    "q without draws": r"breaks the contract of drafters: q must be given iff a node was drawn",
    "load": r"cannot be loaded \(OSError: no weights",
}


@dataclass(frozen=True)
class StrayConfig(MethodConfig):
    """A drafter that is broken in one way."""

    method = "stray"
    capabilities = Capabilities("broken on purpose", draws=True, shapes=("chain",))

    how: str = "raises"

    def load(self, loader: Loader) -> Method:
        if self.how == "load":
            raise OSError("no weights")
        return Stray(self.how)


class Stray(Method):
    name = "stray"
    capabilities = StrayConfig.capabilities

    def __init__(self, how: str) -> None:
        self.how = how

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return StrayDrafter(self.how)


class StrayDrafter(Drafter):
    def __init__(self, how: str) -> None:
        self.how = how

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> Any:
        if self.how == "raises":
            raise KeyError("no such row")
        if self.how == "no tree":
            return [1, 2]
        num_rows = context.num_rows + (self.how == "rows")
        tokens = torch.stack([context.pending[:1].expand(num_rows), torch.full((num_rows,), 5)], 1)
        tokens = tokens.clone()
        tokens[: context.num_rows, 0] = context.pending
        if self.how == "token":
            tokens[:, 1] = 999
        parent = torch.tensor([[-1, 0]]).expand(num_rows, 2)
        label = DrawnBy.FIXED if self.how == "q without draws" else DrawnBy.IID
        q = torch.zeros(num_rows, 2, VOCAB, dtype=torch.float64)
        q[:, 0] = {"q NaN": torch.nan, "q negative": -0.5, "q sum": 0.5}.get(self.how, 1 / VOCAB)
        if self.how == "q elsewhere":
            q[:, 0], q[:, 0, 4] = 0.0, 1.0
        return TokenTree(tokens, parent, torch.tensor([[0, int(label)]]).expand(num_rows, 2), q)


@pytest.mark.parametrize("how", DRAFTER)
def test_a_drafter_is_named_and_a_defect(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "stray", StrayConfig)  # type: ignore[arg-type]
    config = {"method": "stray", "how": how}
    if how == "load":
        with pytest.raises(DrafterError, match=f"^method 'stray' .*{DRAFTER[how]}"):
            Engine(table(1), ToyTokenizer(), speculative=config)
        return
    made = Engine(table(1), ToyTokenizer(), speculative=config)
    found = certify(
        made, [LOOPING], verifiers=["rejection"], shapes=["chain"], temperatures=(1.0,), max_new_tokens=6,
        replay=lambda: table(1), budget=CertifyBudget(seeds=1000),
    )  # fmt: skip
    assert [check.name for check in found.defects] == ["contract"]
    (finding,) = found.defects[0].findings
    assert re.search(f"method 'stray' {DRAFTER[how]}", finding.what), finding.what
    if not how.startswith("q"):
        with pytest.raises(DrafterError, match=f"method 'stray' {DRAFTER[how]}"):
            run_bench(
                Engine(table(1), ToyTokenizer()), ["abcabcab"], [{"method": "stray", "how": how}], max_new_tokens=8
            )
    exact = Engine(table(1), ToyTokenizer()).generate(LOOPING, max_new_tokens=9, seed=2)
    assert outcome(made.generate(LOOPING, max_new_tokens=9, seed=2)) == outcome(exact), "guesses change no token"


def test_the_package_is_named(site: Path) -> None:
    source = """
from dataclasses import dataclass
import foretell

@dataclass(frozen=True)
class Twice(foretell.VERIFIERS["rejection"].__class__):
    name = "twice"
    summary = "accepts twice"

    def stops(self, evidence):
        raise LookupError("lost")
"""
    lay(site, "ill-made", {"foretell.verifiers": {"twice": "ill_made:Twice"}}, {"ill_made.py": source})
    with pytest.raises(VerifierError, match=r"^verifier 'twice' of the package ill-made 1\.2\.0 \(ill_made\) breaks"):
        engine(verify="twice").generate(LOOPING, max_new_tokens=20, seed=1)


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "body", "told"),
    [
        ("max_guesses", "raise KeyError('size')", "max_guesses raised KeyError: 'size'"),
        ("max_guesses", "return 2.5", "max_guesses is 2.5; expected a whole number from 1 to 512"),
        ("max_guesses", "return -3", "max_guesses is -3; expected"),
        ("max_grown", "return 10**9", "max_grown is 1000000000; expected"),
        ("max_grown", "return None", "max_grown is None; expected"),
    ],
)
def test_a_shape_whose_sizes_are_none_is_named(size: str, body: str, told: str, site: Path) -> None:
    source = (
        "import dataclasses, foretell\n@dataclasses.dataclass(frozen=True)\nclass Knot(foretell.Shape):\n"
        f"    name = 'knot'\n    summary = 'odd'\n    @property\n    def {size}(self): {body}\n"
    )
    lay(site, "ill-made", {"foretell.shapes": {"knot": "ill_shaped:Knot"}}, {"ill_shaped.py": source})
    whole = rf"^shape .knot. of the package ill-made 1\.2\.0 \(ill_shaped\) breaks the contract .*: {re.escape(told)}"
    with pytest.raises(ConfigError, match=whole):
        engine(shape="knot")
