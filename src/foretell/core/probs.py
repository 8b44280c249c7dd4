"""From logits to probabilities: one function for plain decoding, target and drafter, for every node of a tree.

Order: repetition, presence and frequency penalties; logit bias; banned ids; min_new_tokens; the user's processor;
temperature; top-k; top-p; min-p, the last three one after the other, each on what the one before left (as transformers
does). Node i's distribution is that of the token *after* node i: its processors see the prefix and the path down to node i.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams, expected_of
from foretell.core.tree import valid_nodes
from foretell.core.upload import sent, tensor_on
from foretell.kernels.small import Warp, race_library

_LARGEST = torch.finfo(torch.float32).max
_COLUMNS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias")
_ALWAYS = ("greedy", "cut", "inverse_temperature")
_MADE_LATER = ("scales", "top_ks", "warp_table")
"""Tensors of ``Processors``: those that may be None, those that never are, those made when first asked for."""


def _inverse(temperature: float) -> float:
    """1 / temperature, as a float32 neither 0 nor infinite."""
    return 1.0 / min(max(temperature, 1e-30), 1e30)


@dataclass
class History:
    """The text so far as processors see it: B rows, the pending token included.

    The engine appends to the lists between steps: copy a list to keep it beyond a call. Only the engine writes to them.
    """

    ids: list[list[int]]  # prompt and output of each row
    num_prompt: list[int]  # how many of them are the prompt
    of: "tuple[History, int] | None" = field(
        default=None, compare=False
    )  # whose rows from this one on begin with these
    _tensors: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def tensor(self, row: int, device: torch.device) -> Tensor:
        """[L] int64 of a row's ids, made once for all nodes and steps: that of a long prompt takes half a millisecond."""
        ids = self.ids[row]
        if self.of is not None:
            return self.of[0].tensor(self.of[1] + row, device)[: len(ids)]
        known = self._tensors.get(row)
        if known is None or len(known) < len(ids):
            more = tensor_on(device, ids if known is None else ids[len(known) :], torch.int64)
            known = self._tensors[row] = more if known is None else torch.cat([known, more])
        return known[: len(ids)]

    def num_output(self) -> list[int]:
        """Emitted tokens of each row."""
        return [len(ids) - prompt for ids, prompt in zip(self.ids, self.num_prompt, strict=True)]


@dataclass(frozen=True)
class Paths:
    """Which nodes lie on the way to each of the n nodes whose distribution is wanted; node 0 is in the history already."""

    tokens: Tensor  # [B, N] int64
    ancestry: Tensor  # [B, n, N] bool, a node included in its own path
    parent: Tensor | None = None  # [B, n], where some nodes may be padding: no processor is called for those
    is_tree: bool = False  # the n nodes are the N of a tree in its order, and parent is that tree's

    @property
    def valid(self) -> Tensor:
        """[B, n] bool: the nodes whose distribution is used."""
        if self.parent is None:
            return torch.ones(self.ancestry.shape[:2], dtype=torch.bool)
        return valid_nodes(self.parent)


