"""A smaller language model of the same vocabulary as drafter (Leviathan et al. 2211.17192). Of another: ``vocabulary``."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foretell.core.errors import ConfigError
from foretell.core.graphs import Graphs
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan, TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Commit, Context, Drafter, Method
from foretell.draft.growing import grow
from foretell.draft.growing.captured import Fed, Known, fits, grow_captured, move_captured, why_not
from foretell.draft.growing.frontier import Expander, Grown
from foretell.draft.shapes import SHAPES, Shape
from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher
from foretell.methods.acceptance.head import AcceptanceHead, distribution_inputs, predicted, speed_up
from foretell.model.cache import KVCache
from foretell.model.prefill import feed, read_few
from foretell.model.target import CausalModel, ModelSpec, Target


class ModelDrafter(Drafter):
    """The draft model with its own KV cache.

    Invariant: slots [0, filled[b]) hold KV of the first filled[b] tokens of row b's text. While a tree grows, its nodes
    lie after the pending token in the order in which they were fed; ``observe`` moves the kept ones right after the text.
    Leaves are never fed, so after full acceptance the last committed token is still missing (the classic off-by-one of
    drafters): ``begin`` feeds all missing tokens up to the pending one.
    """

    can_join = True
    can_wait = True

    def __init__(
        self, model: CausalModel, context: Context, capacity: int, acceptance: AcceptanceHead | None = None
    ) -> None:
        self.capacity = capacity
        self.acceptance = acceptance
        self.reads_law = acceptance is not None and acceptance.config.reads_law
        self.hidden: Tensor | None = None  # [B, W, H] after the nodes read by the last ``logits``: see Output.hidden
        # With reads_law: logits [B, 1, V] after the nodes read last, and before them
        self.recent_logits: list[Tensor] = []
        self.tokens: Tensor | None = None  # [B, 1] with reads_law: the nodes read last
        self.temperature: Tensor | None = None  # [B, 1] with reads_law
        self.target = Target(model, context.num_rows, capacity)
        self.num_tokens = model.spec.vocab_size  # a token beyond them (the target may have more) is fed as the last one
        self.knows_all = self.num_tokens >= context.processors.vocab_size
        self.filled = [0] * context.num_rows
        self.limits = [0] * context.num_rows  # of the last proposal: where it is 0 nothing was fed
        self.slots: Tensor | None = None  # [B, N] of the last proposal: see Grown
        self.has_fed = False  # whether there was one since the last step was observed
        self.graphs: Graphs | None = None  # of proposals and moves, while the cache lies where it lies
        self._memory = -1
        self.fed: Fed | None = None  # in a twin whose proposal is captured: what it reads first

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree as deep as each row and the model's own context have room for."""
        last = self.target.spec.max_positions - 1
        limits = [
            max(0, min(depth_limit, last - length))
            for depth_limit, length in zip(context.depth_limit, context.lengths, strict=True)
        ]
        self.limits, self.has_fed = limits, any(limits)
        if not self.has_fed:
            return root_tree(context.pending)
        before = self.target.seconds
        grown = self._captured(context, limits, shape, draws, noise)
        if grown is None:
            grown = grow.grow(self, context, limits, shape, draws, noise)
        if context.probe is not None:
            context.probe.seconds_model += self.target.seconds - before
        self.slots = grown.slots
        return grown.tree if grown.slots.is_cpu else replace(grown.tree, notes=grown.slots)

    def _captured(
        self, context: Context, limits: Sequence[int], shape: Shape, draws: DrawMode, noise: Noise
    ) -> Grown | None:
        """By a captured graph; None where that cannot be."""
        if context.graphs is None:
            return None
        if self.graphs is None or self._memory != self.target.cache.memory:
            self.graphs, self._memory = context.graphs.sibling(), self.target.cache.memory
        missing = self._missing(context, limits)
        if reason := self._why_not(context, missing):
            self.graphs.skipped(reason)
            return None
        bases = [
            length if limit else filled
            for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
        ]
        known = Known(missing, list(self.filled), bases, limits)

        def expander(fed: Fed, others: Sequence[Tensor], cache: KVCache) -> Expander:
            twin = copy(self)
            twin.target, twin.fed = Target.of(self.target.model, cache), fed
            return twin

        grown = grow_captured(self.graphs, expander, self.target.cache, known, context, shape, draws, noise)
        self._count_read(context, limits)
        return grown

    def _why_not(self, context: Context, missing: Sequence[Sequence[int]]) -> str:
        if type(self) is not ModelDrafter:
            return "the draft's vocabulary is not the target's"
        if self.target.spec.implementation != "lean":
            return f"the draft's implementation is {self.target.spec.implementation!r}"
        if self.reads_law:
            return "the acceptance head reads temperatures on the host"
        return why_not(context) or ("" if fits(missing) else "a draft model reads a long text")

    def texts(self, context: Context) -> list[list[int]]:
        """Each row's text in the draft model's tokens, the pending token last; context has its lengths."""
        return context.history.ids

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed all tokens not yet in the cache, the pending one last; rows without room are skipped and stay behind."""
        if (fed := self.fed) is not None:
            span = min(self.capacity, fed.span + fed.tokens.shape[1])
            return read_few(self.target, fed.tokens, fed.counts, fed.starts, span), fed.bases
        missing = self._missing(context, limits)
        logits = feed(self.target, missing, self.filled, head=True)
        assert logits is not None, "the pending token is never in the cache"
        if all(limits):
            base = context.length
        else:
            # A row without room computes unused values after its own tokens, inside the model's context.
            places = [
                length if limit else filled
                for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
            ]
            base = tensor_on(context.device, places)
        self._count_read(context, limits)
        if self.reads_law:
            temperatures = [[row.temperature] for row in context.processors.params]
            self.temperature = tensor_on(context.device, temperatures)
            self.recent_logits, self.tokens = [logits], None
        return logits, base

    def _missing(self, context: Context, limits: Sequence[int]) -> list[list[int]]:
        """Known tokens of each row that are not in the cache; none of rows without room."""
        # Rows without room are computed too, unused. One that has read its model's last position is computed there, in
        # place of its text, which it never reads again; behind it learned positions end.
        last = self.target.spec.max_positions - 1
        self.filled = [min(filled, last) for filled in self.filled]
        return [
            [min(token, self.num_tokens - 1) for token in row[filled:]] if limit else []
            for row, filled, limit in zip(self.texts(context), self.filled, limits, strict=True)
        ]

    def _count_read(self, context: Context, limits: Sequence[int]) -> None:
        """Rows with room have read their text."""
        self.filled = [
            length + 1 if limit else filled
            for length, filled, limit in zip(context.lengths, self.filled, limits, strict=True)
        ]

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after W new nodes."""
        out = self.target.forward(tokens if self.knows_all else tokens.clamp(max=self.num_tokens - 1), plan)
        assert out.logits is not None
        self.hidden = out.hidden
        if self.reads_law:
            self.recent_logits, self.tokens = [out.logits, *self.recent_logits[:1]], tokens
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
        inputs = distribution_inputs(self.recent_logits[1], self.tokens, self.temperature)
        return predicted(self.acceptance, self.hidden, inputs)

    def observe(self, commit: Commit) -> None:
        """Move what was fed and kept after the text, and count it as filled; the rest is fed at the next begin."""
        if not self.has_fed:
            return
        self.has_fed = False
        assert self.slots is not None
        kept: list[list[int]] = []  # slots after the root's, of each row's kept nodes as far as they were fed
        known = self.slots.tolist() if commit.notes is None or self.slots.is_cpu else commit.notes
        for limit, slots, path in zip(self.limits, known, commit.path, strict=True):
            fed = [slots[node] if node < len(slots) else -1 for node in path] if limit else []  # others' nodes: not fed
            kept.append(fed[: fed.index(-1)] if -1 in fed else fed)
        moved = any(slot != index for row in kept for index, slot in enumerate(row))
        if moved and self.graphs is not None and self._memory == self.target.cache.memory:
            move_captured(self.graphs.moves, self.target.cache, kept, [max(0, filled - 1) for filled in self.filled])
        elif moved:
            width = max(map(len, kept))
            device = commit.length.device
            sources = tensor_on(device, [row + list(range(len(row), width)) for row in kept])
            # After a short path, and in rows that fed nothing, a slot is moved onto itself.
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
        self.target.cache.join(other.target.cache, max(other.filled, default=0), max(self.filled, default=0))
        self.filled += other.filled
        self.limits += other.limits
        self.slots = self.hidden = self.tokens = None
        self.recent_logits = []

    def adopt(self, method: Method) -> None:
        """The texts are read again, by the new model, before the next guess."""
        assert isinstance(method, DraftModel)
        self.acceptance = method.acceptance
        seconds = self.target.seconds
        self.target = Target(method.model, len(self.filled), self.capacity)
        self.target.seconds = seconds
        self.filled = [0] * len(self.filled)
        self.has_fed, self.slots, self.hidden, self.tokens = False, None, None, None
        self.recent_logits = []

    def num_unread(self, context: Context) -> list[int]:
        """What ``begin`` would feed before the pending token; nothing where the draft model's context is at its end."""
        last = self.target.spec.max_positions - 1
        return [
            length - filled if length < last else 0 for length, filled in zip(context.lengths, self.filled, strict=True)
        ]

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """Feed one row by itself; never the pending token, whose logits ``begin`` needs."""
        unread, filled = self.num_unread(context)[row], self.filled[row]
        count = max(0, min(most, unread))
        if count:
            text = [min(token, self.num_tokens - 1) for token in self.texts(context)[row][filled : filled + count]]
            alone = copy(self.target)
            alone.cache = self.target.cache.rows(row, row + 1)
            feed(alone, [text], [filled], head=False)
            self.filled[row] += count
        return unread - count


