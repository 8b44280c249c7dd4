"""The interface of verification: a verifier returns probabilities, not samples, and one function draws from them.

A walk starts at the root of a tree of guesses and moves from child to child. A verifier says with which probability
it stops at each node (``stops``), and which distribution the bonus has once it stopped there (``residual``). So every
verifier can be enumerated exactly without drawing anything, and all draws happen in one function (``drawing.draw``).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from foretell.core.deferred import Deferred
from foretell.core.noise import Noise, race
from foretell.core.tree import DrawMode, TokenTree, ancestors, chain_parent, is_chain


@dataclass(frozen=True)
class Evidence:
    """All that a verifier may read. It must not change or keep any of it: tensors are valid during a call.

    p and q are converted to one dtype, the wider of the two. p may be made when it is first read (``Evidence.later``): a
    rule that needs the draws of a few nodes alone asks ``draws`` for them.
    """

    tree: TokenTree
    p: Tensor  # [B, N, V] target distribution of the token after each node, all processors applied
    noise: Noise | None = None
    taps: Tensor | None = None  # [B, N, T * H] hidden states of the target
    deferred: Deferred | None = field(default=None, repr=False, compare=False)

    @classmethod
    def later(cls, tree: TokenTree, deferred: Deferred, noise: Noise | None, taps: Tensor | None) -> "Evidence":
        """With p as ``deferred`` makes it, when it is first read."""
        if tree.q is not None and tree.q.dtype != deferred.dtype:
            return cls(tree, deferred.probs, noise, taps)
        evidence = object.__new__(cls)
        vars(evidence).update(tree=tree, noise=noise, taps=taps, deferred=deferred)
        return evidence

    def __getattr__(self, name: str) -> Tensor:
        """Only what has not been set comes here: p."""
        if name != "p" or "deferred" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        assert self.deferred is not None
        return self.deferred.probs

    @property
    def shape(self) -> tuple[int, ...]:
        """That of p, which is not made for it: (B, N, V)."""
        return tuple(self.p.shape) if self.deferred is None else self.deferred.shape

    def draws(self, rows: Sequence[int], nodes: Sequence[int], keys: Sequence[int]) -> list[tuple[int, bool]]:
        """The token that wins ``argmax p / E`` after node nodes[k] of row rows[k], E keyed by keys[k], and whether p gives
        it a probability; for each k. Read on the host: for the CPU."""
        if self.deferred is not None:
            return self.deferred.draw(rows, nodes, keys)
        probs = self.p[rows[0], nodes[0]][None] if len(rows) == 1 else self.p[rows, nodes]  # [R, V]
        drawn = race(probs, torch.tensor(keys))
        chance = probs.gather(1, drawn[:, None])[:, 0]
        return list(zip(drawn.tolist(), (chance > 0).tolist(), strict=True))

    def has_mass(self, at: Tensor, tokens: Tensor) -> Tensor:
        """[B] bool: whether token tokens[b] has a positive probability at node at[b]."""
        if self.deferred is None or not at.is_cpu:
            return has_mass(self.p, at, tokens)
        places = enumerate(zip(at.tolist(), tokens.tolist(), strict=True))
        return torch.tensor([self.deferred.has_mass(row, node, token) for row, (node, token) in places])

    def __post_init__(self) -> None:
        """Widen the narrower of p and q. No value changes, so q is still the distribution that was drawn from."""
        q = self.tree.q
        if q is None or q.dtype == self.p.dtype:
            return
        wider = torch.promote_types(self.p.dtype, q.dtype)
        object.__setattr__(self, "p", self.p.to(wider))
        object.__setattr__(self, "tree", replace(self.tree, q=q.to(wider)))

    def rows(self, start: int, stop: int, held: Sequence[int] = (), wanted: Sequence[int] = ()) -> "Evidence":
        """The evidence of rows [start, stop). held: the layers of ``taps``; wanted: those that the rows' rule reads."""
        noise = self.noise
        if noise is not None:
            noise = replace(noise, seeds=noise.seeds[start:stop], positions=noise.positions[start:stop], _memo=[])
        taps = None if self.taps is None else self.taps[start:stop]
        if held:
            taps = pick_layers(taps, held, wanted)
        if self.deferred is not None:
            return Evidence.later(self.tree.rows(start, stop), self.deferred.slice(start, stop), noise, taps)
        return Evidence(self.tree.rows(start, stop), self.p[start:stop], noise, taps)


def pick_layers(taps: Tensor | None, held: Sequence[int], wanted: Sequence[int]) -> Tensor | None:
    """[B, N, t * H] of the layers wanted, in their order, of taps [B, N, T * H] of the T layers held; None for none."""
    if taps is None or not wanted:
        return None
    if tuple(wanted) == tuple(held):
        return taps
    parts = taps.view(*taps.shape[:2], len(held), -1)  # [B, N, T, H]
    chosen: Tensor = parts[:, :, [held.index(layer) for layer in wanted]].flatten(2)
    return chosen


