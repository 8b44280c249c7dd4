"""Draft models of another vocabulary: the text is the target's own, with any shape, at any temperature, in batches and
services; and the laws, enumerated."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Completion, Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.core.errors import ConfigError, VocabularyMismatchError
from foretell.core.noise import Noise
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.draft.base import Context, Drafter, Method
from foretell.draft.shapes import Shape, parse_shape
from foretell.engine.event import StepEvent
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.draft_model.vocabulary.spelling import Translation
from foretell.methods.draft_model.vocabulary.tli import TLIDrafter
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import CausalModel, Target
from foretell.service.memory import bytes_per_token
from foretell.verify import parse_verifier
from tests.engine.harness import mixed_params, outcome, own, started
from tests.engine.test_rejection import ALPHA, p_value, toy
from tests.methods.draft_model.vocabularies import KINDS, TEXT, byte_level, speaker, spelling
from tests.model.table import TableLM
from tests.model.tiny import tiny_module
from tests.service.test_service import Mailbox
from tests.verify.enumerate import Case, Drafts, Tables, emitted_joint, error, target_joint

TOKENIZERS: dict[str, Any] = {name: kind() for name, kind in KINDS.items()}
PAIRS = list(itertools.permutations(KINDS, 2))
TARGETS = {name: speaker(tokenizer, seed=1, sure=0.75) for name, tokenizer in TOKENIZERS.items()}
DRAFTS = {name: speaker(tokenizer, seed=2) for name, tokenizer in TOKENIZERS.items()}


def engine(target: str, draft: str, vocabulary: str = "tli", **keys: Any) -> Engine:
    options = {key: keys.pop(key) for key in ("width", "prefix_memory_gib") if key in keys}
    config = {
        "method": "draft_model", "model": DRAFTS[draft].spec.name, "vocabulary": vocabulary, "num_speculative_tokens": 4,
        **keys,
    }  # fmt: skip
    return Engine(
        TARGETS[target], TOKENIZERS[target], speculative=config, draft=DRAFTS[draft], draft_tokenizer=TOKENIZERS[draft],
        **options,
    )  # fmt: skip


def prompts(target: str) -> list[list[int]]:
    """Eight ragged ones: whole texts, cut words and characters, random tokens, a special token in the middle."""
    tokenizer, rng = TOKENIZERS[target], random.Random(3)
    ordinary = sorted(spelling(tokenizer).by_bytes.values())
    whole = tokenizer.encode(TEXT, add_special_tokens=False)
    return [
        whole[:1], whole[:9], whole * 3, [rng.choice(ordinary) for _ in range(12)], tokenizer.encode(TEXT[:11]),
        [*whole, tokenizer.convert_tokens_to_ids(tokenizer.all_special_tokens[0]), *whole[:4]],
        spelling(tokenizer).encode(TEXT.encode()[:-6]), [rng.choice(ordinary) for _ in range(70)],
    ]  # fmt: skip


def requests(target: str) -> list[Request]:
    made = mixed_params(26)
    made[6] = replace(made[6], stop=("sat", "ate", "zz"))
    return [Request(ids, params) for ids, params in zip(prompts(target), made, strict=True)]


def solo(target: str, verify: str = "coupled") -> list[Completion]:
    plain = Engine(TARGETS[target], TOKENIZERS[target], speculative={"method": "none", "verify": verify})
    return [plain.generate(request.prompt, request.params) for request in requests(target)]


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], list[Completion]]:
    return {(target, verify): solo(target, verify) for target in KINDS for verify in ("coupled", "exact")}


# -- the same text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("verify", ["coupled", "exact"])
def test_the_text_is_the_targets_own(
    pair: tuple[str, str], verify: str, plain: dict[tuple[str, str], list[Completion]]
) -> None:
    """At temperatures 0 to 1.3, with penalties, filters and a user's processor, alone and in ragged batches."""
    found = engine(*pair, verify=verify)
    expected = [outcome(completion) for completion in plain[pair[0], verify]]
    asked = requests(pair[0])
    together = found.generate_batch(asked, batch_size=5)
    assert [outcome(completion) for completion in together] == expected
    assert [outcome(found.generate(request.prompt, request.params)) for request in asked[:3]] == expected[:3]
    assert sum(completion.num_accepted_tokens for completion in together) > 15