class DraftModel(Method):
    """``--method draft_model``: any causal LM of the target's vocabulary; of another vocabulary: ``TranslatedDraft``."""

    name = "draft_model"
    capabilities = Capabilities(
        "a smaller model of the same vocabulary", draws=True, needs_draft=True, opens_late=True, shapes=SHAPES.builtin
    )

    def __init__(self, model: CausalModel, acceptance: AcceptanceHead | None = None) -> None:
        """acceptance: the acceptance head for the shape ``specdec``. Raises ModelError where it reads other hidden
        states."""
        if acceptance is not None:
            acceptance.check_drafter(self.name, model.spec.hidden_size, name="acceptance")
        self.model, self.max_positions = model, model.spec.max_positions
        self.acceptance = None if acceptance is None else speed_up(acceptance, model)

    def rebuilt(self, weights: Mapping[str, Tensor]) -> "DraftModel":
        """See ``Method``. The acceptance head is kept."""
        made = copy(self)
        made.model = self.model.rebuilt(weights)
        return made

    @property
    def bytes_per_token(self) -> int:
        """The draft model's keys and values."""
        return self.model.new_cache(0, 1).bytes_per_slot

    @property
    def bytes_per_row(self) -> int:
        """The draft model's recurrent states, where it has some."""
        return self.model.new_cache(0, 1).bytes_per_row

    @property
    def chains_only(self) -> str:
        """The draft model's own reason."""
        return self.model.spec.chains_only

    @property
    def foresees(self) -> bool:
        """With an acceptance head."""
        return self.acceptance is not None

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh cache for these rows."""
        return ModelDrafter(self.model, context, capacity, self.acceptance)


def check_draft(draft: ModelSpec, target: ModelSpec, longest: int, *, name: str) -> None:
    """Raise ConfigError where a model cannot read the target's texts, of at most ``longest`` tokens, as they are."""
    if abs(draft.vocab_size - target.vocab_size) > 0.01 * target.vocab_size:
        raise ConfigError(
            f"--init {name} has a vocabulary of {draft.vocab_size} tokens, and target {target.name!r} one of "
            f"{target.vocab_size}: it is trained on the target's tokens, so give a model of the same vocabulary"
        )
    if longest > draft.max_positions:
        raise ConfigError(
            f"--init {name} reads texts of at most {draft.max_positions} tokens, and the longest has {longest}: give "
            f"max_length = {draft.max_positions}"
        )