@dataclass(frozen=True)
class Walk:
    """Where the walk stops, as a distribution. ``stops`` makes one; ``residual`` is given the same, its carry untouched."""

    stops: Tensor  # [B, N] sums to 1 along N, zero on padding
    carry: Any = None  # what residual needs and would otherwise compute again


class Verdict:
    """One outcome, drawn: nodes path[b, :count[b]] are kept (the root first), then comes the token bonus[b].

    path: [B, N] int64 node indices, ascending along the path; after count, the rest in any order. count: [B] int64, at
    least 1. bonus: [B] int64. sound: [B] bool: False where the probabilities were not finite or all zero; bonus is then
    undefined. Of a walk on the host (``of``) these tensors are made when one is first read; the engine reads lists.
    """

    def __init__(self, path: Tensor, count: Tensor, bonus: Tensor, sound: Tensor) -> None:
        self._tensors: tuple[Tensor, Tensor, Tensor, Tensor] | None = (path, count, bonus, sound)
        self.host: tuple[list[list[int]], list[int], list[bool]] | None = None  # (kept nodes, bonus, sound) by row
        self.faults: Sequence[str] = ()  # of a rule that broke its contract, by row; "": none
        self._num_nodes = path.shape[1]

    @classmethod
    def of(cls, paths: list[list[int]], bonus: list[int], sound: list[bool], num_nodes: int) -> "Verdict":
        """That of rows whose kept nodes, the root first, are on the host, of trees with num_nodes nodes; on the CPU."""
        verdict = cls.__new__(cls)
        verdict._tensors, verdict.host, verdict._num_nodes = None, (paths, bonus, sound), num_nodes
        verdict.faults = ()
        return verdict

    @property
    def counts(self) -> list[int]:
        """``count`` on the host."""
        counts: list[int] = self.count.tolist() if self.host is None else list(map(len, self.host[0]))
        return counts

    def _made(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._tensors is None:
            assert self.host is not None
            paths, bonus, sound = self.host
            rest = [path + sorted(set(range(self._num_nodes)).difference(path)) for path in paths]
            count = torch.tensor([len(path) for path in paths])
            self._tensors = torch.tensor(rest), count, torch.tensor(bonus), torch.tensor(sound)
        return self._tensors

    @property
    def path(self) -> Tensor:
        """[B, N] int64."""
        return self._made()[0]

    @property
    def count(self) -> Tensor:
        """[B] int64."""
        return self._made()[1]

    @property
    def bonus(self) -> Tensor:
        """[B] int64."""
        return self._made()[2]

    @property
    def sound(self) -> Tensor:
        """[B] bool."""
        return self._made()[3]


class VerifierLoader(Protocol):
    """What ``Verifier.load`` is given."""

    @property
    def target(self) -> Any:
        """The target: a ``foretell.CausalModel``. ``target.spec`` has its sizes, dtype and device."""

    @property
    def guesses(self) -> bool:
        """False: plain decoding, so that nothing will ever be verified and no weights are needed."""

    @property
    def name(self) -> str | None:
        """Hub id or directory that the user gave for the verifier's weights (the key ``judge``); None: none was given."""

    def head(self, kind: str) -> Any:
        """A trained head of this kind, checked against the target, in float32: the one that the user named, else the
        bundled one. Raises ModelError."""


class Verifier(ABC):
    """A rule of verifying: a frozen dataclass whose fields are its options, each of type bool, int, float, str or a tuple
    of int or float, with a default.

    ``stops``, ``residual`` and ``decide`` are pure: functions of their arguments alone, which they do not change. So a rule
    can be enumerated exactly, and certified. Distributions are float32 or the dtype of p (tests use float64), on its
    device.
    """

    name: ClassVar[str]
    # True: the emitted text has the target's distribution. False: lossy, and marked so in all output
    exact: ClassVar[bool]
    reads: ClassVar[frozenset[str]] = frozenset()  # of "q", "noise", "taps"
    draws: ClassVar[DrawMode]  # how a drafter that can choose should draw for this rule
    summary: ClassVar[str]
    invariant: ClassVar[bool] = False  # the text is a function of target and seed alone: one for all drafters and trees
    chains_only: ClassVar[bool] = False  # undefined on a node with two children
    # Where siblings are drawn so, how many there are must not.
    counts_children: ClassVar[frozenset[DrawMode]] = frozenset()
    # depend on any token: the rule treats them jointly
    waits: ClassVar[bool] = False  # it reads values on the host while it judges: no captured graph holds it
    distance: ClassVar[str] = ""  # of a lossy rule: what is known of its distance from p, in one line

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs ``Evidence.taps`` must hold, concatenated in this order."""
        return ()

    def load(self, loader: VerifierLoader) -> "Verifier":
        """The rule as it decodes one target: with its weights, where it reads some (``dataclasses.replace(self, ...)``).
        The default reads none. Called once before anything is decoded. Raises ModelError, ConfigError."""
        return self

    @abstractmethod
    def stops(self, evidence: Evidence) -> Walk:
        """The distribution of the node at which the walk stops."""

    def decide(self, evidence: Evidence) -> tuple[Tensor, Tensor] | None:
        """(at [B], bonus [B]) for rules whose outcome the noise determines: what ``draw`` would get from
        one-hot stops and residuals, without building them. None (the default): draw from the distributions."""
        return None

    def walk(self, evidence: Evidence) -> Verdict | None:
        """The outcome where the rule can tell it on the host without any tensor; None (the default): by ``decide``, which
        says the same."""
        return None

    @abstractmethod
    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """[B, V] distribution (any positive scale) of the bonus, given that row b stopped at node at[b]."""


class RatioVerifier(Verifier):
    """A rule that judges by p and q, and keeps the target's distribution."""

    exact = True
    reads = frozenset({"q"})


def stops_from_edges(parent: Tensor, edges: Tensor) -> Tensor:
    """Stops [B, N] of a node-local rule from edges [B, N] = P(walk goes from parent(i) to i | it is at parent(i)).

    edges of the root and of padding are ignored. An edge that is NaN (a distribution that is none) counts as 0, so that
    the walk stops at such a node, and a node that is never reached has no effect. Raises RuntimeError where a node's
    children sum above 1 (checked on the CPU alone: on an accelerator the check would be a host read in every step).
    """
    valid = parent >= 0  # [B, N] real children; the root is none
    edges = edges.masked_fill(~valid | edges.isnan(), 0.0)
    leaving = torch.zeros_like(edges).scatter_add_(1, parent.clamp(min=0), edges)  # [B, N]
    if edges.device.type == "cpu" and bool((leaving > 1.0 + 1e-5).any()):
        raise RuntimeError(f"the children of a node are reached with probability {float(leaving.max())} > 1")
    step = torch.where(valid, edges, 0.0)
    step[:, 0] = 1.0
    reach = torch.where(ancestors(parent), step[:, None, :], 1.0).prod(-1)  # [B, N]; padding: its own 0
    return reach * (1.0 - leaving).clamp_(min=0.0)


def follow(parent: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """(path [B, N], count [B]) from the root to node at[b]. A parent's index is below its child's, so order is index."""
    if is_chain(parent):
        return (chain_parent(parent.shape[1], parent.device) + 1).expand_as(parent), at + 1
    if parent.device.type == "cpu" and len(at) <= 16:  # a walk on the host: a tenth of the time of the products
        return _follow_on_host(parent, at)
    on_path = ancestors(parent).gather(1, at[:, None, None].expand(-1, 1, parent.shape[1]))[:, 0]  # [B, N]
    return torch.argsort((~on_path).to(torch.int8), dim=1, stable=True), on_path.sum(1)


def _follow_on_host(parent: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    paths, counts = [], []
    for above, node in zip(parent.tolist(), at.tolist(), strict=True):
        path = []
        while node >= 0:
            path.append(node)
            node = above[node]
        path.reverse()
        kept = set(path)
        counts.append(len(path))
        paths.append(path + [other for other in range(len(above)) if other not in kept])
    return torch.tensor(paths), torch.tensor(counts)


def row_at(x: Tensor, at: Tensor) -> Tensor:
    """[B, V] row at[b] of x [B, N, V]."""
    return x[torch.arange(x.shape[0], device=x.device), at]


def has_mass(p: Tensor, at: Tensor, tokens: Tensor) -> Tensor:
    """[B] bool: whether token tokens[b] has a positive probability at node at[b] in p [B, N, V]."""
    if p.device.type == "cpu" and len(at) <= 16:  # after a pass, with cold caches, indexing by tensors takes 80 us
        places = enumerate(zip(at.tolist(), tokens.tolist(), strict=True))
        return torch.tensor([p[row, node, token].item() > 0 for row, (node, token) in places])
    return p[torch.arange(len(at), device=at.device), at, tokens] > 0


@dataclass(frozen=True)
class RowVerifiers:
    """Verifiers of a batch whose rows have several: the k-th judges rows [stops[k - 1], stops[k])."""

    verifiers: tuple[Verifier, ...]
    stops: tuple[int, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that any of them reads, each once."""
        return tuple(dict.fromkeys(layer for verifier in self.verifiers for layer in verifier.taps))
