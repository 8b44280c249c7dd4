"""What every drafter is: it proposes trees of tokens and receives the result of each step. It never verifies.

A ``Method`` is what is loaded once (weights, settings); ``Method.open`` makes a ``Drafter``, the memory of one batch of
rows. Capabilities are declared, so that an illegal combination is refused when the configuration is read.

These classes are public: packages subclass them to add methods (docs/extend.md). Tensors that a drafter is given belong
to the engine: a drafter changes none of them, and copies what it wants to keep beyond the call, since buffers are used
again.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.graphs import Graphs
from foretell.core.noise import Noise, race
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.draft.shapes import Shape
from foretell.kernels.small import invert_cdf
from foretell.model.target import Target


@dataclass(frozen=True)
class Capabilities:
    """What a method can do and what it needs."""

    summary: str
    draws: bool  # can draw from a distribution (COUPLED, IID); False: every proposal is FIXED
    weighs: bool = False  # makes the guesses that pay by itself (``Context.least_chance``): depth need not be planned
    needs_draft: bool = False  # needs a model of its own
    needs_prediction: bool = False  # needs the caller's guess of the output
    reads_target: bool = False  # observe() needs hidden states of the target: those of ``Method.taps``
    needs_head: bool = False  # needs a trained head
    shapes: tuple[str, ...] = ("chain",)  # names of the shapes it can grow; rows may always get fewer nodes
    learns: bool = False  # guesses for a request may depend on earlier requests: see ``Method.fresh``
    # Can be opened in the middle of a text, without having observed the steps before. A service then opens it when it is
    # first asked for a guess, and closes it after some steps without one.
    opens_late: bool = False
    # A request to a service may ask for it, with keys of its own choice, though the service was not started with it: it
    # loads nothing, and its keys name no file.
    by_request: bool = False
    expects: bool = False  # its guesses follow what logits processors expect (``Processors.expected``)


@dataclass
class Context:
    """What a drafter may read of the rows being decoded. The engine owns it and advances it between steps: it is valid
    during a call, and the next call is given another or the same with new values. A drafter changes nothing in it."""

    history: History  # prompt and output, the pending token last
    processors: Processors
    length: Tensor  # [B] int64 committed slots: the position of the pending token
    lengths: list[int]  # the same on the host
    pending: Tensor  # [B] int64
    predictions: list[list[int]]  # the caller's guess of each row's output, as tokens; empty where there is none
    depth_limit: list[int]  # how deep the nodes of each row may be: at most as deep as its shape, never negative
    # The same for guesses that cost time, where the plan sets them apart (``Method.light``); None: as depth_limit.
    paid_limit: list[int] | None = field(default=None, kw_only=True)
    # Of a guess that is looked up: the chance to be kept below which it does not pay its node. 0: each one does.
    least_chance: float = field(default=0.0, kw_only=True)
    probe: "Probe | None" = field(default=None, kw_only=True)  # of this proposal, where somebody asks for one
    graphs: Graphs | None = field(default=None, kw_only=True)  # where proposals may be captured: take a ``sibling``
    limits: Tensor | None = field(default=None, kw_only=True)  # [B] in a captured proposal: how deep each row may guess

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """The device of the index tensors."""
        return self.length.device

    @property
    def draft_logits(self) -> list[Tensor] | None:
        """See ``Probe``; None: nobody asks for them."""
        return None if self.probe is None else self.probe.draft_logits


@dataclass(slots=True)
class Probe:
    """What drafters write down of a proposal. Most steps have none."""

    # If a list: growing appends the draft's logits [B, n, V] after the root and after the nodes it reads, in order.
    draft_logits: list[Tensor] | None = None
    seconds_model: float = 0.0  # of passes of a draft model, on the host clock


@dataclass(frozen=True)
class PromptChunk:
    """Known text that the target has just read: valid during ``read_prompt`` only."""

    start: list[int]  # of each row: the position of its first token of this chunk
    count: list[int]  # of each row: how many of its tokens the chunk holds; the rest is padding
    taps: Tensor  # [B, n, T * H], n = max(count)
    stored: bool = False  # the prefix store holds the taps too: a drafter may keep them without memory of its own
    kept: bool = False  # the prefix store will ask for those of the tokens after the prompt (``Drafter.taps_of``)


@dataclass(frozen=True)
class Commit:
    """The result of a step for a proposal: valid during ``observe`` only."""

    tree: TokenTree  # as it was proposed, with padding nodes where other rows had more
    length: Tensor  # [B] committed slots before the step
    path: list[list[int]]  # kept nodes of each row, the root first
    tokens: list[list[int]]  # emitted tokens of each row: those of path[1:], then the bonus; cut where the row ended
    taps: Tensor | None = None  # [B, N, T * H]
    ended: list[bool] = field(default_factory=list)  # rows whose output ends with these tokens
    guessed: list[int] = field(default_factory=list)  # guesses of each row, where they are counted already
    notes: list[list[int]] | None = None  # those of the tree; -1 after a row's, where other drafters' are longer


@dataclass(frozen=True, slots=True)
class LightStep:
    """A chain that a light part would have guessed, judged by the tokens that came."""

    allowed: int  # how deep it might have guessed, as far as that is known
    drafted: int  # as far as the tokens that came reach: later guesses are not known to be right or wrong
    accepted: int
    proposed: bool = False  # whether it was this guess that the step made
    preferred: bool | None = None  # whether it is the whole method's, or would be where that guesses; None: not known

    @classmethod
    def of(
        cls,
        allowed: int,
        guess: Sequence[int],
        emitted: Sequence[int],
        *,
        proposed: bool = False,
        preferred: bool | None = None,
    ) -> "LightStep":
        """guess: its tokens, in a line. emitted: tokens of the step, drawn from the target's distribution."""
        kept = 0
        for mine, right in zip(guess, emitted, strict=False):
            if mine != right:
                break
            kept += 1
        if kept == len(emitted) < len(guess):  # nobody knows how it would have gone on
            return cls(min(allowed, kept), kept, kept, proposed, preferred)
        return cls(allowed, len(guess), kept, proposed, preferred)


