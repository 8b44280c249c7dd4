"""``foretell train acceptance --init HEAD``: a short run for every stepwise head, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.errors import ConfigError, ModelError
from foretell.heads import formats
from foretell.heads.head import Head
from foretell.heads.teacher import Teacher
from foretell.methods.acceptance.load import load_acceptance
from foretell.methods.acceptance.objective import AcceptanceObjective
from foretell.methods.acceptance.reading import AdapterReader, PairReader, open_reader
from foretell.methods.medusa.head import MedusaHead
from foretell.train import methods
from foretell.train.trainer import LOG, train
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.methods.kangaroo.test_head import random_head as random_adapter
from tests.train.harness import teacher, texts

TEACHER = teacher()
HEADS: dict[str, Head] = {"eagle1": random_head(EAGLE1), "eagle3": random_head(EAGLE3), "kangaroo": random_adapter()}
CONFIG: dict[str, Any] = {
    "steps": 40, "batch_tokens": 512, "eval_every": 0, "eval_tokens": 200, "held_out": 0.2, "lr": 0.02, "target_share": 0.5,
    "num_slots": 3, "weight_decay": 0.0,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    """Directories of heads."""
    heads = {**HEADS, "medusa": MedusaHead.fresh(TEACHER.model, num_heads=1)}
    for name, head in heads.items():
        formats.save(head, tmp_path / "heads" / name, target=TEACHER.model.spec)
    return {name: str(tmp_path / "heads" / name) for name in heads}


@pytest.mark.parametrize("name", HEADS)
def test_a_short_run(saved: dict[str, str], tmp_path: Path, name: str) -> None:
    """The loss falls, the head says whose hidden states it reads, and it is calibrated."""
    model, out = TEACHER.model, tmp_path / "out"
    prepared = methods.prepare("acceptance", model, texts(), CONFIG, init=saved[name])
    assert prepared.objective.taps == HEADS[name].taps
    train(prepared.objective, TEACHER, texts(), out, prepared.config, save=prepared.save, finish=prepared.finish)
    losses = [json.loads(line)["loss"] for line in (out / LOG).read_text().splitlines()]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    made = load_acceptance(str(out), model.spec)
    made.check_drafter(name, model.spec.hidden_size, name="here")
    assert (float(made.scale), float(made.shift)) != (1.0, 0.0)


def test_the_drafter_stays_as_it_is(saved: dict[str, str]) -> None:
    """No gradient reaches it, and all of the acceptance head learns."""
    for name in HEADS:
        objective = methods.prepare("acceptance", TEACHER.model, texts(), CONFIG, init=saved[name]).objective
        assert isinstance(objective, AcceptanceObjective)
        labeled = TEACHER.label(texts().batch(list(range(8))), objective.taps)
        outcome = objective.outcome(labeled, TEACHER, torch.Generator().manual_seed(2), training=True)
        assert outcome.extra is not None
        outcome.extra.backward()
        assert all(parameter.grad is not None for parameter in objective.head.parameters())
        reader = objective.reader
        assert isinstance(reader, PairReader | AdapterReader)
        assert not any(parameter.requires_grad for parameter in reader.head.parameters())


def test_more_depths_are_more_places(saved: dict[str, str]) -> None:
    """num_slots is how deep a pair head is read; Kangaroo's depths are one."""
    batch = texts().batch([0, 1, 2])
    for name in HEADS:
        counts = []
        for num_slots in (1, 2):
            reader = open_reader(saved[name], TEACHER.model, num_slots=num_slots)
            objective = methods.prepare("acceptance", TEACHER.model, texts(), CONFIG, init=saved[name]).objective
            assert isinstance(objective, AcceptanceObjective)
            objective.reader = reader
            labeled = TEACHER.label(batch, objective.taps)
            counts.append(len(objective.places(labeled, TEACHER, torch.Generator().manual_seed(1)).labels))
        assert counts[0] > 0
        assert (counts[0] < counts[1]) == (name != "kangaroo")


def test_refusals(saved: dict[str, str], tmp_path: Path) -> None:
    def prepare(init: str | None, teacher: Teacher = TEACHER, **changes: Any) -> None:
        methods.prepare("acceptance", teacher.model, texts(), {**CONFIG, **changes}, init=init)

    with pytest.raises(ConfigError, match="'medusa', which does not read its guesses"):
        prepare(saved["medusa"])
    with pytest.raises(ConfigError, match="num_slots = 0"):
        prepare(saved["eagle3"], num_slots=0)
    with pytest.raises(ConfigError, match="prefix = \"target\" is known for draft models, and 'kangaroo'"):
        prepare(saved["kangaroo"], prefix="target")
    with pytest.raises(ConfigError, match=r"reads_law = true.*'eagle1'"):
        prepare(saved["eagle1"], reads_law=True)
    with pytest.raises(ConfigError, match=r"temperatures = 0\.5 must be a list"):
        prepare(saved["eagle1"], temperatures=0.5)
    with pytest.raises(ConfigError, match="unknown key 'mixing' for training 'acceptance'"):
        prepare(saved["eagle1"], mixing=0.15)
    with pytest.raises(ConfigError, match="needs --init DIR: the draft model, or the head"):
        prepare(None)
    with pytest.raises(ModelError, match="does not exist"):
        prepare(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        prepare(str(tmp_path / "empty"))
    wide = tmp_path / "wide"
    formats.save(random_adapter(hidden_size=16), wide)
    with pytest.raises(ModelError, match="hidden size 16"):
        prepare(str(wide))
