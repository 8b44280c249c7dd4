"""The outputs of a draft model on a whole text, from which an acceptance head learns: its distribution of each token, and
its hidden state after reading it. The draft model is frozen.
"""

import torch
from torch import Tensor

from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import Plan
from foretell.heads import formats
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.model.load import load_model
from foretell.model.target import CausalModel, Target


class ModelReader:
    """A draft model beside its target."""

    def __init__(self, draft: CausalModel) -> None:
        self.draft = Teacher(draft)
        self.hidden_size = draft.spec.hidden_size

    def read(self, batch: TeacherBatch) -> tuple[Tensor, Tensor]:
        """Logits [B, T - 1, V] before token t + 1 of a text is read, and the hidden states [B, T - 1, H] after it is."""
        own = self.draft.label(batch, ())
        return own.logits[:, :-1], own.hidden[:, 1:]

    @torch.no_grad()
    def beside(self, batch: TeacherBatch, guesses: Tensor) -> Tensor:
        """[B, T - 1, H] the hidden state after reading guess t of guesses [B, T - 1], which follows tokens 0 to t of the
        text: one pass over a tree, the text as its trunk and each guess as a leaf."""
        num_rows, num_leaves = guesses.shape
        tokens = torch.cat((batch.tokens[:, :num_leaves], guesses), 1)
        plan = comb(num_rows, num_leaves, guesses.device)
        out = Target(self.draft.model, num_rows, 2 * num_leaves).forward(tokens, plan, head=False)
        return out.hidden[:, num_leaves:].float()


def comb(num_rows: int, num_leaves: int, device: torch.device) -> Plan:
    """The plan of a trunk of n nodes and, after them, a leaf under each: what ``layout`` returns for that tree, without
    its products of N x N matrices, which take longer than the draft model for a long text."""
    trunk = torch.ones(num_leaves, num_leaves, dtype=torch.bool, device=device).tril()
    own = torch.eye(num_leaves, dtype=torch.bool, device=device)
    ancestry = torch.cat((torch.cat((trunk, trunk)), torch.cat((torch.zeros_like(own), own))), 1)  # [2n, 2n]
    slots = torch.arange(2 * num_leaves, device=device).expand(num_rows, -1)
    positions = torch.cat((torch.arange(num_leaves), torch.arange(num_leaves) + 1)).to(device).expand(num_rows, -1)
    length = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return Plan(length, ancestry.expand(num_rows, -1, -1), slots, positions, positions, 2 * num_leaves)


def open_reader(name: str, model: CausalModel) -> ModelReader:
    """The draft model that name leads to, for the target model. Raises ConfigError for a head, ModelError for what cannot
    be loaded."""
    try:
        method = formats.detect(resolve(name)).head.method
    except ModelError:  # a whole model, or unreadable: loading it as a model gives the error
        method = None
    if method is not None:
        raise ConfigError(
            f"--init {name} holds a head of {method!r}; acceptance heads are trained for draft models alone"
        )
    spec = model.spec
    return ModelReader(load_model(name, dtype=spec.dtype, device=spec.device, implementation="transformers"))