class Drafter(ABC):
    """The memory of one batch of rows: those of the context that it was opened with, in that order.

    Calls alternate: propose, observe, propose, ... (but see ``can_wait``); ``read_prompt`` comes before the first proposal,
    ``keep``, ``join`` and ``catch_up`` between steps. All come from one thread, under ``torch.inference_mode``. Only
    ``propose`` is required. A drafter that computes its guesses from the context alone has no memory and needs nothing
    else.
    """

    can_join: ClassVar[bool] = False
    """Whether rows can be added. True requires ``join``. False: each new row gets its own drafter."""

    can_wait: bool = False
    """Whether it may be told later of steps without guesses. True: while no row guesses ``propose`` may be left out, and
    ``observe_all`` tells of several steps in a row before any other call. After a pass code and data are cold: a call for
    each step takes several times as long as one for all."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError where ``can_join`` and ``join`` do not agree."""
        super().__init_subclass__(**options)
        if (cls.can_join is not False) != (cls.join is not Drafter.join):  # a property says it of each drafter
            raise TypeError(
                f"{cls.__name__} has can_join = {cls.can_join}, and {'no' if cls.can_join else 'a'} method join: a drafter "
                "to which rows can be added has both, one to which they cannot has neither"
            )

    @abstractmethod
    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree whose root is ``context.pending``. draws is how to draw where the method can; a deterministic method
        proposes FIXED nodes for every value of draws. Rows may get fewer nodes than the shape allows, or none; none of
        row b is deeper than ``context.depth_limit[b]``. All randomness comes from noise. The drafter must not change the
        tree's tensors before ``observe`` has returned."""

    def read_prompt(self, chunk: PromptChunk) -> None:  # noqa: B027
        """Called before the first proposal with hidden states of the known text, if ``Method.prompt_taps`` names
        layers. A long text comes in several chunks, in order."""

    def observe(self, commit: Commit) -> None:  # noqa: B027 - many drafters have nothing to remember
        """Called for every step, also for steps without a proposal: after each, or see ``can_wait``."""

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """``observe`` of several steps without guesses, in order: only where it ``can_wait``. Their taps stay valid."""
        for commit in commits:
            self.observe(commit)

    def keep(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Drop all rows but these, in this order. A drafter with state per row must override it."""

    def join(self, other: "Drafter", context: Context) -> None:
        """Append another drafter's rows after these: ``other`` was opened by the same method for other rows (usually one),
        has read their prompts, and is not used afterwards. context is the joined one: these rows, then other's. Called only
        where ``can_join``."""
        raise RuntimeError(f"{type(self).__name__} was joined though its can_join is False")

    def num_unread(self, context: Context) -> list[int]:
        """[B] how many tokens of each row's known text the next proposal would read beside the pending one."""
        return [0] * context.num_rows

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """Read at most ``most`` tokens of the row's known text that the drafter would otherwise read in its next proposal;
        returns how many are still unread (0: nothing to do). It keeps a long prompt, or a long time without guessing,
        from delaying a step. Other rows are not changed."""
        return 0

    def taps_of(self, row: int) -> Tensor | None:
        """[n, T * H] hidden states of the tokens that were committed after a row's prompt, of the layers and in the form of
        ``PromptChunk.taps``, where its chunks said ``kept``. None: they are not kept, and its answer is read again where
        another text goes on with it."""
        return None

    def adopt(self, method: "Method") -> None:
        """Go on with the weights of another method, made by ``Method.rebuilt`` from the one that opened this drafter.
        Called between steps. What was computed by the old weights may be kept: every guess after this comes from the new
        ones, with their own distribution."""
        raise RuntimeError(f"{type(self).__name__} cannot go on with other weights")

    @property
    def light_steps(self) -> "Sequence[LightStep | None] | None":
        """Of each row of the step that was observed last: what ``Method.light`` would have guessed there by itself, and how
        much of it the emitted tokens confirm, whichever part guessed. None: there is no such part, or it is not known."""
        return None

    @property
    def chance(self) -> Tensor | None:
        """Predicted acceptance for shapes with ``asks_acceptance``: see ``Expander.chance``. None: not available."""
        return None


class RowDrafter(Drafter):
    """A drafter that keeps one object for each row, and nothing that rows share but what those objects refer to."""

    can_join = True
    rows: list[Any]
    """Each has a method ``extend``, which appends emitted tokens to its text, unless ``observe`` is another."""

    def observe(self, commit: Commit) -> None:
        """Append the emitted tokens to each row's text."""
        for row, tokens in zip(self.rows, commit.tokens, strict=True):
            row.extend(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows."""
        self.rows = [self.rows[row] for row in rows]

    def join(self, other: Drafter, context: Context) -> None:
        """Add rows of another drafter of this class."""
        assert isinstance(other, RowDrafter)
        self.rows += other.rows


class Method(ABC):
    """A way of drafting, loaded once. Holds no memory of any row, unless its capabilities say that it ``learns``."""

    name: str
    """``MethodConfig.method``: the name in metrics and stream pieces."""
    capabilities: Capabilities
    exit_layer: int = 0
    """Lower layers of the target, [0, exit_layer), that its drafters run themselves: ``TokenTree.hidden_layer``."""
    max_positions: int | None = None
    """Positions that its weights were made for: longer texts are guessed for by its ``light`` part alone. None: any."""

    @property
    def foresees(self) -> bool:
        """Whether its drafters were loaded with an acceptance head (``Drafter.chance``), which shapes with
        ``asks_acceptance`` need."""
        return False

    @property
    def light(self) -> "Method | None":
        """A method that is a part of this one and whose guesses cost next to nothing: it may go on where the whole does not
        pay (``Context.paid_limit``)."""
        return None

    @property
    def trained(self) -> "Method":
        """The part that has trained weights, which ``rebuilt`` replaces: this method, or one that it is made of."""
        return self

    def with_trained(self, part: "Method") -> "Method":
        """This method with ``part`` in the place of ``trained``; what it learns from texts is shared with this one. Methods
        that are made of others override both."""
        return part

    @property
    def chains_only(self) -> str:
        """Why its drafters grow lines alone, whatever the shape: the reason of its own model. "" where they grow trees."""
        return ""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs ``Commit.taps`` must hold, concatenated in this order."""
        return ()

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """... and ``PromptChunk.taps``. Others only where a drafter runs lower layers itself in each step."""
        return self.taps

    @property
    def bytes_per_token(self) -> int:
        """Bytes that its drafters hold for each token of a row beside the target's keys and values: their own, and features
        of tokens that they have not read yet. A service sizes its memory by this figure."""
        return 0

    @property
    def bytes_per_row(self) -> int:
        """Bytes that its drafters hold for a row at most, whatever its length: recurrent states, what waits to be read."""
        return 0

    @property
    def learned_bytes(self) -> int:
        """Approximate size in bytes of what it has learned. May be called from any thread."""
        return 0

    @property
    def runs_as(self) -> str | None:
        """How its trained head runs: "native", or "torch" and why; None for methods without such a head."""
        return None

    def memory(self) -> dict[str, Tensor]:
        """What it has learned from requests, as tensors on the CPU that nothing changes, for a service that keeps it on
        disk (``ServiceOptions.state_dir``); {}: nothing. Called between steps."""
        return {}

    def recall(self, memory: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take up what ``memory`` returned to a method of the same settings, as a ``fresh`` one, before its first request.
        Raises ValueError or KeyError for what it cannot have returned."""

    def fresh(self) -> "Method":
        """A method with the same weights and settings and an empty store, shared with no other method. Must be
        overridden if ``capabilities.learns``; other methods have no store."""
        return self

    def isolated(self) -> "Method":
        """As ``fresh``, and its rows learn from their own text alone. By default a fresh method for each call; a method
        that separates its rows itself may return the same object each time, so that such rows share a batch."""
        return self.fresh()

    def measured(self) -> "Method":
        """The method whose steps are timed in this one's place: the timing must teach it nothing that requests are guessed
        from, and where ``light`` stands in for a dearer part, the dearer part guesses in every step."""
        return self.fresh() if self.capabilities.learns else self

    def rebuilt(self, weights: Mapping[str, Tensor]) -> "Method":
        """The same method with other weights, named as its checkpoint has them: what learning while serving swaps in. This
        one stays as it is. Raises ConfigError for a method that cannot."""
        raise ConfigError(
            f"method {self.name!r} cannot learn while it serves: choose draft_model, eagle1, eagle2, eagle3, medusa or "
            "dflash"
        )

    @abstractmethod
    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A drafter for the rows of context, none of which will use more than capacity slots.

        target is the one being decoded: self-drafters run its lower layers; other drafters must not call it.
        """


def choose(probs: Tensor, how: DrawnBy, noise: Noise, *, depth: int, node: int) -> Tensor:
    """[B] int64: the token of node ``node``, child of a node at this depth, drawn from probs [B, V] in the way
    ``how``."""
    if how == DrawnBy.COUPLED:
        return race(probs, noise.coupled_keys(depth + 1)[:, depth])
    if how == DrawnBy.FIXED:
        return probs.argmax(-1)
    return invert_cdf(probs, noise.draft(node))
