"""Token equality with N = 1: the strongest test of the project. Table models: strict. Real ones: strict unless tied."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from foretell import Completion, Engine, Request, SamplingParams
from foretell.core.noise import Noise, derive_seed, exponentials
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run.lean import LeanModel
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target
from tests.engine.harness import (
    EOS,
    VOCAB,
    ToyTokenizer,
    adversary,
    draft_engine,
    mixed_params,
    mixed_requests,
    outcome,
    outcomes,
    plain,
    prompts,
    table,
    tree_engine,
)
from tests.model.table import TableLM
from tests.model.tiny import tiny_module

TARGET = table()
DRAFTS = {
    "equal": TARGET,
    "near": table(blur=0.3),
    "random": table(seed=99),
    "adversarial": adversary(TARGET),
    "greedy-like": table(sharpness=20.0),
}
VERIFIERS = ("coupled", "exact")
BATCHES = (1, 8)


@pytest.fixture(scope="module", params=VERIFIERS)
def oracle(request: pytest.FixtureRequest) -> tuple[str, list[Completion]]:
    return request.param, plain(TARGET, mixed_requests(), verify=request.param)


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert outcomes(found) == outcomes(expected)


def test_the_requests_are_worth_testing(oracle: tuple[str, list[Completion]]) -> None:
    """Both ways of ending, different lengths, no text twice."""
    completions = oracle[1]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert len({completion.num_tokens for completion in completions}) >= 4
    assert len({tuple(completion.token_ids) for completion in completions}) == len(completions)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("gamma", [1, 3, 5, 8])
def test_draft_model(name: str, gamma: int, oracle: tuple[str, list[Completion]]) -> None:
    verify, expected = oracle
    engine = draft_engine(TARGET, DRAFTS[name], gamma, verify=verify)
    chosen = slice(gamma % 4, None, 4)  # alone: two of the eight, all of them over the four gammas
    for batch_size, part in ((1, chosen), (8, slice(None)), (3, slice(1, 8, 2))):
        found = engine.generate_batch(mixed_requests()[part], batch_size=batch_size)
        assert_same(found, expected[part])
        accepted = sum(completion.num_accepted_tokens for completion in found)
        drafted = sum(completion.num_draft_tokens for completion in found)
        if name == "equal" and verify == "coupled":
            assert accepted == drafted > 0, "the same distribution under the same noise draws the same token"
        if name == "adversarial":
            assert accepted < 0.5 * drafted


@pytest.mark.parametrize("batch_size", BATCHES)
def test_ngram(batch_size: int, oracle: tuple[str, list[Completion]]) -> None:
    verify, expected = oracle
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "verify": verify}
    found = Engine(TARGET, ToyTokenizer(), speculative=config).generate_batch(mixed_requests(), batch_size=batch_size)
    assert_same(found, expected)
    assert sum(completion.num_accepted_tokens for completion in found) > 0


def predictions(expected: Completion, kind: str) -> list[int] | None:
    ids = list(expected.token_ids)
    if kind == "good":
        return ids
    if kind == "beyond the end":
        return [*ids, *range(10)]
    if kind == "nonsense":
        return [(token * 7 + index * 5 + 3) % VOCAB for index, token in enumerate(ids)]
    if kind == "empty":
        return []
    if kind == "partial":
        return [*ids[: len(ids) // 3], 0, 1, 0, *ids[len(ids) // 2 :]]
    if kind == "shifted":
        return ids[4:]
    return None


@pytest.mark.parametrize("kind", ["good", "beyond the end", "nonsense", "empty", "partial", "shifted", "absent"])
def test_prediction(kind: str, oracle: tuple[str, list[Completion]]) -> None:
    verify, expected = oracle
    engine = Engine(TARGET, ToyTokenizer(), speculative={"method": "prediction", "verify": verify})
    requests = [
        Request(request.prompt, request.params, predictions(completion, kind))
        for request, completion in zip(mixed_requests(), expected, strict=True)
    ]
    for batch_size in BATCHES:
        found = engine.generate_batch(requests, batch_size=batch_size)
        assert_same(found, expected)
        if kind == "good":
            assert all(completion.acceptance_rate == 1.0 for completion in found if completion.num_draft_tokens)
            assert all(completion.num_steps == -(-completion.num_tokens // 8) for completion in found)
        if kind in ("empty", "absent"):
            assert all(piece.source == "plain" for completion in found for piece in completion.pieces)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_short_outputs(max_new_tokens: int) -> None:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    requests = [Request(ids, SamplingParams(max_new_tokens=max_new_tokens, seed=i)) for i, ids in enumerate(prompts())]
    expected = plain(TARGET, requests)
    for draft in ("equal", "near"):
        for batch_size in (1, 8):
            found = draft_engine(TARGET, DRAFTS[draft], 5).generate_batch(requests, batch_size=batch_size)
            assert_same(found, expected)
    completion = draft_engine(TARGET, TARGET, 5).generate([3], params)
    assert completion.num_draft_tokens == max_new_tokens - completion.num_steps, "nothing is guessed beyond the limit"


def test_mixed_lengths_in_one_batch() -> None:
    """Rows that end one after the other, the first in its first step."""
    requests = [
        Request(ids, SamplingParams(max_new_tokens=1 + 3 * i, seed=i, ignore_eos=True))
        for i, ids in enumerate(prompts())
    ]
    expected = plain(TARGET, requests)
    for gamma in (1, 4, 8):
        assert_same(draft_engine(TARGET, DRAFTS["near"], gamma).generate_batch(requests), expected)


# -- any tree --------------------------------------------------------------------------------------------------------


def variates(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """[V] the exponentials that decide the token after a pending one at this position."""
    keys = Noise(torch.tensor([derive_seed(seed)]), torch.tensor([position])).coupled_keys(1)[0, 0]
    return exponentials(keys, vocab_size)


def true_path(ids: list[int], depth: int, seed: int) -> list[int]:
    """The tokens that plain decoding at temperature 1 will say next: what a perfect drafter would guess."""
    text, said = list(ids), []
    for _ in range(depth):
        token = int((TARGET.probs_after(text) / variates(seed, len(text) - 1, VOCAB)).argmax())
        text.append(token)
        said.append(token)
    return said


def side_branch_tree(seed: int) -> Any:
    """The right path lies on late-numbered side branches, among wrong ones, duplicates and padding."""

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        depth = min(depth, 3)
        nodes: list[tuple[int, int]] = []
        above = 0
        for token in true_path(ids, depth, seed):
            wrong = (token + 1 + len(ids)) % VOCAB
            nodes += [(above, wrong), (above, (wrong + 1) % VOCAB), (-1, 0)]
            nodes += [(above, token), (above, token)]  # a duplicate among siblings: the first counts
            above = len(nodes) - 1
        return nodes

    return guess


@pytest.mark.parametrize("verify", [*VERIFIERS, "rejection"])
def test_side_branches_move_kv(verify: str, audited: list[Any]) -> None:
    """A tree whose right path is never the leading one: almost all of it is accepted, so KV moves in every step."""
    seed, moved = 11, []

    def count_moves(state: Any, target: Any, drafter: Any, report: Any) -> None:
        moved.extend(path != list(range(len(path))) for path in report.commit.path)

    audited.append(count_moves)
    requests = [Request(ids, SamplingParams(max_new_tokens=20, seed=seed, ignore_eos=True)) for ids in prompts()]
    engine = tree_engine(TARGET, side_branch_tree(seed), 20, verify=verify, tokenizer=ToyTokenizer())
    for batch_size in (1, 8):
        found = engine.generate_batch(requests, batch_size=batch_size)
        assert sum(moved) > 10
        if verify != "rejection":
            assert_same(found, plain(TARGET, requests, verify=verify))
            assert all(completion.num_steps <= 6 for completion in found)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_any_tree_through_the_engine(data: st.DataObject, seed: int) -> None:
    """Random shapes and tokens, ragged and padded differently in every row and step; right tokens mixed in."""
    choose = st.integers(0, 2**31)
    spice = data.draw(choose)

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        generator = torch.Generator().manual_seed(spice + len(ids))
        right = true_path(ids, 4, seed)
        nodes: list[tuple[int, int]] = []
        depths = {0: 0}
        for node in range(1, 1 + int(torch.randint(0, 10, (), generator=generator))):
            legal = [other for other, d in depths.items() if d < min(depth, 4)]
            if not legal or torch.rand((), generator=generator) < 0.15:
                nodes.append((-1, 0))
                continue
            above = legal[int(torch.randint(0, len(legal), (), generator=generator))]
            token = int(torch.randint(0, VOCAB, (), generator=generator))
            if torch.rand((), generator=generator) < 0.6:
                token = right[depths[above]]
            depths[node] = depths[above] + 1
            nodes.append((above, token))
        return nodes

    requests = [Request(ids, SamplingParams(max_new_tokens=9, seed=seed)) for ids in prompts()[2:5]]
    engine = tree_engine(TARGET, guess, tokenizer=ToyTokenizer())
    assert_same(engine.generate_batch(requests), plain(TARGET, requests))


# -- fixed width -----------------------------------------------------------------------------------------------------


def test_fixed_width_is_the_same_text(oracle: tuple[str, list[Completion]]) -> None:
    verify, expected = oracle
    for width, gamma in ((6, 5), (8, 3)):
        engine = draft_engine(TARGET, DRAFTS["near"], gamma, verify=verify, width=width)
        assert_same(engine.generate_batch(mixed_requests()), expected)
    assert_same(plain(TARGET, mixed_requests(), verify=verify, width=8), expected)


# -- real models -----------------------------------------------------------------------------------------------------

REAL_VOCAB = 61


class NumberTokenizer(ToyTokenizer):
    """61 tokens, each a short word."""

    def __init__(self) -> None:
        super().__init__([f"w{i} ".encode() for i in range(REAL_VOCAB)], special=(2,))


def gap(oracle: CausalModel, request: Request, common: list[int], a: int, b: int) -> float:
    """How near tokens a and b are after a text, by log(p / E), recomputed by the oracle on the plain path."""
    ids = [*request.prompt, *common]  # type: ignore[list-item]
    logits = feed(Target(oracle, 1, 256), [ids], [0], head=True)
    assert logits is not None
    assert request.params.seed is not None
    processors = Processors(
        [request.params], vocab_size=REAL_VOCAB, end_token_ids=oracle.spec.eos_token_ids, device=torch.device("cpu")
    )
    root = Paths(torch.tensor([[ids[-1]]]), torch.ones(1, 1, 1, dtype=torch.bool))
    probs = logits_to_probs(logits, processors, History([ids], [len(request.prompt)]), root)[0, 0]
    score = (probs / variates(request.params.seed, len(ids) - 1, REAL_VOCAB)).log()
    return abs(float(score[a] - score[b]))


def assert_same_unless_tied(
    found: Sequence[Completion], expected: Sequence[Completion], requests: Sequence[Request], oracle: CausalModel
) -> None:
    for ours, theirs, request in zip(found, expected, requests, strict=True):
        if ours.token_ids == theirs.token_ids:
            assert outcome(ours) == outcome(theirs)
            continue
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)  # StopIteration: cut, which no tie explains
        near = gap(oracle, request, theirs.token_ids[:at], ours.token_ids[at], theirs.token_ids[at])
        assert near < 1e-4, f"first difference at {at}: gap {near}"


def real_requests(max_new_tokens: int = 14) -> list[Request]:
    generator = torch.Generator().manual_seed(9)
    made = []
    for params, ids in zip(mixed_params(max_new_tokens), prompts(), strict=True):
        text = torch.randint(3, REAL_VOCAB, (len(ids),), generator=generator).tolist()
        made.append(Request(text, params))
    made[3] = Request((list(made[3].prompt[:5]) * 6)[:30], made[3].params)
    return made


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    return {"target": tiny_module("qwen3"), "draft": tiny_module("qwen3", num_hidden_layers=1, hidden_size=32)}


def wrap(module: Any, implementation: str) -> CausalModel:
    return LeanModel.from_hf(module) if implementation == "lean" else TransformersModel(module)


@pytest.mark.parametrize("implementation", ["lean", "transformers"])
def test_real_models(implementation: str, modules: dict[str, Any]) -> None:
    target, draft = wrap(modules["target"], implementation), wrap(modules["draft"], implementation)
    requests, oracle, tokenizer = real_requests(), TransformersModel(modules["target"]), NumberTokenizer()
    expected = plain(target, requests, tokenizer=tokenizer)
    assert_same_unless_tied(plain(oracle, requests, tokenizer=tokenizer), expected, requests, oracle)
    for gamma, batch_size, part in ((1, 8, slice(None)), (3, 1, slice(1, 3)), (5, 8, slice(None)), (8, 1, slice(3, 5))):
        engine = draft_engine(target, draft, gamma, tokenizer=tokenizer)
        found = engine.generate_batch(requests[part], batch_size=batch_size)
        assert_same_unless_tied(found, expected[part], requests[part], oracle)
    found = draft_engine(target, target, 5, tokenizer=tokenizer).generate_batch(requests)
    assert_same_unless_tied(found, expected, requests, oracle)
    assert sum(c.num_accepted_tokens for c in found) >= 0.98 * sum(c.num_draft_tokens for c in found) > 0
    guesses = [
        Request(request.prompt, request.params, completion.token_ids)
        for request, completion in zip(requests, expected, strict=True)
    ]
    for config in ({"method": "ngram", "prompt_lookup_min": 1}, {"method": "prediction"}):
        for batch_size, part in ((1, slice(3, 5)), (8, slice(None))):
            engine = Engine(target, tokenizer, speculative=config)
            found = engine.generate_batch(guesses[part], batch_size=batch_size)
            assert_same_unless_tied(found, expected[part], requests[part], oracle)


def test_real_tree_with_side_branches(modules: dict[str, Any]) -> None:
    """KV of a real model moves, and the text stays."""
    target, tokenizer = LeanModel.from_hf(modules["target"]), NumberTokenizer()
    oracle = TransformersModel(modules["target"])
    requests = [Request(r.prompt, SamplingParams(max_new_tokens=20, seed=i)) for i, r in enumerate(real_requests())]
    expected = plain(target, requests, tokenizer=tokenizer)
    known = [list(r.prompt) + c.token_ids for r, c in zip(requests, expected, strict=True)]  # type: ignore[arg-type]

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        texts = [text for text in known if text[: len(ids)] == ids]
        nodes: list[tuple[int, int]] = []
        above = 0
        for token in texts[0][len(ids) : len(ids) + min(depth, 3)] if texts else []:
            nodes += [(above, (token + 1) % REAL_VOCAB), (above, token)]
            above = len(nodes)
        return nodes

    engine = tree_engine(target, guess, tokenizer=tokenizer)
    for batch_size in (1, 8):
        found = engine.generate_batch(requests, batch_size=batch_size)
        assert_same_unless_tied(found, expected, requests, oracle)
        assert sum(c.num_accepted_tokens for c in found) > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_width_gives_equal_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits behind every emitted token, not only tokens: plain and speculative passes run the same kernels."""
    target = LeanModel.from_hf(tiny_module("qwen3", dtype=dtype))
    draft = LeanModel.from_hf(tiny_module("qwen3", dtype=dtype, num_hidden_layers=1))
    request = real_requests()[5]
    params = SamplingParams(max_new_tokens=24, seed=3, ignore_eos=True)
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    differing = []
    forward = LeanModel.forward

    def spy(self: LeanModel, tokens: torch.Tensor, plan: Any, *given: Any) -> Any:
        out = forward(self, tokens, plan, *given)
        if self is target and out.logits is not None:
            text = current[0].history.ids[0] if current else []
            for node in range(plan.num_nodes):
                path = tokens[0, 1:][plan.ancestry[0, node, 1:]].tolist()
                if node and int(plan.positions[0, node]) == int(plan.length[0]):
                    continue  # padding
                key = (*text, *path)
                if key in seen and not torch.equal(seen[key], out.logits[0, node]):
                    differing.append(key)
                seen.setdefault(key, out.logits[0, node].clone())
        return out

    current: list[Any] = []
    import foretell.engine.batch as batch_module

    audited_step = batch_module.step

    def with_state(state: Any, *rest: Any, **options: Any) -> Any:
        current[:] = [state]
        return audited_step(state, *rest, **options)

    monkeypatch.setattr(batch_module, "step", with_state)
    monkeypatch.setattr(LeanModel, "forward", spy)
    expected = plain(target, [Request(request.prompt, params)], tokenizer=NumberTokenizer(), width=8)[0]
    assert len(seen) >= 24
    for gamma in (1, 3, 5, 7):
        current.clear()
        engine = draft_engine(target, draft, gamma, tokenizer=NumberTokenizer(), width=8)
        assert outcome(engine.generate(request.prompt, params)) == outcome(expected)
    assert not differing
    assert len(seen) > 30


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**63 - 1),
    gamma=st.integers(1, 8),
    blur=st.sampled_from([0.0, 0.2, 1.0]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.3, 5.0]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.6]),
    verify=st.sampled_from(VERIFIERS),
)
def test_equality_anywhere(
    seed: int, gamma: int, blur: float, temperature: float, top_k: int, top_p: float, verify: str
) -> None:
    target = TableLM(7, seed=seed % 1000, sharpness=1.5, dtype=torch.float64, eos_token_ids=(6,))
    draft = TableLM(7, seed=seed % 1000, sharpness=1.5, blur=blur, dtype=torch.float64)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    requests = [Request([seed % 5, i], SamplingParams(max_new_tokens=8 + i, **options)) for i in range(3)]
    tokenizer = ToyTokenizer([b"a", b"b", b"c", b"d", b"e", b"f", b"g"], special=(6,))
    expected = plain(target, requests, verify=verify, tokenizer=tokenizer)
    found = draft_engine(target, draft, gamma, verify=verify, tokenizer=tokenizer).generate_batch(requests)
    assert_same(found, expected)


def test_eos_is_in_play() -> None:
    """The table's end token does occur, else half of the above would be idle."""
    completions = plain(TARGET, [Request([i], SamplingParams(max_new_tokens=60, seed=i)) for i in range(8)])
    assert sum(completion.token_ids[-1] == EOS for completion in completions) >= 2
