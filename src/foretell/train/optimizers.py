"""What updates a head's weights: AdamW all of them, or Muon the hidden matrices and AdamW the rest.

Muon (Jordan and others 2024, "Muon: An optimizer for hidden layers in neural networks") replaces the momentum of a matrix
by the nearest orthogonal one. Its steps are scaled as in Liu and others 2025 (2502.16982, equation 4): their entries are
as large as AdamW's at the same rate, so one rate serves both.
"""

from collections.abc import Iterable

import torch
from torch import nn

from foretell.core.errors import ConfigError
from foretell.train.config import TrainConfig


def optimizers_of(head: nn.Module, config: TrainConfig, vocab_sizes: Iterable[int]) -> list[torch.optim.Optimizer]:
    """The optimizers of a head's trainable parameters; each parameter is in one of them. vocab_sizes: what tells a table
    over tokens from a hidden matrix. Raises ConfigError for "muon" where there is no hidden matrix."""
    if config.optimizer == "adamw":
        return [_adamw([p for p in head.parameters() if p.requires_grad], config)]
    hidden = hidden_matrices(head, vocab_sizes)
    if not hidden:
        raise ConfigError(
            "optimizer = 'muon' updates hidden matrices, and nothing that is trained here is one: leave it at 'adamw'"
        )
    known = {id(p) for p in hidden}
    others = [p for p in head.parameters() if p.requires_grad and id(p) not in known]
    muon = torch.optim.Muon(hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw(others, config)] if others else [muon]


def hidden_matrices(head: nn.Module, vocab_sizes: Iterable[int]) -> list[nn.Parameter]:
    """The trainable matrices of a head that lead from hidden numbers to hidden numbers: no embedding, and none with a row
    or column for each token of a vocabulary, or for one number alone."""
    tables = {id(module.weight) for module in head.modules() if isinstance(module, nn.Embedding)}
    not_hidden = {1, *vocab_sizes}
    return [
        p
        for p in head.parameters()
        if p.requires_grad and p.ndim == 2 and id(p) not in tables and not not_hidden.intersection(p.shape)
    ]


def _adamw(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay)
