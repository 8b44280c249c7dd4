"""What the engine's tests share: a toy tokenizer, mixed requests, drafters by name, and the audit of every step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from foretell import Completion, Engine, Request, SamplingParams, Service
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.config import Loader
from foretell.draft.forwarding import Forwarding
from foretell.draft.shapes import Shape
from foretell.engine import engine as engine_module
from foretell.engine.drafters.groups import GroupedDrafter
from foretell.engine.event import StepEvent
from foretell.engine.methods import Methods
from foretell.engine.state import State
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.model.target import CausalModel, Target
from tests.engine.integrity import check_state
from tests.model.table import TableLM

EOS = 22
PIECES = [
    b"a", b"b", b"ab", b" ", b"\n", b"ba", b"the", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"c",
    b"abc", b".", b"0", b"1", b"x", b"y", b"z", b"end", b"<eos>", b"!",
]  # fmt: skip
VOCAB = len(PIECES)


class ToyTokenizer:
    """Bytes by id, some of them halves of characters; encodes by the longest match."""

    def __init__(self, pieces: Sequence[bytes] = PIECES, special: Sequence[int] = (EOS,)) -> None:
        self.pieces = list(pieces)
        self.special = set(special)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [token for token in token_ids if not (skip_special_tokens and token in self.special)]
        return b"".join(self.pieces[token] for token in kept).decode("utf-8", errors="replace")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        rest, ids = text.encode(), []
        while rest:
            best = max(
                (i for i, piece in enumerate(self.pieces) if rest.startswith(piece)), key=lambda i: len(self.pieces[i])
            )
            ids.append(best)
            rest = rest[len(self.pieces[best]) :]
        return ids

    def get_vocab(self) -> Mapping[str, int]:
        return {f"{index}:{piece!r}": index for index, piece in enumerate(self.pieces)}


def table(seed: int = 1, **options: Any) -> TableLM:
    """A float64 table model: batch-invariant, so that equality is strict."""
    settings: dict[str, Any] = {
        "sharpness": 2.0,
        "eos_token_ids": (EOS,),
        "dtype": torch.float64,
        "num_layers": 1,
        **options,
    }
    return TableLM(VOCAB, seed=seed, **settings)


def sure(following: Callable[[tuple[int, ...]], int], context: int = 1) -> TableLM:
    """A table that is nearly sure of one next token, by a function of the last ones."""

    def probs(text: tuple[int, ...]) -> Tensor:
        out = torch.full((VOCAB,), 1e-6, dtype=torch.float64)
        out[following(text)] = 1.0
        return out / out.sum()

    return TableLM(VOCAB, probs=probs, context=context, dtype=torch.float64, num_layers=1)


def cycle() -> TableLM:
    """A target that counts to twelve again and again."""
    return sure(lambda text: (text[-1] + 1) % 12)


def table_engine(speculative: dict[str, Any], *, blur: float = 0.5, width: int = 0, **options: Any) -> Engine:
    """Of table models: every draft model is a table that nearly knows the target's."""

    class TableMethods(Methods):
        @property
        def loader(self) -> Loader:
            def load(name: str, weights: str = "auto", *, checked: bool = True) -> CausalModel:
                return table(2, blur=blur)

            return Loader(self.target, load, lambda name: None)  # a table has no tokenizer

    with patch.object(engine_module, "Methods", TableMethods):
        return Engine(table(1, **options), ToyTokenizer(), speculative=speculative, width=width)


def adversary(target: TableLM) -> TableLM:
    """A draft model that prefers what the target never says."""

    def probs(context: tuple[int, ...]) -> Tensor:
        weight = 1.0 / (target.probs_after(context) + 1e-3)
        return weight / weight.sum()

    return TableLM(VOCAB, probs=probs, context=target.context, dtype=torch.float64, num_layers=1)


def restless(ids: Tensor, logits: Tensor) -> Tensor:
    """A user's processor that reads prefix and path: never the same token twice, and it favours a running sum."""
    out = logits.clone()
    out[ids[-1]] = -torch.inf
    out[int(ids.sum()) % len(logits)] += 1.5
    return out


