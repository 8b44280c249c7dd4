"""P-EAGLE (2602.01469): an EAGLE-3 head that makes all guesses of a step in one pass.

Behind the pair of the pending token stand *masked pairs*: the embedding of a mask token, and the fusion of one learned
vector in place of the target's outputs. Masked pair d stands d positions further on, sees the pairs of the text and the
masked pairs before it, and its output guesses token d + 1 after the pending one. No guess reads another: distributions
are marginals, as DFlash's are.

The masked pairs' keys and values are never counted: the text's own pairs overwrite them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError
from foretell.core.tree import Plan, chain_parent, layout
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Context, Drafter
from foretell.draft.shapes import SHAPES
from foretell.methods.eagle.drafter import EagleDrafter
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.head_method import HeadMethod
from foretell.model.prefill import PREFILL_CHUNK, round_up
from foretell.model.target import CausalModel, Target

MOST_GUESSES = 64
"""In a line: what the cache has room for behind a text."""


@dataclass(frozen=True)
class PEagleHeadConfig(Eagle3HeadConfig):
    """Sizes and options of an EAGLE-3 head, and its mask token."""

    mask_token_id: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a mask token that no embedding has."""
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelError(
                f"mask_token_id = {self.mask_token_id} must be a token of the vocabulary of {self.vocab_size}"
            )


class PEagleHead(Eagle3Head):
    """The head: EAGLE-3's, and ``mask_hidden`` [1, 1, taps * H]."""

    method = "peagle"
    config: PEagleHeadConfig

    def __init__(self, config: PEagleHeadConfig) -> None:
        """See ``Eagle3Head``."""
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.layer_ids) * config.hidden_size))

    def masked_feature(self) -> Tensor:
        """[1, 1, H] the feature of every masked pair."""
        return self.fuse(self.mask_hidden)


class PEagleDrafter(EagleDrafter):
    """The head with a cache of its own; see ``EagleDrafter`` for the pairs of the text."""

    head: PEagleHead

    def __init__(self, head: PEagleHead, model: CausalModel, context: Context, capacity: int) -> None:
        """capacity: of the target's rows; masked pairs may stand behind it."""
        super().__init__(head, model, context, capacity + MOST_GUESSES)
        with torch.no_grad():
            self.masked = head.masked_feature()
        self.block = torch.empty(0)  # [B, D, V] logits: of guess d + 1 of the step

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read all pairs up to the pending token's that are not in the cache, and the masked pairs behind them."""
        features, ids, starts = self._take(context, limits)
        more, mask = max(limits) - 1, self.head.config.mask_token_id
        width = features.shape[1] + more
        if (
            width > PREFILL_CHUNK or max(starts) + width > self.capacity
        ):  # long texts: their pairs first, as far as each has
            _, read = self._read(features, ids, starts)
            features = features[:, :0]
            starts, ids = [start + len(row) for start, row in zip(starts, ids, strict=True)], [[] for _ in ids]
            parts = [read] + ([self._block(features, ids, starts, more, mask)[:, 1:]] if more else [])
        else:
            parts = [self._block(features, ids, starts, more, mask)]
        self.block = self._logits(torch.cat(parts, 1))
        return self.block[:, :1], context.length

    def _block(self, features: Tensor, ids: list[list[int]], starts: list[int], more: int, mask: int) -> Tensor:
        """One pass over known pairs, features [B, n, H] of which row b has len(ids[b]) in slots starts[b] and on, and
        masked ones behind each row's last: what ``leave`` reads at the last known pair and at the masked ones
        [B, 1 + more, H]. Of a row without known pairs the first is of no use."""
        device, known = features.device, features.shape[1]
        width, counts = known + more, tensor_on(device, [len(row) for row in ids])
        tokens = tensor_on(device, [row + [mask] * (width - len(row)) for row in ids])
        index = torch.arange(width, device=device)
        padded = torch.cat([features, self.masked.expand(len(ids), more, -1).to(features.dtype)], 1)
        given = torch.where((index < counts[:, None])[..., None], padded, self.masked.to(features.dtype))
        span = min(self.capacity, round_up(max(starts) + width, 64))
        parent = chain_parent(width, device).expand(len(ids), -1)
        plan = layout(parent, tensor_on(device, starts), self.capacity, span=span)
        self.hidden, read = self.run(tokens, given, plan)
        at = (counts[:, None] - 1 + torch.arange(more + 1, device=device)).clamp(min=0)
        return read.gather(1, at[..., None].expand(-1, -1, read.shape[2]))

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after W new nodes: those of their depth, without a pass."""
        depth = (plan.positions - plan.length[:, None]).clamp(max=self.block.shape[1] - 1)
        return self.block[torch.arange(len(tokens), device=tokens.device)[:, None], depth]


class PEagle(HeadMethod):
    """``--method peagle``."""

    name = "peagle"
    capabilities = Capabilities(
        "EAGLE-3's head with all guesses in one pass",
        draws=True,
        needs_head=True,
        reads_target=True,
        shapes=tuple(name for name in SHAPES.builtin if name != "specdec"),  # no acceptance head is trained for it
    )
    head: PEagleHead

    def _natively(self) -> tuple[None, str]:
        return None, "one pass makes all guesses"

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh cache for these rows."""
        return PEagleDrafter(self.head, self.model, context, capacity)
