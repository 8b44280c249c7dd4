"""Whole certificates: clean ones pass, and each planted defect is caught by the check that is there for it."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import foretell.engine.judging as judging
from foretell.certify import certify
from foretell.cli.output import as_json
from foretell.core import deferred
from foretell.core.errors import ConfigError
from foretell.core.probs import Paths
from foretell.engine.engine import Engine
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.load import from_module
from foretell.model.target import CausalModel, Target
from foretell.verify import VERIFIERS
from foretell.verify.base import Evidence, Walk
from foretell.verify.exact import Coupled, Exact
from foretell.verify.rejection import Rejection
from tests.certify import harness as h
from tests.model.tiny import VOCAB, tiny_module

EXACT = [name for name, verifier in VERIFIERS.items() if verifier.exact]
BRANCHING = [name for name in EXACT if not VERIFIERS[name].chains_only]


@pytest.mark.parametrize("name", EXACT)
def test_every_exact_verifier_passes_on_tables(name: str) -> None:
    found = h.certificate(verifiers=[name], shapes=[h.CHAIN, h.TREE], temperatures=(0.0, 1.0))
    assert found.passed, [check.findings for check in found.defects]
    assert found.verdict == "certified"
    verifier = VERIFIERS[name]
    shapes = 1 if verifier.chains_only else 2
    assert len(found.left_out) == 2 - shapes
    names = [check.name for check in found.checks]
    assert names.count("window") == names.count("tokens") == shapes
    assert ("draws" in names) == ("q" in verifier.reads)
    assert ("law" in names) == ("joint" in names) == ("noise" not in verifier.reads)
    assert ("noise" in names) == ("noise" in verifier.reads)
    for check in found.checks:
        assert check.verdict == "pass"
        assert check.num_contexts > 0
        if check.name == "window":
            assert check.deviation < 1e-6, "a table does not round"
            assert check.figures["guessed_nodes"] > 0
    assert json.loads(as_json(found.to_dict()))["passed"] is True


def noisy(architecture: str, dtype: torch.dtype) -> tuple[CausalModel, DraftModel]:
    """A random target, and a draft that is the same model with blurred weights."""
    draft = tiny_module(architecture, dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for weight in draft.parameters():
            weight.data += 0.02 * torch.randn_like(weight)
    return from_module(tiny_module(architecture, dtype=dtype)), DraftModel(from_module(draft))


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", torch.float32), ("gemma3", torch.float32), ("gemma2", torch.bfloat16)]
)
def test_random_models_pass(architecture: str, dtype: torch.dtype) -> None:
    prompts = [[int(x) for x in torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n))] for n in
               (2, 9, 17, 5)]  # fmt: skip
    found = certify(
        h.engine(*noisy(architecture, dtype)), prompts, verifiers=["coupled", "rejection"], shapes=[h.TREE],
        temperatures=(0.0, 1.0), max_new_tokens=10, budget=replace(h.SMALL, visits=1, distributions=1),
    )  # fmt: skip
    assert found.passed, [check.findings for check in found.defects]
    if dtype == torch.float32:
        assert {check.verdict for check in found.checks} == {"pass"}


# -- planted defects -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Biased(Rejection):
    """Accepts 1 % less often than it should, and makes up for it nowhere."""

    name = "biased"

    def stops(self, evidence: Evidence) -> Walk:
        walk = super().stops(evidence)
        moved = 0.01 * walk.stops[:, 1:]
        stops = torch.cat([walk.stops[:, :1] + moved.sum(1, keepdim=True), walk.stops[:, 1:] - moved], 1)
        return Walk(stops, walk.carry)


@dataclass(frozen=True)
class Last(Rejection):
    """Right for one guess; takes what is left of p after the first child alone."""

    name = "last"

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        if evidence.tree.num_nodes <= 2 or evidence.tree.q is None:
            return super().residual(evidence, walk, at)
        rows = torch.arange(len(at))
        p, q = evidence.p[rows, at], evidence.tree.q[rows, at]
        rest = (p - q).clamp(min=0)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


@dataclass(frozen=True)
class Trusting(Coupled):
    """Also accepts what the target finds likely."""

    name = "trusting"

    def decide(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        at, bonus = super().decide(evidence)
        first = evidence.tree.tokens[:, min(1, evidence.tree.num_nodes - 1)]
        rows = torch.arange(len(at))
        taken = (at == 0) & (evidence.tree.parent[:, -1] >= 0) & (evidence.p[rows, 0, first] > 0.03)
        return torch.where(taken, 1, at), torch.where(
            taken, evidence.p[:, min(1, evidence.p.shape[1] - 1)].argmax(-1), bonus
        )


def test_a_bias_of_one_percent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "biased", Biased())
    found = h.certificate(verifiers=["biased", "rejection"])
    assert not found.passed
    assert found.verdict == "DEFECT"
    assert {(check.name, check.verifier) for check in found.defects} == {("law", "biased"), ("joint", "biased")}
    probs = next(check for check in found.defects if check.name == "law")
    assert 1e-4 < probs.deviation < 0.02
    assert "emitted" in probs.findings[0].what


def test_a_wrong_leftover_among_siblings_is_caught_by_the_joint_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "last", Last())
    found = h.certificate(verifiers=["last"], shapes=[h.TREE])
    assert h.failed(found) == {"joint"}


def test_tokens_that_are_not_the_targets_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "trusting", Trusting())
    found = h.certificate(verifiers=["trusting"], temperatures=(1.0,))
    assert h.failed(found) == {"tokens", "noise"}
    finding = h.check(found, "tokens").findings[0]
    assert finding.figures["gap"] > 1e-3
    assert finding.figures["equal_at_width"] is False
    assert "instead of" in finding.what


@dataclass(frozen=True)
class Own(Exact):
    """Draws its own tokens with a noise of its own, rightly, but takes the first guess in every second step."""

    name = "own"
    invariant = False

    def decide(self, evidence: Evidence) -> None:
        return None

    def stops(self, evidence: Evidence) -> Walk:
        walk = super().stops(evidence)
        assert evidence.noise is not None
        lucky = evidence.noise.draft(99) < 0.5
        if evidence.tree.num_nodes == 1:
            return walk
        forced = torch.zeros_like(walk.stops)
        forced[:, 1] = 1.0
        return Walk(torch.where(lucky[:, None], forced, walk.stops), walk.carry)


def test_a_bias_of_a_rule_that_reads_noise_is_caught_where_no_text_can_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(VERIFIERS, "own", Own())
    found = h.certificate(verifiers=["own"], temperatures=(1.0,))
    assert h.failed(found) == {"noise"}
    assert "from its probability" in h.check(found, "noise").findings[0].what


def test_a_drafter_that_lies_is_caught_unless_nobody_believes_it() -> None:
    """tests/certify/test_draws.py has more of them."""
    lying = h.engine(method=h.Spoilt(h.Greedy))
    found = h.certificate(lying, prompts=h.PROMPTS * 4, temperatures=(1.0,))
    assert h.failed(found) == {"draws"}
    # Under coupled nothing is claimed about q, and the text is the target's whatever the drafter does.
    assert h.certificate(lying, verifiers=["coupled"], temperatures=(1.0,)).verdict == "certified"


def test_a_draw_of_probability_zero_is_a_defect() -> None:
    class Impossible(h.ModelDrafter):
        def propose(self, *args: Any) -> Any:
            tree = super().propose(*args)
            if tree.q is None:
                return tree
            zero = tree.q.scatter(2, tree.tokens[:, 1:, None], 0.0) if tree.num_nodes > 1 else tree.q
            zero = zero / zero.sum(-1, keepdim=True)  # else it were no distribution, which is another defect
            return replace(tree, q=torch.cat([zero[:, :1], tree.q[:, 1:]], 1))

    found = h.certificate(h.engine(method=h.Spoilt(Impossible)))
    assert h.failed(found) == {"contract"}
    assert "q gives a guess that was drawn from it no chance" in h.check(found, "contract").findings[0].what


def test_processors_that_do_not_see_the_path_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = deferred.logits_to_probs

    def blind(logits: Tensor, processors: Any, history: Any, paths: Paths) -> Tensor:
        alone = torch.zeros_like(paths.ancestry)
        alone[..., 0] = True
        return right(logits, processors, history, Paths(paths.tokens, alone, paths.parent))

    monkeypatch.setattr(deferred, "logits_to_probs", blind)
    found = h.certificate(verifiers=["coupled"], shapes=[h.CHAIN])
    assert "window" in h.failed(found)
    finding = h.check(found, "window").findings[0]
    assert finding.figures["node"] > 0, "the root's own distribution is right"


def test_processors_left_out_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = deferred.logits_to_probs

    def careless(logits: Tensor, processors: Any, history: Any, paths: Paths) -> Tensor:
        if processors.repetition is not None:
            processors = processors.keep(range(len(processors.params)))
            processors.repetition = None
        return right(logits, processors, history, paths)

    monkeypatch.setattr(deferred, "logits_to_probs", careless)
    found = h.certificate(verifiers=["rejection"])
    assert "window" in h.failed(found)


@pytest.mark.parametrize("architecture", ["table", "llama"])
def test_a_commit_that_moves_a_wrong_slot_is_caught(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Target.commit
    monkeypatch.setattr(Target, "commit", lambda self, src, dst: right(self, *h.shift((src, dst))))
    if architecture == "table":
        found = h.certificate(verifiers=["rejection"], shapes=[h.TREE])
    else:
        prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14, 15], [20, 30, 40]]
        # The draft is often wrong: side branches are kept.
        found = certify(
            h.engine(*noisy("llama", torch.float32)), prompts, verifiers=["rejection"], shapes=["static/branching=3x2"],
            temperatures=(1.0,), max_new_tokens=16, budget=h.SMALL,
        )  # fmt: skip
    assert "window" in h.failed(found)


def test_a_layout_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = judging.layout

    def wrong(parent: Tensor, length: Tensor, *args: Any, **options: Any) -> Any:
        plan = right(parent, length, *args, **options)
        return replace(plan, positions=plan.positions + (plan.positions > length[:, None]).long())

    monkeypatch.setattr(judging, "layout", wrong)
    model = from_module(tiny_module("llama"))
    found = h.certificate(h.engine(model, DraftModel(model)), verifiers=["coupled"], max_new_tokens=8)
    assert "window" in h.failed(found)


# -- lossy rules, options --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lenient(Rejection):
    """Judges guesses by a law halfway between the draft's and the uniform one."""

    name = "lenient_test"
    exact = False

    def stops(self, evidence: Evidence) -> Walk:
        tree = evidence.tree
        q = (
            None
            if tree.q is None
            else torch.where(tree.q.sum(-1, keepdim=True) > 0, (tree.q + 1 / tree.q.shape[-1]) / 2, 0)
        )
        return super().stops(replace(evidence, tree=replace(tree, q=q)))