def foresight(model: CausalModel, *, drafter: str = "draft_model", reads_law: bool = False) -> AcceptanceHead:
    """A random acceptance head on a draft model's hidden states: sure of some guesses, doubtful of others."""
    spec = model.spec
    config = AcceptanceHeadConfig(
        spec.hidden_size, spec.vocab_size, 2, normalize=True, drafter=drafter, reads_law=reads_law
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        head = AcceptanceHead(config)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
    head.shift.fill_(1.5)
    return head


def prompts(vocab_size: int = VOCAB) -> list[list[int]]:
    """Eight ragged prompts, the shortest of one token, one of them repetitive."""
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 2, 9, 30, 5, 17, 3, 70)
    made = [torch.randint(0, min(vocab_size, EOS), (length,), generator=generator).tolist() for length in lengths]
    made[3] = (made[3][:5] * 6)[:30]
    return made


def mixed_params(max_new_tokens: int = 18) -> list[SamplingParams]:
    """One of each kind: temperatures, filters, penalties, biases, bans, endings, a processor."""
    base = SamplingParams(max_new_tokens=max_new_tokens)
    return [
        replace(base, seed=1, max_new_tokens=max_new_tokens + 9, ignore_eos=True),
        replace(base, seed=2, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
        replace(base, seed=3, temperature=0.5, top_k=5, presence_penalty=0.5),
        replace(base, seed=4, temperature=1.3, top_p=0.8, frequency_penalty=0.3),
        replace(base, seed=5, min_p=0.1, logit_bias={3: 2.0, 4: -1.5}, banned_token_ids=(0, 5)),
        replace(base, seed=6, min_new_tokens=12, stop_token_ids=(1, 2, 6)),
        replace(base, seed=7, stop=("ab", "the", "zz")),
        replace(base, seed=8, logits_processor=restless, temperature=0.9, max_new_tokens=max(1, max_new_tokens - 7)),
    ]


def mixed_requests(max_new_tokens: int = 18) -> list[Request]:
    """Eight requests, no two alike; batches of them drop rows at many different steps."""
    return [Request(ids, params) for ids, params in zip(prompts(), mixed_params(max_new_tokens), strict=True)]


def plain(
    model: CausalModel, requests: Sequence[Request], *, verify: str = "coupled", tokenizer: Any = None, width: int = 0
) -> list[Completion]:
    """The oracle: N = 1, one request at a time."""
    engine = Engine(model, tokenizer or ToyTokenizer(), speculative={"method": "none", "verify": verify}, width=width)
    return [engine.generate(request.prompt, request.params) for request in requests]


def outcome(completion: Completion) -> tuple[list[int], str, str | None]:
    """What must not depend on how it was guessed."""
    return completion.token_ids, completion.text, completion.finish_reason


def outcomes(completions: Sequence[Completion]) -> list[tuple[list[int], str, str | None]]:
    """The outcome of each."""
    return list(map(outcome, completions))


def draft_engine(
    target: CausalModel, draft: CausalModel, gamma: int, *, verify: str = "coupled", **options: Any
) -> Engine:
    """An engine whose draft model is already in memory."""
    config = {"method": "draft_model", "num_speculative_tokens": gamma, "verify": verify}
    return Engine(
        target,
        options.pop("tokenizer", None) or ToyTokenizer(),
        speculative=config,
        method=DraftModel(draft),
        **options,
    )


@contextmanager
def started(service: Service) -> Iterator[Service]:
    """A service that runs until the block ends."""
    service.start()
    try:
        yield service
    finally:
        service.close()


# -- trees of any shape ----------------------------------------------------------------------------------------------

Guess = Callable[[list[int], int], list[tuple[int, int]]]
"""(text of a row, deepest depth) -> nodes as (parent node, token), numbered from 1 in this order; parent -1 is padding."""


@dataclass
class TreeMethod(Method):
    """A drafter of arbitrary FIXED trees, by a function of the text."""

    guess: Guess
    name = "tree"
    capabilities = Capabilities("test double", draws=False)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return TreeDrafter(self.guess)


class TreeDrafter(Drafter):
    def __init__(self, guess: Guess) -> None:
        self.guess = guess

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        depths = [min(shape.depth, depth_limit) for depth_limit in context.depth_limit]
        rows = [self.guess(ids, depth) for ids, depth in zip(context.history.ids, depths, strict=True)]
        width = 1 + max(map(len, rows))
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        parent = torch.full_like(tokens, -1)
        tokens[:, 0] = context.pending
        for row, nodes in enumerate(rows):
            for node, (above, token) in enumerate(nodes, start=1):
                parent[row, node], tokens[row, node] = above, token
        return TokenTree(tokens, parent, torch.zeros_like(tokens))


def tree_engine(
    target: CausalModel, guess: Guess, depth: int = 12, *, verify: str = "coupled", **options: Any
) -> Engine:
    """An engine that guesses trees of a function of the text, so deep at most."""
    config = {"method": "none", "num_speculative_tokens": depth, "verify": verify}
    return Engine(target, speculative=config, method=TreeMethod(guess), **options)


# -- invariants ------------------------------------------------------------------------------------------------------


def own(drafter: Drafter) -> Drafter:
    """The drafter of a batch whose rows share one."""
    if isinstance(drafter, GroupedDrafter) and len(drafter.groups) == 1:
        drafter = drafter.groups[0].drafter
    while isinstance(drafter, Forwarding) and drafter.inner is not None:
        drafter = drafter.inner
    return drafter


def audit(state: State, target: Target, drafter: Drafter, report: StepEvent) -> None:
    """After every step: integrity, a legal tree, a table model's cache (exactly the text), the draft model's lag."""
    check_state(state)
    report.commit.tree.check()
    for row, path, tokens in zip(report.rows, report.commit.path, report.commit.tokens, strict=True):
        assert len(path) == len(tokens) >= 1 or ((row.error is not None or report.num_before) and not tokens)
    audit_table(target, state, state.lengths)
    if isinstance(drafter, ModelDrafter) and not any(row.error for row in report.rows):  # a failed row leaves at once
        assert all(0 <= filled <= length for filled, length in zip(drafter.filled, state.lengths, strict=True))
        audit_table(drafter.target, state, drafter.filled)
    for row in state.rows:
        audit_figures(row)


def audit_table(target: Target, state: State, filled: Sequence[int]) -> None:
    """A table model keeps ids and positions in its cache: below ``filled`` they are the text itself."""
    if not isinstance(target.model, TableLM):
        return
    for keys, values in zip(target.cache.keys, target.cache.values, strict=True):
        for row, (ids, count) in enumerate(zip(state.history.ids, filled, strict=True)):
            vocab_size = target.spec.vocab_size
            assert keys[row, 0, :count, 0].tolist() == [i if i < vocab_size else vocab_size - 1 for i in ids[:count]]
            assert values[row, 0, :count, 0].tolist() == list(range(count))


def audit_figures(row: Any) -> None:
    """Counters of one row agree with each other."""
    assert sum(row.accepted_per_pos) == row.num_accepted_tokens <= row.num_draft_tokens
    assert len(row.accepted_per_pos) == len(row.drafted_per_pos)
    assert all(a <= d for a, d in zip(row.accepted_per_pos, row.drafted_per_pos, strict=True))
    assert row.drafted_per_pos == sorted(row.drafted_per_pos, reverse=True)
    assert row.accepted_per_pos == sorted(row.accepted_per_pos, reverse=True)
    emitted = row.num_steps + row.num_accepted_tokens  # unless the last path was cut
    assert len(row.token_ids) == emitted or (row.finish_reason is not None and len(row.token_ids) < emitted)
    assert [piece.token_id for piece in row.pieces] == row.token_ids
