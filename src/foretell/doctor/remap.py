"""Which vocabulary a head's own output matrix suggests, where its token mapping may be wrong."""

import copy

import torch
from torch import Tensor

from foretell.doctor.variants import HeadVariant
from foretell.engine.engine import Engine
from foretell.heads.head import Head
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.medusa.head import head_weight

ALIKE = 0.6
"""Cosine of a column of the head and a row of the target's own, from which on the one was made from the other."""
MOST_PRODUCTS = 4e11
"""Multiplications that comparing all columns with all rows may take."""


def remapped(head: Head, engine: Engine) -> list[HeadVariant]:
    """The head with the vocabulary that its output matrix itself suggests: columns of heads that began as the target's
    are still most like the rows that they came from."""
    if not isinstance(head, Eagle3Head | DFlashHead) or head.vocabulary is None or head.lm_head is None:
        return []
    spec = engine.model.spec
    if float(len(head.d2t)) * spec.vocab_size * spec.hidden_size > MOST_PRODUCTS:
        return []
    rows = torch.nn.functional.normalize(head_weight(engine.model), dim=-1)
    columns = torch.nn.functional.normalize(head.lm_head.weight.float(), dim=-1)
    ids, alike = _nearest(columns, rows)
    if float(alike.median()) < ALIKE or bool((ids == head.target_ids).float().mean() > 0.5):
        return []
    made = copy.deepcopy(head)
    index = torch.arange(len(ids), device=ids.device)
    made.d2t = ids - index
    made.eval().requires_grad_(requires_grad=False)
    return [HeadVariant("token_mapping", "d2t as the rows of lm_head suggest: each is most like another token's", made)]


def _nearest(columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [DV] int64 of the rows [V, H] most like each column [DV, H], their cosines [DV])."""
    ids, alike = [], []
    for at in range(0, len(columns), 1024):
        part = columns[at : at + 1024]
        best, index = (part @ rows.t()).max(1)
        ids.append(index)
        alike.append(best)
    return torch.cat(ids), torch.cat(alike)
