"""Random EAGLE heads for the tiny models of tests/model/tiny.py."""

import torch

from foretell.core.tree import TokenTree
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.pair_head import PairHead
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from tests.model.tiny import VOCAB

SIZE = {
    "hidden_size": 32, "vocab_size": VOCAB, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
}  # fmt: skip
EAGLE3 = Eagle3HeadConfig(**SIZE, draft_vocab_size=40, layer_ids=(0, 1, 3), rope_theta=100.0)
EAGLE1 = Eagle1HeadConfig(**SIZE, tap_layer=3)


def random_head(config: Eagle1HeadConfig | Eagle3HeadConfig, seed: int = 0) -> PairHead:
    """A head in which every weight matters: no norm weight is 1, no bias 0, and the draft vocabulary is scattered."""
    generator = torch.Generator().manual_seed(seed)
    head: PairHead
    if isinstance(config, Eagle3HeadConfig):
        counts = torch.randint(0, 1000, (config.vocab_size,), generator=generator)
        head = Eagle3Head.fresh(config, generator, vocabulary=draft_vocabulary(counts, config.draft_vocab_size))
    else:
        head = Eagle1Head.fresh(config, generator)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= 10.0 if config.num_layers == 1 else 3.0  # logits of a size at which float32 still tells
    return head


def same_trees(trees: list[TokenTree], twins: list[TokenTree], rtol: float = 0, atol: float = 1e-5) -> None:
    """The same nodes, step by step, and distributions that differ by rounding."""
    for tree, twin in zip(trees, twins, strict=True):
        tree.check()
        assert torch.equal(tree.parent, twin.parent)
        assert torch.equal(tree.drawn_by, twin.drawn_by)
        assert torch.equal(tree.tokens[tree.valid], twin.tokens[twin.valid])
        assert (tree.q is None) == (twin.q is None)
        if tree.q is not None:
            torch.testing.assert_close(tree.q, twin.q, rtol=rtol, atol=atol)
