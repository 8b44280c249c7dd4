"""Medusa's heads through the C kernels. ``Stacked`` is the slow twin."""

from torch import Tensor, nn

from foretell.heads.native import Memory, Vocabulary, refusal, rounding
from foretell.heads.native_blocks import NativeBlocks
from foretell.methods.medusa.head import MedusaHead, ResBlock
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel


class NativeMedusa:
    """All heads in one call."""

    def __init__(self, head: MedusaHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        config, self.model = head.config, model
        self.memory = Memory(head, weights)
        heads = [list(head.one(index)) for index in range(config.num_heads)]
        blocks = [[block.linear for block in layers if isinstance(block, ResBlock)] for layers in heads]
        outs = [layers[-1] for layers in heads if isinstance(layers[-1], nn.Linear)]
        self._out = self.memory.head_of(model) if not outs else None
        own = Vocabulary(head.token_map, config.vocab_size, self.memory) if outs else None
        self.blocks = NativeBlocks(self.memory, blocks, outs, config.hidden_size, own)
        self.vocabulary = Vocabulary(None, config.vocab_size, self.memory)  # of the logits that come out

    def __call__(self, x: Tensor, num_heads: int) -> Tensor:
        """Final-norm hidden states x [B, H] -> logits [B, num_heads, V] of the first heads, float32."""
        out = self.blocks(x, num_heads)
        if self._out is None:
            return out
        return self.model.finished(self.memory.product(self._out, out, self.vocabulary.size))


def native_medusa(
    head: MedusaHead, model: CausalModel, weights: str = "auto"
) -> tuple[NativeMedusa | None, str | None]:
    """The heads through the native kernels, or None and why not. weights: one of ``heads.native.WEIGHTS``."""
    reason = refusal(head, model)
    if reason is None and head.config.num_heads > MOST_HEADS:
        reason = f"it has {head.config.num_heads} heads, and the native kernels run at most {MOST_HEADS}"
    if reason is not None:
        return None, reason
    assert isinstance(model, NativeModel)
    return NativeMedusa(head, model, rounding(weights, model)), None


MOST_HEADS = 64  # MAX_HEADS of kernels/native/blocks.h
