"""A smaller language model of the same vocabulary as drafter (Leviathan et al. 2211.17192)."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.draft import grow
from foretoken.draft.base import Capabilities, Commit, Context, Drafter, Method
from foretoken.draft.config import Loader, MethodConfig
from foretoken.draft.shape import SHAPES, Shape
from foretoken.errors import ConfigError
from foretoken.heads.acceptance import AcceptanceHead, law_inputs, predicted
from foretoken.heads.load import load_acceptance
from foretoken.model.prefill import feed
from foretoken.model.target import CausalModel, Target
from foretoken.noise import Noise
from foretoken.tree import Draws, Plan, TokenTree, root_tree


class ModelDrafter(Drafter):
    """The draft model with its own KV cache.

    Invariant: slots [0, filled[b]) hold KV of the first filled[b] tokens of row b's text. While a tree grows, its nodes
    lie behind the pending token in the order in which they were fed; ``observe`` moves the kept ones right behind the text.
    Leaves are never fed, so after full acceptance the last committed token is still missing (the classic off-by-one of
    drafters): ``begin`` feeds whatever is missing up to the pending token, however much that is.
    """

    can_join = True

    def __init__(
        self, model: CausalModel, context: Context, capacity: int, acceptance: AcceptanceHead | None = None
    ) -> None:
        self.capacity = capacity
        self.acceptance = acceptance
        self.reads_law = acceptance is not None and acceptance.config.reads_law
        self.hidden: Tensor | None = None  # [B, W, H] after the nodes read by the last ``logits``: see Output.hidden
        self.told: list[Tensor] = []  # with reads_law: logits [B, 1, V] after the nodes read last, and before them
        self.tokens: Tensor | None = None  # [B, 1] with reads_law: the nodes read last
        self.temperature: Tensor | None = None  # [B, 1] with reads_law
        self.target = Target(model, context.num_rows, capacity)
        self.num_tokens = model.spec.vocab_size  # a token beyond them (the target may have more) is fed as the last one
        self.knows_all = self.num_tokens >= context.processors.vocab_size
        self.filled = [0] * context.num_rows
        self.limits = [0] * context.num_rows  # of the last proposal: where it is 0 nothing was fed
        self.slots: Tensor | None = None  # [B, N] of the last proposal: see Grown
        self.has_fed = False  # whether there was one since the last step was observed

    @property
    def seconds_model(self) -> float:
        """Seconds of the draft model's passes."""
        return self.target.seconds

    def propose(self, context: Context, shape: Shape, draws: Draws, noise: Noise) -> TokenTree:
        """A tree as deep as each row and the model's own context have room for."""
        last = self.target.spec.max_positions - 1
        limits = [
            max(0, min(shape.depth, room, last - length))
            for room, length in zip(context.room, context.lengths, strict=True)
        ]
        self.limits, self.has_fed = limits, any(limits)
        if not self.has_fed:
            return root_tree(context.pending)
        grown = grow.grow(self, context, limits, shape, draws, noise)
        self.slots = grown.slots
        return grown.tree

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed all tokens not yet in the cache, the pending one last; rows without room are skipped and stay behind."""
        missing = [
            [min(token, self.num_tokens - 1) for token in row[filled:]] if limit else []
            for row, filled, limit in zip(context.history.ids, self.filled, limits, strict=True)
        ]
        logits = feed(self.target, missing, self.filled, head=True)
        assert logits is not None, "the pending token is never in the cache"
        if all(limits):
            base = context.length
        else:
            # A row without room computes unused values behind its own tokens, inside the model's context.
            places = [
                length if limit else filled
                for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
            ]
            base = torch.tensor(places, device=context.device)
        self.filled = [
            length + 1 if limit else filled
            for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
        ]
        if self.reads_law:
            temperatures = [[row.temperature] for row in context.processors.params]
            self.temperature = torch.tensor(temperatures, device=context.device)
            self.told, self.tokens = [logits], None
        return logits, base

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after W new nodes."""
        out = self.target.forward(tokens if self.knows_all else tokens.clamp(max=self.num_tokens - 1), plan)
        assert out.logits is not None
        self.hidden = out.hidden
        if self.reads_law:
            self.told, self.tokens = [out.logits, *self.told[:1]], tokens
        return out.logits

    @property
    def chance(self) -> Tensor | None:
        """See ``Expander``. A head with reads_law is called along a chain only: a node's parent was read before it."""
        if self.acceptance is None or self.hidden is None:
            return None
        if not self.reads_law:
            return predicted(self.acceptance, self.hidden)
        assert self.tokens is not None
        assert self.temperature is not None
        return predicted(self.acceptance, self.hidden, law_inputs(self.told[1], self.tokens, self.temperature))

    def observe(self, commit: Commit) -> None:
        """Move what was fed and kept behind the text, and count it as filled; the rest is fed at the next begin."""
        if not self.has_fed:
            return
        self.has_fed = False
        assert self.slots is not None
        kept: list[list[int]] = []  # slots behind the root's, of each row's kept nodes as far as they were fed
        for limit, slots, path in zip(self.limits, self.slots.tolist(), commit.path, strict=True):
            fed = [slots[node] for node in path] if limit else []
            kept.append(fed[: fed.index(-1)] if -1 in fed else fed)
        moved = any(slot != index for row in kept for index, slot in enumerate(row))
        if moved:
            width = max(map(len, kept))
            device = commit.length.device
            sources = torch.tensor([row + list(range(len(row), width)) for row in kept], device=device)
            # Behind a short path, and in rows that fed nothing, a slot is moved onto itself.
            self.target.commit(
                commit.length[:, None] + sources, commit.length[:, None] + torch.arange(width, device=device)
            )
        self.filled = [
            filled - 1 + len(row) if limit else filled
            for filled, limit, row in zip(self.filled, self.limits, kept, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows of the cache."""
        self.filled = [self.filled[row] for row in rows]
        self.limits = [self.limits[row] for row in rows]
        self.target.keep(torch.tensor(rows), max(self.filled, default=0))

    def join(self, other: Drafter, context: Context) -> None:
        """Add rows to the cache, as far as it holds their text."""
        assert isinstance(other, ModelDrafter)
        self.target.cache.join(other.target.cache, max(other.filled, default=0))
        self.filled += other.filled
        self.limits += other.limits
        self.slots = self.hidden = self.tokens = None
        self.told = []

    def lag(self, context: Context) -> list[int]:
        """What ``begin`` would feed before the pending token; nothing where the draft model's context is at its end."""
        last = self.target.spec.max_positions - 1
        return [
            length - filled if length < last else 0 for length, filled in zip(context.lengths, self.filled, strict=True)
        ]

    def warm(self, context: Context, row: int, most: int) -> int:
        """Feed one row by itself; never the pending token, whose logits ``begin`` needs."""
        unread, filled = self.lag(context)[row], self.filled[row]
        count = max(0, min(most, unread))
        if count:
            text = [min(token, self.num_tokens - 1) for token in context.history.ids[row][filled : filled + count]]
            alone = copy(self.target)
            alone.cache = self.target.cache.rows(row, row + 1)
            feed(alone, [text], [filled], head=False)
            self.filled[row] += count
        return unread - count


class DraftModel(Method):
    """``--method draft_model``: any causal LM of the target's vocabulary."""

    name = "draft_model"
    capabilities = Capabilities(
        "a smaller model of the same vocabulary",
        draws=True,
        needs_draft=True,
        opens_late=True,
        shapes=SHAPES.builtin,
    )

    def __init__(self, model: CausalModel, acceptance: AcceptanceHead | None = None) -> None:
        """acceptance: the acceptance head for the shape ``specdec``. Raises ModelError where it reads other hidden
        states."""
        if acceptance is not None:
            acceptance.check_drafter(self.name, model.spec.hidden_size, name="acceptance")
        self.model = model
        self.acceptance = None if acceptance is None else acceptance.eval()

    @property
    def bytes_per_token(self) -> int:
        """The draft model's keys and values."""
        return self.model.new_cache(0, 1).bytes_per_slot

    @property
    def foresees(self) -> bool:
        """With an acceptance head."""
        return self.acceptance is not None

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh cache for these rows."""
        return ModelDrafter(self.model, context, capacity, self.acceptance)


@dataclass(frozen=True)
class DraftModelConfig(MethodConfig):
    """A smaller model of the same vocabulary."""

    method = DraftModel.name
    capabilities = DraftModel.capabilities

    model: str | None = None  # hub id, directory, or None for the bundled draft (of the bundled target alone)
    acceptance: str | None = None  # directory of the acceptance head for shape "specdec"; None: the bundled draft's

    def load(self, loader: Loader) -> Method:
        """Load the draft model, and its acceptance head where the shape needs one."""
        draft = loader.draft(self.model or "bundled/draft")
        if not self.proposal_shape.asks_acceptance:
            return DraftModel(draft)
        if self.acceptance is None and self.model not in (None, "bundled/draft"):
            raise ConfigError(
                f"shape 'specdec' needs an acceptance head, and none is given for draft {self.model}: train one with "
                "'foretoken train acceptance' and give its directory as 'acceptance', or choose shape 'adaptive'"
            )
        return DraftModel(draft, load_acceptance(self.acceptance or "bundled/acceptance", draft.spec))
