"""Medusa (Cai et al. 2401.10774): several heads on one hidden state, each guessing one token further ahead.

Head k = 1, 2, ... at position t predicts token t + k + 1; the target's own head predicts token t + 1. A head is residual
blocks x + silu(W x + b), then a linear layer to the vocabulary, both on the target's final-norm hidden state. Each block
has weights of its own. (Code in use lists one block several times, so that all blocks of a head are one: harmless with
the one block of the published checkpoints.)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.core.errors import ModelError
from foretell.heads.head import Head, HeadConfig
from foretell.heads.teacher import LabeledBatch, LossSlot, Objective, Outcome, Teacher
from foretell.model.target import CausalModel


@dataclass(frozen=True)
class MedusaHeadConfig(HeadConfig):
    """Sizes of a set of heads."""

    num_heads: int  # K
    num_layers: int  # residual blocks of a head
    tap_layer: int  # the target's last
    draft_vocab_size: int  # DV: columns of each head, V unless the vocabulary was reduced
    own_lm_head: bool = True  # False: every head ends in the target's own linear layer ("original_lm_head" of vLLM)


class ResBlock(nn.Module):
    """x + silu(W x + b), the identity until it is trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        out: Tensor = x + F.silu(self.linear(x))
        return out


@dataclass(frozen=True)
class Stacked:
    """The weights of all heads side by side: a decode step runs them in a few products, however many there are."""

    blocks: tuple[tuple[Tensor, Tensor], ...]  # of each block: W [K, H, H] and b [K, H, 1]
    out: Tensor | None  # [K, DV, H]; None: the heads end in the target's own linear layer

    def __call__(self, x: Tensor, num_heads: int) -> Tensor:
        """The outputs of the first num_heads heads for x [B, H]: logits [B, n, DV], or [B, n, H] without ``out``."""
        h = x.t().expand(num_heads, -1, -1)  # [n, H, B]: weights on the left is the faster product, at B = 1 or 4 by 2
        for weight, bias in self.blocks:
            h = h + F.silu(torch.baddbmm(bias[:num_heads], weight[:num_heads], h))
        if self.out is not None:
            h = torch.bmm(self.out[:num_heads], h)
        return h.permute(2, 0, 1)


