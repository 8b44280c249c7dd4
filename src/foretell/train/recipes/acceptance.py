"""SpecDec++'s acceptance head: the probability that the target keeps a guess."""

import torch

from foretell.core.errors import ConfigError
from foretell.core.noise import int64_seed
from foretell.heads.teacher import Objective, Teacher
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.acceptance.objective import AcceptanceObjective, calibrate, open_reader
from foretell.methods.draft_model.drafter import check_draft
from foretell.train.data import sequential_batches
from foretell.train.making import Making, Options, Recipe
from foretell.train.responses import Responses


def build(making: Making, options: Options) -> Objective:
    """A head on the hidden states of the draft model that ``init`` names. Raises ConfigError where none is named."""
    spec = making.model.spec
    if making.init is None and spec.name not in ("bundled", "bundled/target"):
        raise ConfigError("acceptance needs --init DIR: the draft model whose hidden states are to be read")
    reader = open_reader(making.init or "bundled/draft", making.model)
    check_draft(reader.draft.model.spec, spec, making.longest, name=making.init or "bundled/draft")
    config = AcceptanceHeadConfig(
        reader.hidden_size, spec.vocab_size, num_layers=options["num_layers"], normalize=options["normalize"],
        drafter="draft_model", reads_law=options["reads_law"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int64_seed(making.seed))
        head = AcceptanceHead(config)
    own = ("rule", "temperatures", "prefix", "target_share", "weight_accepted", "weight_rejected")
    return AcceptanceObjective(head, reader, **{name: options[name] for name in own})


@torch.no_grad()
def calibrate_head(objective: Objective, teacher: Teacher, held_out: Responses) -> None:
    """Platt scaling of an acceptance head on held-out text, at most 64 batches of it."""
    assert isinstance(objective, AcceptanceObjective)
    assert isinstance(objective.head, AcceptanceHead)
    logits, labels = [], []
    for number, index in enumerate(sequential_batches(held_out.length.tolist(), 4096)[:64]):
        batch = held_out.batch(index).to(teacher.model.spec.device)
        generator = torch.Generator().manual_seed(10_000 + number)  # other places than ``evaluate`` draws
        places = objective.places(teacher.label(batch, objective.taps), teacher, generator)
        logits.append(objective.read(places))
        labels.append(places.labels)
    calibrate(objective.head, torch.cat(logits), torch.cat(labels))


RECIPE = Recipe(
    build,
    {"num_layers": 2, "normalize": True, "reads_law": False, "rule": "coupled", "temperatures": [0.0, 1.0],
     "prefix": "mixed", "target_share": 0.15, "weight_accepted": 1.0, "weight_rejected": 6.0},
    finish=calibrate_head,
)  # fmt: skip