@pytest.mark.parametrize(
    "shape",
    ["chain", "adaptive/threshold=0.3", "static/branching=2x2x1", "sequoia/size=7", "dyspec/size=7", "eagle2/size=7"],
)
@pytest.mark.parametrize("pair", [("words", "halves"), ("pieces", "words")])
def test_every_shape_over_shared_tokens(
    pair: tuple[str, str], shape: str, plain: dict[tuple[str, str], list[Completion]]
) -> None:
    """Side branches move KV of the draft's slots, whose numbers are not the target's."""
    found = engine(*pair, "tli", shape=shape).generate_batch(requests(pair[0]), batch_size=3)
    assert [outcome(c) for c in found] == [outcome(c) for c in plain[pair[0], "coupled"]]
    assert sum(c.num_accepted_tokens for c in found) > 15


@pytest.mark.parametrize(
    ("shape", "verify"),
    [
        ("chain", "rejection"), ("chain", "block"), ("static/branching=2x2x1", "traversal"),
        ("static/branching=2x1", "k_seq"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pair", [("words", "halves"), ("pieces", "words")])
def test_under_a_rule_that_reads_q_a_row_of_a_batch_has_its_solo_text(
    pair: tuple[str, str], shape: str, verify: str
) -> None:
    """There the text is a function of every guess and of its q: one that was made from another row's text shows."""
    found = engine(*pair, shape=shape, verify=verify)
    asked = requests(pair[0])
    together = found.generate_batch(asked, batch_size=5)
    assert [outcome(one) for one in together] == [outcome(found.generate(one.prompt, one.params)) for one in asked]
    assert sum(one.num_accepted_tokens for one in together) > 15


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After every step: below ``filled`` the draft's cache holds exactly the text in its tokens. How many, of each row."""
    from foretell.engine import batch as batch_module

    seen: list[int] = []
    original = batch_module.step

    def watched(state: Any, target: Target, drafter: Any, *rest: Any, **more: Any) -> StepEvent:
        report = original(state, target, drafter, *rest, **more)
        mine = own(drafter)
        if isinstance(mine, TLIDrafter):
            mine.texts(state)  # after the step: what it will read next
            assert mine.num_known == [len(ids) for ids in state.history.ids]
            for text, ids in zip(mine.own, state.history.ids, strict=True):
                known = [token for token, its in enumerate(mine.translation.draft_of) if its >= 0]
                assert said(mine.translation.draft, text) == said(mine.translation.target, ids, known)
            assert isinstance(mine.target.model, TableLM)
            for keys, values in zip(mine.target.cache.keys, mine.target.cache.values, strict=True):
                for row, (text, filled) in enumerate(zip(mine.own, mine.filled, strict=True)):
                    assert filled < len(text)
                    assert keys[row, 0, :filled, 0].tolist() == text[:filled]
                    assert values[row, 0, :filled, 0].tolist() == list(range(filled))
                    seen.append(filled)
        return report

    monkeypatch.setattr(batch_module, "step", watched)
    return seen


def said(spelling: Any, ids: Sequence[int], known: Sequence[int] | None = None) -> bytes:
    """The bytes of a text without the space that some tokenizers begin with, and without the special tokens that the other
    vocabulary has too (known; None: all): it spells the rest."""
    left_out = {token for token in spelling.special if known is None or token in known}
    return b"".join(spelling.spell(token) for token in ids if token not in left_out).lstrip(b" ")


@pytest.mark.parametrize("pair", PAIRS)
def test_the_drafts_cache_is_its_text(pair: tuple[str, str], audit: list[int]) -> None:
    engine(*pair, shape="static/branching=2x2x1").generate_batch(requests(pair[0]), batch_size=4)
    assert len(audit) > 50
    assert max(audit) > 60


def test_a_service_gives_everybody_their_solo_text(plain: dict[tuple[str, str], list[Completion]]) -> None:
    """Rows come and go, drafts are opened late, catch up, and are closed when rows are suspended for want of memory."""
    served = engine("words", "halves")
    memory = 192 * bytes_per_token(served.model, [served.method]) / 2**30
    made = Service(served, ServiceOptions(speculation="on", max_num_seqs=6, max_model_len=128, kv_memory_gib=memory))
    with started(made):
        box, asked = Mailbox(), requests("words")
        for index, request in enumerate([*asked, *asked]):
            made.submit(Submission(f"r{index}", request.prompt, request.params), box.hear)
        for index, completion in enumerate([*plain["words", "coupled"]] * 2):
            last = box.last(f"r{index}")
            pieces = [piece.token_id for update in box.updates[f"r{index}"] for piece in update.pieces]
            assert pieces == completion.token_ids
            assert last.completion.finish_reason == completion.finish_reason
        assert made.snapshot().num_preemptions > 0


def test_a_draft_whose_context_is_at_its_end(plain: dict[tuple[str, str], list[Completion]]) -> None:
    """Its texts have more tokens than the target's: it stops guessing, and the text goes on."""
    tokenizer = byte_level([], special=("<eos>",))  # single bytes
    draft = speaker(tokenizer, seed=2)
    for most in (4096, 40):
        draft.spec = replace(draft.spec, max_positions=most)
        config = {"method": "draft_model", "model": draft.spec.name, "vocabulary": "tli"}
        found = Engine(
            TARGETS["words"], TOKENIZERS["words"], speculative=config, draft=draft, draft_tokenizer=tokenizer
        ).generate_batch(requests("words"), batch_size=4)
        assert [outcome(c) for c in found] == [outcome(c) for c in plain["words", "coupled"]]


def test_a_processor_that_lifts_a_token_the_draft_does_not_have(audit: list[int]) -> None:
    """The draft proposes it all the same (its law has nothing else), reads it as several tokens, and the text is right."""
    target = spelling(TOKENIZERS["words"])
    alone, also = target.by_bytes[b" sat"], target.by_bytes[b"a"]

    def lift(ids: Tensor, logits: Tensor) -> Tensor:
        out = torch.full_like(logits, -torch.inf)
        out[alone if len(ids) % 3 else also] = 0.0
        return out

    request = Request([also] * 3, SamplingParams(max_new_tokens=20, seed=1, logits_processor=lift, ignore_eos=True))
    found = engine("words", "halves", "tli")
    assert alone not in found.method.translation.pairs[0].tolist()  # type: ignore[attr-defined]
    plain = Engine(TARGETS["words"], TOKENIZERS["words"]).generate(request.prompt, request.params)
    completion = found.generate(request.prompt, request.params)
    assert completion.token_ids == plain.token_ids
    assert completion.num_accepted_tokens > 5
    assert max(audit) > 25


# -- laws, enumerated ------------------------------------------------------------------------------------------------


def small() -> tuple[Translation, TableLM, TableLM]:
    """Five target tokens "a", "b", " ", "ab", " a" beside "b", "a", " ", "ba", "aa": merges across every boundary."""
    ours = byte_level([(b"a", b"b"), (b" ", b"a")], alphabet=b"ab ")
    theirs = byte_level([(b"b", b"a"), (b"a", b"a")], alphabet=b"ba ")
    sizes = [len(ours), len(theirs)]
    models = [
        TableLM(size, seed=seed, context=3, dtype=torch.float64, num_layers=1, eos_token_ids=(0,))
        for size, seed in zip(sizes, (1, 2), strict=True)
    ]
    from foretell.methods.draft_model.vocabulary.spelling import Spelling

    spellings = [
        Spelling(tokenizer, size, name="small", end_token_ids=(0,))
        for tokenizer, size in zip((ours, theirs), sizes, strict=True)
    ]
    return Translation(*spellings), models[0], models[1]


def context_of(ids: list[int], size: int, depth: int) -> Context:
    """One row, temperature 1."""
    processors = Processors([SamplingParams()], vocab_size=size, end_token_ids=(0,), device=torch.device("cpu"))
    return Context(
        history=History([list(ids)], [len(ids)]),
        processors=processors,
        length=torch.tensor([len(ids) - 1]),
        lengths=[len(ids) - 1],
        pending=torch.tensor([ids[-1]]),
        predictions=[[]],
        depth_limit=[depth],
    )


def noise_of(ids: list[int], seed: int = 5) -> Noise:
    return Noise(torch.tensor([seed]), torch.tensor([len(ids)]))


PROMPTS = [[1], [1, 2, 4], [5, 4, 1, 3], [4, 4, 2, 1, 1]]


def restricted(between: Translation, draft: CausalModel, ids: list[int]) -> Tensor:
    """By hand: the draft's distribution after the text, of the tokens whose bytes the target has too, normalised."""
    probs = draft.probs_after(tuple(between.text(ids)[-3:]))  # type: ignore[attr-defined]
    out = torch.zeros(len(between.target.bytes), dtype=torch.float64)
    for token, piece in enumerate(between.target.bytes):
        for other, bytes_ in enumerate(between.draft.bytes):
            if piece == bytes_ and (piece is not None or (token, other) == (0, 0)):
                out[token] = probs[other]
    return out / out.sum()


def laws(prompt: list[int], depth: int) -> tuple[Tables, Tables]:
    """Target and draft laws of all contexts after a prompt, the draft's as the drafter itself reports them; and the same
    with q's columns turned by one."""
    between, target, draft = small()
    size = target.spec.vocab_size
    p: list[Tensor] = []
    q: list[Tensor] = []
    for d in range(depth):
        rows_p, rows_q = [], []
        for path in itertools.product(range(size), repeat=d):
            ids = [*prompt, *path]
            with torch.inference_mode():
                context = context_of(ids, size, 1)
                tree = TLIDrafter(draft, between, context, 64).propose(
                    context, parse_shape("chain", 1), DrawMode.IID, noise_of(ids)
                )
            assert tree.drawn_by[0, 1] == DrawnBy.IID
            rows_q.append(tree.q[0, 0].clone())
            rows_p.append(target.probs_after(tuple(ids[-3:])))
        p.append(torch.stack(rows_p))
        q.append(torch.stack(rows_q))
    return Tables(size, p, q), Tables(size, p, [x.roll(1, -1) for x in q])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_q_is_the_restricted_law(prompt: list[int]) -> None:
    """What a chain reports, node by node: the draft's own distribution of the shared tokens, after the path so far."""
    between, target, draft = small()
    size = target.spec.vocab_size
    with torch.inference_mode():
        context = context_of(prompt, size, 3)
        drafter = TLIDrafter(draft, between, context, 64)
        tree = drafter.propose(context, parse_shape("chain", 3), DrawMode.IID, noise_of(prompt))
    tokens = tree.tokens[0].tolist()
    base = between.text(prompt)
    for node in range(3):
        text = [*base, *(between.draft_of[token] for token in tokens[1 : node + 1])]
        probs = draft.probs_after(tuple(text[-3:]))
        wanted = torch.zeros(size, dtype=torch.float64)
        ours, theirs = between.pairs
        wanted[ours] = probs[theirs]
        assert torch.allclose(tree.q[0, node], wanted / wanted.sum(), atol=1e-12)
        assert tree.q[0, node, tokens[node + 1]] > 0
    assert torch.allclose(tree.q[0, 0], restricted(between, draft, prompt), atol=1e-12)
    assert len(between.pairs[0]) == 4, "the end, a, b and the space"


@pytest.mark.parametrize("verify", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_the_law_over_shared_tokens(verify: str, prompt: list[int]) -> None:
    """Exactly the target's joint distribution of three tokens, from all draws of two guesses."""
    right, turned = laws(prompt, 3)
    case = Case((-1, 0, 1), (DrawnBy.FIXED, DrawnBy.IID, DrawnBy.IID))
    assert error(parse_verifier(verify), case, right) < 1e-12
    assert error(parse_verifier(verify), case, turned) < 1e-12, "any q is right, as long as it is the one drawn from"


def test_a_q_of_other_ids_is_caught_by_the_same_enumeration() -> None:
    """The classic error: tokens are drawn by one order of the shared ids, and q is reported in another."""
    right, turned = laws(PROMPTS[1], 3)
    case = Case((-1, 0), (DrawnBy.FIXED, DrawnBy.IID))
    from tests.verify.enumerate import drafts

    out = drafts(case, right)
    wrong = drafts(case, turned)
    lied = Drafts(replace(out.tree, q=wrong.tree.q[:1].expand_as(out.tree.q)), out.p, out.code, out.depth, out.weight)  # type: ignore[index,arg-type]
    found = emitted_joint(parse_verifier("rejection"), lied, right)
    assert float((found - target_joint(right, 2)).abs().max()) > 1e-3


class Crossed(Method):
    """A draft model of the small vocabularies, crossed."""

    name = "draft_model"
    capabilities = DraftModel.capabilities

    def __init__(self, drafter: type[TLIDrafter]) -> None:
        self.drafter = drafter
        self.between, _, self.model = small()

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return self.drafter(self.model, self.between, context, capacity)


class Turned(TLIDrafter):
    """The fault: draws by one order of the shared ids, and reports q in another."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, draws, noise)
        return tree if tree.q is None else replace(tree, q=tree.q.roll(1, -1))


def test_the_law_of_whole_texts_under_rejection() -> None:
    """Through the engine, over several steps: what was kept is read again in other tokens, and guessed after."""
    assert p_value(toy(6, seed=3), Crossed(TLIDrafter), 3, samples=1000) > ALPHA


def test_control_a_turned_q_is_found_in_whole_texts() -> None:
    assert p_value(toy(6, seed=3), Crossed(Turned), 3, samples=1000) < ALPHA


# -- the choice ------------------------------------------------------------------------------------------------------


def test_the_choice_is_named() -> None:
    found = engine("words", "halves", "auto")
    head = found.resolved()["head"]
    assert head.startswith("tli: another vocabulary, ")
    assert "head" not in engine("words", "words", "auto").resolved(), "one vocabulary: nothing is crossed"
    with pytest.raises(VocabularyMismatchError, match=r"first differences: id .* vocabulary 'tli' "):
        engine("words", "halves", "same")


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary = 'tly' must be one of auto, same, tli; did you mean 'tli'"):
        engine("words", "halves", "tly")
    with pytest.raises(
        ConfigError, match=r"one is missing: give tokenizer=\.\.\. \(of the target\) and draft_tokenizer="
    ):
        Engine(
            TARGETS["words"],
            TOKENIZERS["words"],
            speculative={"model": DRAFTS["halves"].spec.name, "vocabulary": "tli"},
            draft=DRAFTS["halves"],
        )
    strange = byte_level([], alphabet=b"ab \n")
    model = speaker(strange, seed=4)
    with pytest.raises(VocabularyMismatchError, match="tokens in common, too few to guess with"):
        Engine(
            TARGETS["words"], TOKENIZERS["words"], speculative={"model": model.spec.name}, draft=model,
            draft_tokenizer=strange,
        )  # fmt: skip


def test_same_tokens_crossed_all_the_same(plain: dict[tuple[str, str], list[Completion]]) -> None:
    """Asked for by name, a crossing runs between equal vocabularies too, and finds what no crossing finds."""
    direct = engine("words", "words", "same").generate_batch(requests("words"))
    crossed = engine("words", "words", "tli").generate_batch(requests("words"))
    assert [outcome(c) for c in crossed] == [outcome(c) for c in direct]
    assert sum(c.num_accepted_tokens for c in crossed) >= 0.8 * sum(c.num_accepted_tokens for c in direct) > 0


def test_rows_stop_at_the_draft_s_learned_positions(plain: dict[tuple[str, str], list[Completion]]) -> None:
    """GPT-2 has no position beyond its context: in a batch a row near it was given as many as others, and all failed."""
    tokenizer = TOKENIZERS["halves"]
    draft = TransformersModel(tiny_module("gpt2", vocab_size=len(tokenizer), n_positions=48))
    config = {"method": "draft_model", "model": draft.spec.name, "vocabulary": "tli", "num_speculative_tokens": 6}
    found = Engine(
        TARGETS["words"], TOKENIZERS["words"], speculative=config, draft=draft, draft_tokenizer=tokenizer,
        drafter_errors="raise",
    ).generate_batch(requests("words"), batch_size=8)  # fmt: skip
    assert [outcome(c) for c in found] == [outcome(c) for c in plain["words", "coupled"]]
    assert sum(c.num_draft_tokens for c in found) > 15
