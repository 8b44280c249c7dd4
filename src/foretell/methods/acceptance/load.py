"""Reading an acceptance head."""

import torch

from foretell.heads.load import load_head
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.model.target import ModelSpec


def load_acceptance(name: str, drafter: ModelSpec) -> AcceptanceHead:
    """An acceptance head, in float32; drafter is the specification of the draft model. Raises ModelError."""
    return load_head(name, drafter, AcceptanceHead, dtype=torch.float32)
