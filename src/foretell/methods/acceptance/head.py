"""The acceptance head of SpecDec++ (Huang et al. 2405.19715): the probability that the target keeps the guess that the
drafter just read.

Residual blocks x + silu(W x + b), each with weights of its own, and a linear layer, on the frozen drafter's last hidden
state. It is trained with rejections weighted up, so its raw output is too pessimistic to be a probability: ``scale`` and
``shift`` (Platt scaling) are fitted on held-out text by ``objective.py``'s ``calibrate``.

``reads_law`` departs from the paper: besides the hidden state the head then reads four numbers of the distribution that
the guess was drawn from (``distribution_inputs``). A hidden state after the guess does not hold q(x), which alone predicts
acceptance well, nor the temperature, on which acceptance depends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.core.errors import ModelError
from foretell.heads.head import Head, HeadConfig
from foretell.heads.layout import FlatLayout
from foretell.heads.native import Memory, NativeBlocks
from foretell.kernels import heads
from foretell.methods.medusa.head import ResBlock
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel, ModelSpec

NUM_LAW_INPUTS = 4


@dataclass(frozen=True)
class AcceptanceHeadConfig(HeadConfig):
    """Sizes, and what the head was trained on. ``hidden_size`` is here that of the *drafter's* hidden state."""

    num_layers: int  # residual blocks; 0: logistic regression
    normalize: bool  # divide each hidden state by its root mean square first
    drafter: str  # name of the method whose hidden states it reads
    reads_law: bool = False  # also reads ``distribution_inputs``; False: as in the paper

    @property
    def width(self) -> int:
        """Numbers that the head reads of each guess."""
        return self.hidden_size + (NUM_LAW_INPUTS if self.reads_law else 0)


class AcceptanceHead(Head):
    """Names: ``blocks.{j}.linear.weight`` [W, W], ``blocks.{j}.linear.bias`` [W], ``out.weight`` [1, W], ``out.bias`` [1],
    and the float32 scalars ``scale`` and ``shift``; W is ``config.width``."""

    method: ClassVar[str] = "acceptance"
    config: AcceptanceHeadConfig
    scale: Tensor
    shift: Tensor

    def __init__(self, config: AcceptanceHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.native: Callable[[Tensor], Tensor] | None = None  # the blocks and ``out`` by other means: see ``speed_up``
        self.blocks = nn.ModuleList(ResBlock(config.width) for _ in range(config.num_layers))
        self.out = nn.Linear(config.width, 1)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))
        self.register_buffer("shift", torch.zeros((), dtype=torch.float32))

    def check_target(self, spec: ModelSpec, *, name: str) -> None:
        """Raise ModelError where the target, or the draft model beside it, has another vocabulary: hidden states are not
        read. Sizes that padding alone tells apart are taken: a head is trained on the target's, and read beside a draft's.
        """
        if abs(self.config.vocab_size - spec.vocab_size) > 0.01 * spec.vocab_size:
            raise ModelError(
                f"{name}: this acceptance head was trained for a target of vocabulary {self.config.vocab_size}, and "
                f"{spec.name!r} has {spec.vocab_size}: train one for this target with 'foretell train acceptance'"
            )

    def check_drafter(self, method: str, hidden_size: int, *, name: str) -> None:
        """Raise ModelError where the hidden states are not those that the head was trained on."""
        if (method, hidden_size) != (self.config.drafter, self.config.hidden_size):
            raise ModelError(
                f"{name}: this acceptance head was trained on hidden states of {self.config.drafter!r}, "
                f"{self.config.hidden_size} wide, and those of {method!r} here are {hidden_size} wide: train one for this "
                "drafter with 'foretell train acceptance'"
            )

    def forward(self, hidden: Tensor, probs: Tensor | None = None) -> Tensor:
        """hidden [..., H] after reading a guess -> [...] float32 raw logit of "the target keeps that guess".

        probs [..., 4] is what ``distribution_inputs`` returned for the guess; given if and only if ``config.reads_law``.
        """
        x = hidden.to(self.dtype)
        if self.config.normalize:
            x = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        if self.config.reads_law:
            assert probs is not None, "a head that reads the distribution is given it"
            x = torch.cat((x, probs.to(self.dtype)), -1)
        if self.native is not None and not torch.is_grad_enabled():
            return self.native(x)[..., 0]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(x)[..., 0].float()
        return logits


def distribution_inputs(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """[..., 4] float32 of guesses tokens [...] int64, drawn after the drafter's logits [..., V] at temperature [...]:
    log q(x), log max q and the entropy of q in nats, q being softmax(logits) at temperature 1 without any processor,
    and the temperature. log q(x) is at least -20: tokens with q(x) = 0 have that value."""
    logged = torch.log_softmax(logits.float(), -1)
    size = logits.shape[-1]
    said = logged.gather(-1, tokens.clamp(max=size - 1)[..., None])[..., 0].masked_fill(tokens >= size, -20.0)
    entropy = -(logged.exp() * logged.clamp(min=-1e4)).sum(-1)
    return torch.stack((said.clamp(min=-20.0), logged.amax(-1), entropy, temperature.to(logged.dtype)), -1)


def predicted(head: AcceptanceHead, hidden: Tensor, probs: Tensor | None = None) -> Tensor:
    """[...] float32: the calibrated probability that the target keeps the guesses after which a drafter's hidden state is
    hidden [..., H], each given that it kept the guesses before it. What a drafter's ``chance`` returns. probs: as for
    ``AcceptanceHead.forward``."""
    return torch.sigmoid(head(hidden, probs) * head.scale + head.shift)


class AcceptanceLayout(FlatLayout):
    """SpecDec++'s acceptance head."""

    summary = "SpecDec++'s acceptance head (foretell alone)"
    head = AcceptanceHead
    config = AcceptanceHeadConfig


def speed_up(head: AcceptanceHead, model: CausalModel) -> AcceptanceHead:
    """The head in eval mode, its products by the C kernels where model, which it decodes beside, is a native one."""
    plain = {parameter.dtype for parameter in head.parameters()} <= {torch.float32, torch.bfloat16}
    able = isinstance(model, NativeModel) and head.blocks and plain and heads.library()[0] is not None
    if able and head.native is None:
        linears = [block.linear for block in head.blocks if isinstance(block, ResBlock)]
        blocks = NativeBlocks(Memory(head), [linears], [head.out], head.config.width)
        head.native = lambda x: blocks(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)
    return head.eval()