class Processors:
    """The parameters of B rows, stacked once. Immutable; ``logits_to_probs`` does the work."""

    def __init__(
        self, params: Sequence[SamplingParams], *, vocab_size: int, end_token_ids: Sequence[int], device: torch.device
    ) -> None:
        """end_token_ids are the model's own; vocab_size is V, the columns of the logits."""
        self.params = tuple(params)
        self.end_token_ids = tuple(end_token_ids)
        self.vocab_size = vocab_size
        self.device = device

        def column(name: str) -> Tensor | None:
            """[B, 1, 1] float32, or None where every row has the neutral value."""
            # An infinity times the 0 of a token that was not written would be NaN.
            values = [min(max(float(getattr(row, name)), -_LARGEST), _LARGEST) for row in params]
            neutral = float(getattr(SamplingParams, name))
            if all(value == neutral for value in values):
                return None
            return tensor_on(device, values, torch.float32)[:, None, None]

        self.temperature, self.top_p, self.min_p = column("temperature"), column("top_p"), column("min_p")
        self.top_k = [row.top_k if 0 < row.top_k < vocab_size else 0 for row in params]
        self.greedy = tensor_on(device, [row.temperature == 0 for row in params])[:, None, None]
        # Rows that top-p or min-p may cut, [B, 1, 1]: what is left of them is scaled to 1, the others are not touched.
        cut = [row.top_p < 1 or row.min_p > 0 for row in params]
        self.cut, self.cuts_all = tensor_on(device, cut)[:, None, None], all(cut)
        # Greedy rows are overwritten later: any finite factor will do.
        inverse = [_inverse(row.temperature) if row.temperature else 1.0 for row in params]
        self.inverse_temperature = tensor_on(device, inverse, torch.float32)[:, None, None]
        self.num_greedy = sum(row.temperature == 0 for row in params)
        self.repetition, self.presence = column("repetition_penalty"), column("presence_penalty")
        self.frequency = column("frequency_penalty")
        self.bias = self._bias(device)  # [B, 1, V] or None; -inf for banned ids
        # An id outside the vocabulary can never be emitted.
        self.end_ids = [
            sorted(token for token in {*end_token_ids, *row.stop_token_ids} if 0 <= token < vocab_size)
            for row in params
        ]
        self.reads_history = any(row.reads_history for row in params)
        self._parts: dict[tuple[int, int], Processors] = {}

    def expected(self, history: History, asked: Sequence[bool | int]) -> list[Sequence[int]]:
        """[B] tokens that are expected after the text of each row that is asked: see ``expected_of``."""
        rows = zip(self.params, history.ids, asked, strict=True)
        return [expected_of(params.logits_processor, ids) if ask else () for params, ids, ask in rows]

    def part(self, start: int, stop: int) -> "Processors":
        """Those of rows [start, stop); made once."""
        if (start, stop) == (0, len(self.params)):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self.keep(range(start, stop))
        return self._parts[start, stop]

    @cached_property
    def scales(self) -> Tensor:
        """[B] float32 inverse temperature, neither 0 nor infinite, and 0 for greedy rows: as C's draws read it."""
        return torch.where(self.greedy, 0.0, self.inverse_temperature).flatten()

    @cached_property
    def top_ks(self) -> Tensor | None:
        """[B] int64 top-k, 0 where a row has none; None where no row has one."""
        return tensor_on(self.device, self.top_k) if any(self.top_k) else None

    @cached_property
    def warps(self) -> "ctypes.Array[Warp]":
        """[B] each row's temperature and filters, as ``kernels/race_logits.h`` reads them."""
        made = (Warp * len(self.params))()
        for warp, params, top_k in zip(made, self.params, self.top_k, strict=True):
            warp.inverse = _inverse(params.temperature) if params.temperature else 0.0
            warp.top_p, warp.min_p, warp.top_k = params.top_p, params.min_p, top_k
        return made

    @cached_property
    def all_ends(self) -> tuple[int, ...]:
        """``end_ids`` of all rows."""
        return tuple({token for ids in self.end_ids for token in ids})

    @cached_property
    def warp_table(self) -> Tensor:
        """[B, 4] float32: ``warps``, as the draws of an accelerator read them."""
        rows = [(warp.inverse, warp.top_p, warp.min_p, warp.top_k) for warp in self.warps]
        return tensor_on(self.device, rows, torch.float32)

    @cached_property
    def softened(self) -> "Processors":
        """The same, but rows at temperature 0 at temperature 1 and without top-k, top-p and min-p, which do not affect
        a greedy choice: a drafter ranks second and third best tokens by it. Self where no row is greedy."""
        if not self.num_greedy:
            return self
        params = [
            replace(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if row.temperature == 0 else row
            for row in self.params
        ]
        return Processors(params, vocab_size=self.vocab_size, end_token_ids=self.end_token_ids, device=self.device)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What decides, beside the number of rows, which kernels ``logits_to_probs`` and draws launch."""
        rows, made = len(self.params), [getattr(self, name) is None for name in _COLUMNS]
        greedy = 0 if not self.num_greedy else 2 if self.num_greedy == rows else 1
        own = (self.vocab_size, self.reads_history, greedy, self.cuts_all, max(self.top_k), *made)
        return own if self.softened is self else (*own, self.softened.kind)

    def make(self) -> None:
        """Make all that is made when it is first asked for."""
        for name in _MADE_LATER:
            getattr(self, name)
        if self.softened is not self:
            self.softened.make()

    def take_values(self, other: "Processors") -> None:
        """Take the values of others of the same kind, in the memory that these have after ``make``: for what reads that
        memory in every step. The host's side, ``params`` and lists, stays as it is: nothing of a kind depends on it."""
        for name in (*_COLUMNS, *_ALWAYS, *_MADE_LATER):
            mine = getattr(self, name)
            if mine is not None:
                mine.copy_(getattr(other, name))
        if self.softened is not self:
            self.softened.take_values(other.softened)

    def _bias(self, device: torch.device) -> Tensor | None:
        if not any(row.logit_bias or row.banned_token_ids for row in self.params):
            return None
        bias = torch.zeros(len(self.params), 1, self.vocab_size, dtype=torch.float32)
        for index, row in enumerate(self.params):
            given = (*row.logit_bias.items(), *((token, -math.inf) for token in row.banned_token_ids))
            for token, _ in given:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(
                        f"token id {token} in logit_bias or banned_token_ids: ids are 0 to {self.vocab_size - 1}"
                    )
            if given:  # in one call: an operation for each token took milliseconds whenever a row came or left
                tokens, values = zip(*given, strict=True)
                bias[index, 0].index_add_(0, torch.tensor(tokens), torch.tensor(values, dtype=torch.float32))
        return sent(bias, device)

    def keep(self, rows: Sequence[int]) -> "Processors":
        """The processors of some rows."""
        chosen = [self.params[row] for row in rows]
        return Processors(chosen, vocab_size=self.vocab_size, end_token_ids=self.end_token_ids, device=self.device)


def logits_to_probs(logits: Tensor, processors: Processors, history: History, paths: Paths) -> Tensor:
    """The probs [B, n, V] after all processors; float32, or the logits' dtype where that is wider.

    logits [B, n, V'] of the same n nodes as paths. V' may be wider than the processors' vocabulary (a drafter's padding):
    the surplus is cut; where it is narrower the missing tokens have probability 0. NaN logits count as -inf; a row
    without any possible token becomes a row that is not finite or zero, which ``verify.drawing.draw`` reports as unsound.
    At temperature 0 the distribution is one-hot at the largest processed logit, ties to the lowest id. Every row is
    computed by itself: the same bits whatever the other rows and nodes are.
    """
    logits = process_logits(logits, processors, history, paths)
    if processors.num_greedy == len(processors.params):
        return one_hot_argmax(logits)
    probs = _temper(logits, processors)
    if processors.num_greedy:
        probs = torch.where(processors.greedy, one_hot_argmax(logits), probs)
    return probs


def process_logits(logits: Tensor, processors: Processors, history: History, paths: Paths) -> Tensor:
    """[B, n, V] what ``logits_to_probs`` does before the temperature: penalties, bias, bans, min_new_tokens, the user's
    processor. The logits themselves, float and without surplus columns, where no request asks for any of them."""
    vocab_size = processors.vocab_size
    narrow = logits.shape[-1] < vocab_size
    if narrow:
        logits = torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=-math.inf)
    elif logits.shape[-1] > vocab_size:
        logits = logits[..., :vocab_size]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if processors.reads_history:
        logits = _penalise(logits, processors, history, paths)
    if processors.bias is not None:
        logits = logits + processors.bias
    if processors.reads_history:
        logits = _restrict(logits, processors, history, paths)
    return logits