@pytest.mark.parametrize(
    ("temperatures", "prompts", "method", "unseen"),
    [
        ((0.0,), h.PROMPTS, "draft_model", {"law", "joint"}),  # no distribution is sampled from
        ((0.0, 1.0), [[3]], "ngram", {"window", "law", "joint"}),  # and here nothing was guessed
    ],
)
def test_a_rule_whose_law_was_never_looked_at_is_not_certified(
    temperatures: tuple[float, ...], prompts: list[list[int]], method: str, unseen: set[str]
) -> None:
    made = h.engine() if method == "draft_model" else Engine(h.TARGET, speculative={"method": method})
    found = h.certificate(made, temperatures=temperatures, prompts=prompts, max_new_tokens=4)
    assert {check.name for check in found.unseen} == unseen
    assert not found.defects
    assert not found.passed
    assert found.verdict.startswith("not certified: nothing to check for rejection: ")
    assert found.looked_at["rejection"]["law"] == "0 laws"


def test_a_lossy_rule_is_measured_and_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "lenient_test", Lenient())
    found = h.certificate(verifiers=["lenient_test"], temperatures=(0.0, 1.0))
    assert found.passed, "measuring is no defect"
    probs, joint, tokens = (h.check(found, name) for name in ("law", "joint", "tokens"))
    assert {probs.verdict, joint.verdict, tokens.verdict} == {"lossy"}
    assert not probs.passed
    assert 0.01 < probs.figures["mean_total_variation"] <= probs.figures["largest_total_variation"] < 0.5
    assert probs.tolerance is None
    assert found.verdict == "certified, but for the lossy lenient_test" or "not certified" in found.verdict
    assert "lossy" in found.verdict
    both = h.certificate(verifiers=["lenient_test", "rejection"])
    assert both.verdict == "certified, but for the lossy lenient_test"


