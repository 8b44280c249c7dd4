"""What packages bring, decoding: alone, in batches, in a service, in bench and certify; and what capabilities decide."""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell import (
    METHODS,
    VERIFIERS,
    Capabilities,
    Commit,
    ConfigError,
    Context,
    Drafter,
    DrawMode,
    DrawnBy,
    Engine,
    Evidence,
    History,
    Loader,
    Method,
    MethodConfig,
    Noise,
    Processors,
    SamplingParams,
    Service,
    ServiceOptions,
    Shape,
    Submission,
    Target,
    TokenTree,
    Verifier,
    VerifierLoader,
    Walk,
    chain_of,
)
from foretell.bench import run_bench
from foretell.certify import certify
from foretell.certify.run import CertifyBudget
from foretell.draft.none import NoMethod
from foretell.draft.shapes import Chain
from foretell.engine.drafters.lazy import LazyDrafter, open_drafter
from foretell.engine.methods import Methods
from foretell.methods.draft_model.drafter import DraftModel
from foretell.service.choices import Choices
from tests.engine.harness import VOCAB, ToyTokenizer, mixed_requests, outcome, outcomes, plain, table
from tests.engine.integrity import check_service
from tests.extend.packages import lay_third_party
from tests.service.test_service import Mailbox
from tests.verify.enumerate import Case, error, shapes, tables

VERY_SHORT = Chain(depth=1)


def context(num_rows: int) -> Context:
    """Rows of one and the same text, with room for a few guesses."""
    length = torch.full((num_rows,), 2)
    processors = Processors(
        [SamplingParams()] * num_rows, vocab_size=VOCAB, end_token_ids=(), device=torch.device("cpu")
    )
    return Context(
        History([[1, 2, 3]] * num_rows, [3] * num_rows), processors, length, [2] * num_rows, torch.full((num_rows,), 3),
        [[]] * num_rows, [5] * num_rows,
    )  # fmt: skip


def noise(num_rows: int) -> Noise:
    return Noise(torch.arange(num_rows), torch.full((num_rows,), 2))


# -- the package of docs/extend.md ---------------------------------------------------------------------------------------


@pytest.fixture
def installed(site: Path) -> None:
    lay_third_party(site)


def engine(**config: object) -> Engine:
    return Engine(table(1), ToyTokenizer(), speculative={"method": "echo", **config})


@pytest.mark.usefixtures("installed")
def test_its_drafter_decodes_the_same_text_alone_and_in_batches() -> None:
    requests = mixed_requests()
    done = engine(echo_window=30).generate_batch(requests, batch_size=4)
    assert outcomes(done) == outcomes(plain(table(1), requests))
    assert sum(one.num_accepted_tokens for one in done) > 0, "some guesses must be right, or nothing was tested"
    assert {piece.source for one in done for piece in one.pieces} >= {"draft:echo"}


def test_a_drafter_that_reads_text_gets_the_targets_tokenizer() -> None:
    """Of a target in memory, its name was looked for as a directory."""
    tokenizer = ToyTokenizer()
    for given, found in ((tokenizer, (tokenizer, tokenizer)), (None, None)):
        loader = Methods(table(1), given).loader
        assert loader.tokenizers(loader.target.spec.name) == found


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("vocab_size", [3, 4])
def test_its_verifier_emits_exactly_the_targets_law(vocab_size: int) -> None:
    """All draws on all trees of up to three guesses, every label at every node."""
    rule, checked = VERIFIERS["direct"], 0
    probs = tables(vocab_size, 4, seed=1, sparse_p=0.3, sparse_q=0.2)
    for parent in shapes(3):
        for kinds in itertools.product((DrawnBy.FIXED, DrawnBy.IID), repeat=len(parent) - 1):
            if any(
                kinds[i - 1] == DrawnBy.FIXED and kinds[j - 1] != DrawnBy.FIXED and parent[i] == parent[j]
                for i, j in itertools.combinations(range(1, len(parent)), 2)
            ):
                continue  # drawn siblings stand before FIXED ones
            assert error(rule, Case(parent, (DrawnBy.FIXED, *kinds)), probs) < 1e-12
            checked += 1
    assert checked > 20