def one_hot_argmax(logits: Tensor) -> Tensor:
    """[..., V] the distribution of a greedy choice, ties to the lowest id; NaN is passed over, and a row of nothing but
    NaN and -inf has no mass. float32 on the CPU goes through ``kernels/race.c`` where it was built."""
    library = race_library() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if library is None or logits.numel() == 0:
        return one_hot_argmax_reference(logits)
    logits = logits.detach().contiguous()
    probs, vocab_size = torch.empty_like(logits), logits.shape[-1]
    library.foretell_one_hot(logits.numel() // vocab_size, vocab_size, logits.data_ptr(), probs.data_ptr())
    return probs


def one_hot_argmax_reference(logits: Tensor) -> Tensor:
    """``one_hot_argmax`` by torch: every device and dtype."""
    best, token = logits.max(-1, keepdim=True)
    if logits.device.type != "cpu" or bool(torch.isnan(best).any()):  # a NaN is the largest; a host read is free here
        best, token = torch.nan_to_num(logits, nan=-math.inf, posinf=math.inf, neginf=-math.inf).max(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, token, (best > -math.inf).to(logits.dtype))


def _temper(logits: Tensor, processors: Processors) -> Tensor:
    """Temperature, then top-k, top-p and min-p in this order; rows at temperature 0 are overwritten by the caller."""
    on_cpu = logits.device.type == "cpu"
    probs = _soft_top_k(logits if on_cpu else _finite(logits), processors)
    if on_cpu:
        bad = torch.isnan(probs[..., :1])  # one bad logit makes its whole row NaN; a host read is free here
        if bool(bad.any()):
            probs = torch.where(bad, _soft_top_k(_finite(logits), processors), probs)
    if processors.top_p is None and processors.min_p is None:
        return probs
    if processors.top_p is not None:
        probs = _top_p(probs, processors.top_p)
    if processors.min_p is not None:
        probs = probs.masked_fill(probs < processors.min_p * probs.amax(-1, keepdim=True), 0.0)
    # In float64: the order in which torch adds depends on the number of rows, and its rounding must not.
    mass = probs.sum(-1, keepdim=True, dtype=torch.float64).to(probs.dtype)
    return probs / mass if processors.cuts_all else torch.where(processors.cut, probs / mass, probs)


def _finite(logits: Tensor) -> Tensor:
    """The same distribution from logits at most 0: NaN as -inf, and inf as the largest number. All of -inf becomes NaN."""
    logits = torch.nan_to_num(logits, nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)
    return logits - logits.amax(-1, keepdim=True)


def _soft_top_k(logits: Tensor, processors: Processors) -> Tensor:
    if processors.temperature is not None:
        logits = logits * processors.inverse_temperature
    if any(processors.top_k):
        logits = _top_k(logits, processors)
    return torch.softmax(logits, -1)


def _top_k(logits: Tensor, processors: Processors) -> Tensor:
    """-inf below the k-th largest logit of each row; k = 0 keeps the row."""
    assert processors.top_ks is not None
    k = processors.top_ks[:, None, None]
    largest = logits.topk(max(processors.top_k), dim=-1).values  # [B, n, K]
    edge = largest.gather(-1, (k - 1).clamp(min=0).expand(*logits.shape[:2], 1))
    return logits.masked_fill((logits < edge) & (k > 0), -math.inf)


def _top_p(probs: Tensor, top_p: Tensor, first: int = 64) -> Tensor:
    """Zero outside the smallest set of most probable tokens whose mass reaches top_p [B, 1, 1]; not renormalised.

    A full sort costs more than a small model's pass, so only the first few tokens are sorted, and more of them as long
    as some row's do not reach its top_p. On an accelerator the sort is cheap and the host read is not: one full sort.
    """
    vocab_size = probs.shape[-1]
    count = min(first, vocab_size) if probs.device.type == "cpu" else vocab_size
    while True:
        largest = probs.topk(count, dim=-1).values  # [B, n, K]
        mass = largest.cumsum(-1)
        if count == vocab_size or bool(((mass[..., -1:] >= top_p) | (top_p >= 1)).all()):
            break
        count = min(count * 8, vocab_size)
    # A token is kept while the mass before it is below top_p: the first always is.
    kept = ((mass - largest) < top_p).sum(-1, keepdim=True).clamp(min=1)  # 0 where the row is NaN
    edge = largest.gather(-1, kept - 1)
    return torch.where((probs >= edge) | (top_p >= 1), probs, 0.0)


def _penalise(logits: Tensor, processors: Processors, history: History, paths: Paths) -> Tensor:
    """Repetition penalty over all text, presence and frequency penalties over the output, path included."""
    if processors.repetition is None and processors.presence is None and processors.frequency is None:
        return logits
    if logits.device.type == "cpu":
        return _penalise_seen(logits, processors, history, paths)
    return _penalise_all(logits, processors, history, paths)


def _penalise_seen(logits: Tensor, processors: Processors, history: History, paths: Paths) -> Tensor:
    """Of each row only the tokens that the text or a guess has: the others do not change."""
    repetition, presence, frequency = (
        None if column is None else column[:, 0, 0].to(logits.dtype)
        for column in (processors.repetition, processors.presence, processors.frequency)
    )
    logits = logits.clone()
    for row, (ids, start) in enumerate(zip(history.ids, history.num_prompt, strict=True)):
        guesses = paths.tokens[row, 1:]  # the root is in the history
        tokens, index = torch.unique(torch.cat([torch.tensor(ids, dtype=torch.int64), guesses]), return_inverse=True)
        text, guessed = index[: len(ids)], functional.one_hot(index[len(ids) :], len(tokens)).to(logits.dtype)
        on_path = paths.ancestry[row, :, 1:].to(logits.dtype) @ guessed  # [n, U] how often a node's path has a token
        counts = torch.bincount(text[start:], minlength=len(tokens)) + on_path  # in the output
        values = logits[row][:, tokens]
        if repetition is not None:
            seen = (torch.bincount(text, minlength=len(tokens)) > 0) | (on_path > 0)
            less = torch.where(values > 0, values / repetition[row], values * repetition[row])
            values = torch.where(seen, less, values)
        if presence is not None:
            values = values - presence[row] * (counts > 0)
        if frequency is not None:
            values = values - frequency[row] * counts
        logits[row][:, tokens] = values
    return logits


def _penalise_all(logits: Tensor, processors: Processors, history: History, paths: Paths) -> Tensor:
    """All tokens of all nodes at once, without a host read of the path: the slow twin, and for accelerators."""
    repetition, presence, frequency = processors.repetition, processors.presence, processors.frequency
    num_rows, num_nodes, vocab_size = logits.shape
    prompt = torch.zeros(num_rows, vocab_size, dtype=torch.bool)
    output = torch.zeros(num_rows, vocab_size, dtype=logits.dtype)
    for row, (ids, start) in enumerate(zip(history.ids, history.num_prompt, strict=True)):
        prompt[row, ids[:start]] = True
        emitted = torch.tensor(ids[start:], dtype=torch.int64)
        output[row].index_add_(0, emitted, torch.ones(len(emitted), dtype=logits.dtype))
    counts = sent(output, logits.device)[:, None].repeat(1, num_nodes, 1)  # [B, n, V]
    on_path = paths.ancestry[:, :, 1:].to(logits.dtype)  # the root is in the history
    counts.scatter_add_(2, paths.tokens[:, None, 1:].expand(-1, num_nodes, -1).contiguous(), on_path)
    if repetition is not None:
        seen = (counts > 0) | sent(prompt, logits.device)[:, None]
        factor = repetition.to(logits.dtype)
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if presence is not None:
        logits = logits - presence.to(logits.dtype) * (counts > 0)
    if frequency is not None:
        logits = logits - frequency.to(logits.dtype) * counts
    return logits


def _restrict(logits: Tensor, processors: Processors, history: History, paths: Paths) -> Tensor:
    """min_new_tokens, then the user's processors: node by node, since both depend on where in the output a node is."""
    logits = logits.clone()
    depth = paths.ancestry.sum(-1) - 1  # [B, n]
    for row, (params, emitted) in enumerate(zip(processors.params, history.num_output(), strict=True)):
        if params.min_new_tokens > emitted and processors.end_ids[row]:
            early = (depth[row] + emitted < params.min_new_tokens)[:, None]  # [n, 1]
            ends = tensor_on(logits.device, processors.end_ids[row])
            logits[row, :, ends] = logits[row, :, ends].masked_fill(early, -math.inf)
        if params.logits_processor is None:
            continue
        prefix = history.tensor(row, logits.device)
        reached = paths.valid[row].tolist()
        above = paths.parent[row].tolist() if paths.is_tree and paths.parent is not None else []
        for node in range(logits.shape[1]):
            if above and node and reached[node]:  # plain decoding asks nothing behind a token that it may not write
                token = paths.tokens[row, node]
                reached[node] = reached[above[node]] and bool(logits[row, above[node], token] != -math.inf)
            if not reached[node]:
                continue
            path = paths.tokens[row, 1:][paths.ancestry[row, node, 1:]]
            given = logits[row, node].clone()
            made = params.logits_processor(torch.cat([prefix, path]), given)
            if not isinstance(made, Tensor) or made.shape != logits[row, node].shape:
                got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ConfigError(f"logits_processor returned {got}; expected logits of shape {tuple(given.shape)}")
            logits[row, node] = made
    return logits
