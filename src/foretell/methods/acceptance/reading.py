"""The outputs of a stepwise drafter on a whole text: its distribution of each token, and its hidden state after reading
it.

The interface between drafters and the training of an acceptance head, one class per kind of drafter. Drafters are
frozen.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import Plan
from foretell.heads import formats
from foretell.heads.head import Head
from foretell.heads.load import load_head
from foretell.heads.pair_head import PairHead
from foretell.heads.teacher import LabeledBatch, Teacher
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.eagle.objective_eagle3 import require_slots, unrolled
from foretell.methods.kangaroo.head import KangarooHead
from foretell.methods.kangaroo.objective import adapted
from foretell.model.load import load_model
from foretell.model.target import CausalModel, Target


@dataclass(frozen=True)
class Reading:
    """A text as it is read at one depth of proposals. The guess of token t + 1 stands at index t - back of both tensors;
    the first ``back`` positions have none."""

    features: Tensor  # [B, n, ...] before token t + 1 is read: what ``DraftReader.logits`` makes its distribution of
    hidden: Tensor  # [B, n, H] after it is read: what an acceptance head reads
    back: int


class DraftReader(ABC):
    """A drafter that reads its guesses one after the other."""

    drafter: str
    """The name by which ``AcceptanceHead.check_drafter`` knows it."""
    hidden_size: int
    """H of ``Reading.hidden``."""
    taps: tuple[int, ...] = ()
    """Target layers whose outputs it needs in ``labeled.taps``."""

    @abstractmethod
    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        """The text of a labeled batch, read at every depth that makes a difference; with ``first`` at depth 1 only. model
        is the target."""

    def logits(self, features: Tensor, model: CausalModel) -> Tensor:
        """[M, V] of M places' ``features``, over the drafter's own vocabulary or the target's, by id."""
        return features

    def check_beside(self) -> None:
        """Raise ConfigError where ``beside`` is not supported."""
        raise ConfigError(
            f'prefix = "target" is known for draft models, and {self.drafter!r} reads the target\'s hidden states: give '
            'prefix = "mixed"'
        )

    def beside(self, labeled: LabeledBatch, guesses: Tensor) -> Tensor:
        """[B, T - 1, H] the hidden state after reading guess t of guesses [B, T - 1], which follows tokens 0 to t of
        the text. Raises ConfigError as ``check_beside`` does."""
        self.check_beside()
        raise AssertionError("check_beside raises where beside is not supported")


class ModelReader(DraftReader):
    """A draft model: it computes from the text alone, so all depths are one."""

    drafter = "draft_model"

    def __init__(self, draft: CausalModel) -> None:
        self.draft = Teacher(draft)
        self.hidden_size = draft.spec.hidden_size

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        """One reading."""
        own = self.draft.label(labeled.batch, ())
        return [Reading(own.logits[:, :-1], own.hidden[:, 1:], back=0)]

    def check_beside(self) -> None:
        """Known."""

    @torch.no_grad()
    def beside(self, labeled: LabeledBatch, guesses: Tensor) -> Tensor:
        """See ``DraftReader``: one pass over a tree, the text as its trunk and each guess as a leaf."""
        num_rows, num_leaves = guesses.shape
        tokens = torch.cat((labeled.batch.tokens[:, :num_leaves], guesses), 1)
        plan = comb(num_rows, num_leaves, guesses.device)
        out = Target(self.draft.model, num_rows, 2 * num_leaves).forward(tokens, plan, head=False)
        return out.hidden[:, num_leaves:].float()


class AdapterReader(DraftReader):
    """Kangaroo: as a draft model, of the target's lower layers and an adapter."""

    drafter = KangarooHead.method

    def __init__(self, head: KangarooHead) -> None:
        self.head, self.hidden_size, self.taps = head, head.config.hidden_size, head.taps

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        """One reading."""
        out = adapted(self.head, labeled)
        return [Reading(out[:, :-1], out[:, 1:], back=0)]

    def logits(self, features: Tensor, model: CausalModel) -> Tensor:
        """See ``DraftReader``: by the target's head."""
        return model.head(features[None].to(model.spec.dtype))[0].float()


class PairReader(DraftReader):
    """EAGLE: a guess is read with the head's own output as feature, so its depth counts.

    The j-th guess after anchor t, token t + 1 + j, is predicted by step j - 1 of ``PairHead.unroll`` and read by step
    j.
    """

    def __init__(self, head: PairHead, num_slots: int) -> None:
        """num_slots: depths that are read. Raises ConfigError."""
        require_slots(num_slots)
        self.head, self.num_slots, self.vocabulary = head, num_slots, head.vocabulary
        self.drafter, self.hidden_size, self.taps = head.method, head.config.hidden_size, head.taps

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        """A reading a depth."""
        num_slots = 1 if first else self.num_slots
        features = self.head.features(labeled.taps, model)
        steps = unrolled(self.head, labeled.batch, features, model, num_slots + 1)
        return [Reading(steps[j - 1][1], steps[j][0], back=j) for j in range(1, num_slots + 1)]

    def logits(self, features: Tensor, model: CausalModel) -> Tensor:
        """See ``DraftReader``: -inf outside the draft vocabulary."""
        logits = self.head.logits(features[None], model)[0].float()
        if self.vocabulary is None:
            return logits
        return logits.new_full((len(logits), model.spec.vocab_size), -torch.inf).index_copy_(1, self.vocabulary, logits)


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


def can_say(logits: Tensor, tokens: Tensor) -> Tensor:
    """[M] bool: which of tokens [M] have a chance by logits [M, V]; one outside a drafter's vocabulary is no guess."""
    last = logits.shape[1] - 1
    return (tokens <= last) & (logits.gather(1, tokens.clamp(max=last)[:, None])[:, 0] > -torch.inf)


def open_reader(name: str, model: CausalModel, *, num_slots: int) -> DraftReader:
    """The drafter that name leads to, for the target model: a head of EAGLE (num_slots depths of it) or of Kangaroo, else
    a draft model. Raises ConfigError for a head that does not read its guesses, ModelError for what cannot be loaded."""
    kind = head_kind(name)
    spec = model.spec
    if kind is None:
        return ModelReader(load_model(name, dtype=spec.dtype, device=spec.device, implementation="transformers"))
    if issubclass(kind, KangarooHead):
        return AdapterReader(load_head(name, spec, kind))
    if issubclass(kind, (Eagle1Head, Eagle3Head)):
        return PairReader(load_head(name, spec, kind, target=model), num_slots)
    raise ConfigError(
        f"--init {name} holds a head of {kind.method!r}, which does not read its guesses one after the other: give a draft "
        "model, or a head of 'eagle1', 'eagle3' or 'kangaroo'"
    )


def head_kind(name: str) -> type[Head] | None:
    """The class of the head in a directory; None where it holds no head. Raises ModelError where there is no directory."""
    path = resolve(name)
    try:
        return formats.detect(path).head
    except ModelError:  # a whole model, or unreadable: loading it as a model gives the error
        return None