class DraftModelObjective(Objective):
    """One slot: a draft model reads only the text, so slot k equals slot 1 at a later position.

    DistillSpec (2310.08461), by any divergence of ``train.losses``. The paper finds training on the target's text
    nearly as good as on the draft's own, and far cheaper.
    """

    stepwise = True

    def __init__(
        self, module: nn.Module, *, divergence: str = "forward_kl", tokens: Tensor | None = None,
        num_tokens: int = 2**62,
    ) -> None:  # fmt: skip
        """module: called as ``module(input_ids=[B, T], use_cache=False)``, it answers with ``.logits`` [B, T, Vd].
        tokens [n] int64: the only ones that the drafter guesses; None: all. num_tokens: that it has embeddings of; what
        lies beyond is read as the last one, as in drafting."""
        self.num_tokens = num_tokens
        self.head, self.divergence, self.tokens = module, divergence, tokens

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """Nothing is drawn. Texts are padded on the right, which a causal model does not see: no mask is needed.

        Vocabularies of different size (padding, as a rule) are compared on the columns that both have.
        """
        row, at = labeled.batch.supervised.nonzero(as_tuple=True)
        known = min(self.num_tokens, teacher.model.spec.vocab_size)
        answer: Any = self.head(input_ids=labeled.batch.tokens.clamp(max=known - 1), use_cache=False)
        logits: Tensor = answer.logits[row, at]
        if self.tokens is not None:
            vocab = self.tokens.to(logits.device)
            return Outcome([LossSlot(logits[:, vocab].float(), row, at, vocab=vocab)])
        wide, mine = teacher.model.spec.vocab_size, logits.shape[-1]
        both = torch.arange(mine, device=logits.device) if mine < wide else None
        return Outcome([LossSlot(logits[:, :wide].float(), row, at, vocab=both)])