@pytest.mark.usefixtures("installed")
def test_control_the_rule_without_its_leftover_is_caught() -> None:
    kind = type(VERIFIERS["direct"])

    class Wrong(kind):  # type: ignore[misc, valid-type]
        def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
            return evidence.p[range(len(at)), at]

    probs = tables(3, 3, seed=1)
    assert error(Wrong(), Case((-1, 0), (DrawnBy.FIXED, DrawnBy.FIXED)), probs) > 1e-2


@pytest.mark.usefixtures("installed")
def test_both_are_benched_and_certified_by_name() -> None:
    report = run_bench(
        Engine(table(1), ToyTokenizer()), ["abcabcab", "aabbaabb"], ["echo:3", "echo:3:direct"], max_new_tokens=8
    )
    assert [method.label for method in report.temperatures[0].methods] == ["none", "echo:3", "echo:3:direct"]
    assert all(method.overall.num_identical == 2 for method in report.temperatures[0].methods)
    found = certify(
        engine(), [[1, 2, 1, 2, 1], [3, 1, 3, 1]], verifiers=["direct", "exact"], temperatures=(1.0,), max_new_tokens=6,
        replay=lambda: table(1), budget=CertifyBudget(seeds=1000),
    )  # fmt: skip
    assert found.passed
    assert {check.verifier for check in found.checks} >= {"direct", "exact"}


# -- drafters that cannot be joined --------------------------------------------------------------------------------------


class Counter(Drafter):
    """Remembers its rows, and cannot take more of them: each has its own count of steps, and its own name."""

    opened = 0

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        Counter.opened += 1

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        assert context.num_rows == self.num_rows == 1
        return chain_of(context, [[ids[-1]] * depth_limit for ids, depth_limit in zip(
            context.history.ids, context.depth_limit, strict=True)])  # fmt: skip

    def observe(self, commit: Commit) -> None:
        assert len(commit.tokens) == 1


class Counting(Method):
    name = "counting"
    capabilities = Capabilities("test double", draws=False, by_request=True)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return Counter(context.num_rows)


@dataclasses.dataclass(frozen=True)
class CountingConfig(MethodConfig):
    method = "counting"
    capabilities = Counting.capabilities

    def load(self, loader: Loader) -> Method:
        return Counting()


@pytest.fixture
def counting() -> Iterator[None]:
    METHODS["counting"] = CountingConfig
    Counter.opened = 0
    yield
    del METHODS["counting"]


@pytest.mark.usefixtures("counting")
def test_a_service_gives_each_row_a_drafter_of_its_own() -> None:
    requests = mixed_requests()
    service = Service(
        Engine(table(1), ToyTokenizer(), speculative="counting"),
        ServiceOptions(speculation="on", max_num_seqs=4, max_model_len=200),
    )
    service.start()
    box = Mailbox()
    for index, request in enumerate(requests):
        service.submit(Submission(str(index), list(request.prompt), request.params), box.hear)
    for index, want in enumerate(plain(table(1), requests)):
        completion = box.last(str(index)).completion
        assert completion is not None
        assert outcome(completion) == outcome(want)
    check_service(service)
    service.close()
    assert Counter.opened >= len(requests)


def test_can_join_and_join_go_together() -> None:
    with pytest.raises(TypeError, match="Half has can_join = True, and no method join"):

        class Half(Counter):
            can_join = True

    with pytest.raises(TypeError, match="Other has can_join = False, and a method join"):

        class Other(Counter):
            def join(self, other: Drafter, context: Context) -> None: ...


def test_every_built_in_drafter_can_be_joined() -> None:
    for name in METHODS.builtin:
        assert METHODS[name].method == name  # imported

    def below(kind: type[Drafter]) -> Iterator[type[Drafter]]:
        for sub in kind.__subclasses__():
            if not inspect.isabstract(sub):  # what several share is never opened
                yield sub
            yield from below(sub)

    own = [kind for kind in below(Drafter) if kind.__module__.startswith(("foretell.draft", "foretell.methods"))]
    assert len(own) >= 10
    assert all(kind.can_join for kind in own)


