"""Kangaroo: an adapter after the target's own lower layers."""

import torch

from foretell.core.noise import int64_seed
from foretell.heads.teacher import Objective
from foretell.methods.kangaroo.head import KangarooHead, KangarooObjective
from foretell.train.making import Making, Options, Recipe, shaped


def build(making: Making, options: Options) -> Objective:
    """An adapter after the exit layer."""
    given = shaped(making, options, "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int64_seed(making.seed))
        head = making.head(
            KangarooHead, lambda: KangarooHead.fresh(making.model, exit_layer=options["exit_layer"], **given)
        )
    return KangarooObjective(head)


RECIPE = Recipe(
    build,
    {"exit_layer": 2, **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps"))},
)  # fmt: skip