def test_fixed_guesses_claim_nothing_and_their_law_is_checked() -> None:
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5, 4], [9] * 6, [7, 8, 7, 8, 7]]
    table = h.TableLM(h.VOCAB, seed=2, sharpness=6.0, context=1)
    made = Engine(table, speculative={"method": "ngram", "prompt_lookup_min": 1})
    found = h.certificate(made, prompts=prompts)
    assert found.verdict == "certified"
    assert h.check(found, "draws").verdict == "nothing to check"
    assert h.check(found, "law").num_contexts > 0
    assert h.check(found, "joint").num_contexts > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompts": []}, "at least one"),
        ({"max_new_tokens": 1}, "at least 2"),
        ({"temperatures": ()}, "no temperature"),
        ({"verifiers": ["rejecton"]}, "did you mean 'rejection'"),
        ({"shapes": ["chian"]}, "did you mean 'chain'"),
        ({"verifiers": []}, "no verifier"),
    ],
)
def test_mistakes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        h.certificate(**options)


def test_plain_decoding_cannot_be_certified() -> None:
    with pytest.raises(ConfigError, match="guesses nothing"):
        certify(h.engine().with_method("none"), h.PROMPTS)


def test_the_engine_is_not_changed_and_runs_replay() -> None:
    made = h.engine()
    before = made.resolved()
    one, two = h.certificate(made), h.certificate(made)
    assert made.resolved() == before
    assert [replace(check) for check in one.checks] == list(two.checks)


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    h.certificate(progress=lambda *args: told.append(args))
    assert [done for done, _, _ in told] == [0, 1, 2]
    assert told[1][2] == "rejection, chain"