class MedusaHead(Head):
    """K heads, named as in their authors' checkpoints: block j of head k (both from 0) is ``{k}.{j}.linear.weight`` [H, H]
    and ``{k}.{j}.linear.bias`` [H], head k's linear layer ``{k}.{num_layers}.weight`` [DV, H], without bias. With a reduced
    vocabulary ``token_map`` [DV] int64 holds the target ids of the columns."""

    method: ClassVar[str] = "medusa"
    config: MedusaHeadConfig
    token_map: Tensor | None

    def __init__(self, config: MedusaHeadConfig) -> None:
        super().__init__()
        self.config = config
        for index in range(config.num_heads):
            layers: list[nn.Module] = [ResBlock(config.hidden_size) for _ in range(config.num_layers)]
            if config.own_lm_head:
                layers.append(nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False))
            self.add_module(str(index), nn.Sequential(*layers))
        reduced = config.draft_vocab_size < config.vocab_size
        if reduced and not config.own_lm_head:
            raise ModelError(
                f"Medusa heads that end in the target's own head have its {config.vocab_size} columns, not "
                f"draft_vocab_size = {config.draft_vocab_size}: leave it at {config.vocab_size}, or set own_lm_head"
            )
        self.register_buffer("token_map", torch.arange(config.draft_vocab_size) if reduced else None)

    @property
    def taps(self) -> tuple[int, ...]:
        """One layer."""
        return (self.config.tap_layer,)

    def one(self, index: int) -> nn.Sequential:
        """The head that guesses token t + index + 2."""
        head = self.get_submodule(str(index))
        assert isinstance(head, nn.Sequential)
        return head

    def forward(self, x: Tensor, index: int) -> Tensor:
        """The output of head ``index``, from 0, for final-norm hidden states x [..., H]: logits [..., DV], or [..., H]
        for the target's own linear layer. The form of ``stacked`` that training uses."""
        out: Tensor = self.one(index)(x)
        return out

    @torch.no_grad()
    def stacked(self) -> Stacked:
        """All weights side by side. The parameters become views of the stacked tensors, so nothing is stored twice."""
        heads = [self.one(index) for index in range(self.config.num_heads)]

        def gather(parameters: list[nn.Parameter]) -> Tensor:
            together = torch.stack([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, together, strict=True):
                parameter.data = part
            return together

        blocks = []
        for layer in range(self.config.num_layers):
            linears = [head.get_submodule(f"{layer}.linear") for head in heads]
            weight = gather([linear.get_parameter("weight") for linear in linears])
            bias = gather([linear.get_parameter("bias") for linear in linears])
            blocks.append((weight, bias[:, :, None]))
        last = f"{self.config.num_layers}.weight"
        out = gather([head.get_parameter(last) for head in heads]) if self.config.own_lm_head else None
        return Stacked(tuple(blocks), out)

    @classmethod
    @torch.no_grad()
    def fresh(
        cls,
        model: CausalModel,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        tap_layer: int | None = None,
        draft_vocab: Tensor | None = None,
        own_lm_head: bool = True,
    ) -> "MedusaHead":
        """Untrained float32 heads for a target: blocks are the identity, linear layers the target's own head, so each
        head starts with the target's logits of token t + 1.

        draft_vocab [DV] int64: target ids, ascending, of a reduced vocabulary.
        """
        spec = model.spec
        size = spec.vocab_size if draft_vocab is None else len(draft_vocab)
        tap = spec.num_layers - 1 if tap_layer is None else tap_layer
        config = MedusaHeadConfig(spec.hidden_size, spec.vocab_size, num_heads, num_layers, tap, size, own_lm_head)
        head = cls(config)
        if head.token_map is not None and draft_vocab is not None:
            head.token_map.copy_(draft_vocab)
        if own_lm_head:
            weight = head_weight(model)
            chosen = weight if draft_vocab is None else weight[draft_vocab.to(weight.device)]
            for index in range(num_heads):
                head.one(index).get_parameter(f"{num_layers}.weight").copy_(chosen)
        return head


@torch.no_grad()
def head_weight(model: CausalModel) -> Tensor:
    """[V, H] float32: the linear layer of a target's head, for every implementation: its outputs for all unit vectors.

    Where the head has a bias, or caps its logits, this is its linear part at zero.
    """
    size, spec = model.spec.hidden_size, model.spec
    units = torch.eye(size + 1, size, dtype=spec.dtype, device=spec.device)  # the last row is zero
    columns: Tensor = model.head(units[None])[0].float()  # [H + 1, V]
    return (columns[:-1] - columns[-1]).t().contiguous()


def norm_weight(model: CausalModel) -> Tensor:
    """[H] float32: the weight of a target's final norm, for every implementation; of a layer norm without its shift. A
    vector of +1 and -1 in turn has mean 0 and root mean square 1."""
    size, spec = model.spec.hidden_size, model.spec
    even = torch.ones(size, dtype=spec.dtype, device=spec.device)
    even[1::2] = -1.0
    both = model.normed(torch.stack((even, -even))[None])[0].float()
    return (both[0] - both[1]) / 2.0 * even.float()


class MedusaObjective(Objective):
    """Head k = 1, 2, ... at position t imitates p of token t + k + 1, which stands at t + k; its weight is decay ** k,
    as distant heads are wrong more often and would otherwise dominate the loss."""

    head: MedusaHead

    def __init__(self, head: MedusaHead, *, decay: float = 0.8) -> None:
        self.head, self.decay = head, decay

    def outcome(
        self, labeled: LabeledBatch, teacher: Teacher, generator: torch.Generator, *, training: bool
    ) -> Outcome:
        """A slot a head. Places t whose token t + k + 1 is of the response, t itself in the prompt or not: decoding begins
        with the hidden state of the prompt's last token but one."""
        model, head = teacher.model, self.head
        with torch.no_grad():
            normed = model.normed(labeled.taps.to(model.spec.dtype)).to(head.dtype)  # [B, T, H]
        supervised, slots = labeled.batch.supervised, []
        for index in range(head.config.num_heads):
            ahead = index + 1
            row, at = supervised[:, ahead:].nonzero(as_tuple=True)  # at counts from ahead: it is t itself
            said: Tensor = head(normed[row, at], index)  # [M, DV], or [M, H]
            if not head.config.own_lm_head:
                said = model.head(said[None].to(model.spec.dtype))[0]
            slots.append(LossSlot(said, row, at + ahead, self.decay**ahead, head.token_map))
        return Outcome(slots)