def test_a_late_opened_drafter_that_cannot_be_joined_is_opened_anew() -> None:
    class Late(Counting):
        capabilities = dataclasses.replace(Counting.capabilities, opens_late=True)

    class Any(Counter):
        def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
            assert context.num_rows == self.num_rows
            return chain_of(context, [[1]] * context.num_rows)

    Late.open = lambda self, context, capacity, target: Any(context.num_rows)  # type: ignore[method-assign, assignment]
    model, method = table(1), Late()
    target = Target(model, 1, 64)
    mine, other = (open_drafter(method, context(1), 64, target) for _ in range(2))
    assert isinstance(mine, LazyDrafter)
    for drafter in (mine, other):
        assert drafter.propose(context(1), VERY_SHORT, DrawMode.FIXED, noise(1)).num_nodes == 2
    mine.join(other, context(2))
    assert mine.propose(context(2), VERY_SHORT, DrawMode.FIXED, noise(2)).tokens.shape == (2, 2)


# -- capabilities decide -------------------------------------------------------------------------------------------------


def test_what_a_request_may_ask_for_is_declared() -> None:
    assert {name for name, kind in METHODS.items() if kind.capabilities.by_request} == {
        "none", "ngram", "prediction", "suffix",
    }  # fmt: skip


@pytest.mark.usefixtures("installed")
def test_a_request_cannot_ask_for_what_does_not_declare_it() -> None:
    choices = Choices(Engine(table(1), ToyTokenizer()), [], off=False)
    with pytest.raises(ConfigError, match="method 'echo' with these settings is not loaded here"):
        choices.method("echo")
    loaded = Choices(engine(), [], off=False)
    assert loaded.method({"method": "echo", "num_speculative_tokens": 2}).num_speculative_tokens == 2
    with pytest.raises(ConfigError, match="is not loaded here"):
        loaded.method({"method": "echo", "echo_window": 3})


def test_layers_that_a_self_drafter_runs_are_declared() -> None:
    """Kangaroo runs the target's lower layers in each step, so nobody beside it can be told their outputs."""
    bundled = Engine.load("bundled", speculative="kangaroo")
    assert bundled.method.exit_layer == bundled.method.prompt_taps[0] + 1 > 0

    class Low(NoMethod):
        taps = (0,)  # type: ignore[assignment]

    @dataclasses.dataclass(frozen=True)
    class LowConfig(CountingConfig):
        method = "low"

        def load(self, loader: Loader) -> Method:
            return Low()

    with pytest.raises(ConfigError, match="a self-drafter loaded beside it runs the layers below"):
        Choices(bundled, [LowConfig()], off=False)


def test_a_method_foresees_iff_it_was_loaded_with_a_head() -> None:
    assert not DraftModel(table(1)).foresees
    assert not NoMethod().foresees
    with pytest.raises(ConfigError, match="acceptance head"):
        Engine(table(1), speculative={"method": "draft_model", "shape": "specdec"}, method=DraftModel(table(2)))


def test_a_verifier_loads_its_own_weights() -> None:
    seen: list[VerifierLoader] = []

    @dataclasses.dataclass(frozen=True)
    class Weighty(type(VERIFIERS["coupled"])):  # type: ignore[misc]
        name = "weighty"
        loaded: bool = False

        def load(self, loader: VerifierLoader) -> Verifier:
            seen.append(loader)
            return dataclasses.replace(self, loaded=True)

    VERIFIERS["weighty"] = Weighty()
    try:
        model = table(1)
        made = Engine(model, speculative={"method": "ngram", "verify": "weighty", "judge": "here"})
        Engine(model, speculative={"method": "none", "verify": "weighty"})
    finally:
        del VERIFIERS["weighty"]
    assert made.verifier.loaded  # type: ignore[attr-defined]
    assert [(loader.guesses, loader.name, loader.target is model) for loader in seen] == [
        (True, "here", True), (False, None, True),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no kind of head called 'nothing'"):
        seen[0].head("nothing")
