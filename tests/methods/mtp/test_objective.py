"""Training of an MTP module: three slots on its own outputs, and every weight learns."""

import torch

from foretell.methods.mtp.objective import MTPObjective
from foretell.methods.mtp.trained import MTPHead, MTPHeadConfig
from tests.methods.eagle.test_objective import MODULE, TEACHER, labeled_for, loss, outcome


def fresh() -> MTPObjective:
    spec = TEACHER.model.spec
    config = MTPHeadConfig(
        spec.hidden_size, spec.vocab_size, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8,
        tap_layer=spec.num_layers - 1,
    )  # fmt: skip
    return MTPObjective(
        MTPHead.fresh(config, torch.Generator().manual_seed(1), final_norm=torch.ones(spec.hidden_size))
    )


def test_gradients_reach_every_weight_and_steps_reduce_the_loss() -> None:
    objective = fresh()
    labeled = labeled_for(objective)
    first = outcome(objective, labeled, training=True)
    assert len(first.slots) == 3
    assert [slot.weight for slot in first.slots] == [1.0, 0.6, 0.36]
    optimizer = torch.optim.AdamW(objective.head.parameters(), lr=3e-3)
    before = float(loss(first, labeled).detach())
    for step in range(30):
        optimizer.zero_grad()
        value = loss(outcome(objective, labeled, training=True, seed=step), labeled)
        value.backward()
        if not step:
            still = [
                name
                for name, p in objective.head.named_parameters()
                if p.grad is None or not bool(p.grad.abs().sum() > 0)
            ]
            assert not still
        optimizer.step()
    assert float(value.detach()) < 0.8 * before
    assert all(p.grad is None for p in MODULE.parameters()), "the target is frozen"
