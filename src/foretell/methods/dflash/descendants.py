"""The parts of a block drafter that DSpark adds to DFlash: Markov head and confidence head (2607.05147)."""

from torch import nn


class MarkovHead(nn.Module):
    """A bigram of low rank: logits of a token given the one before it (DSpark, section 3; the "vanilla" kind)."""

    def __init__(self, vocab_size: int, rank: int, num_outputs: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a guess's acceptance, from its row and the Markov head's vector of the token before it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


def start_without_effect(head: nn.Module) -> None:
    """Set zeros in these parts of a head, by which an untrained part changes no guess, and each has an even chance."""
    for module in head.modules():
        if isinstance(module, MarkovHead):
            nn.init.zeros_(module.markov_w2.weight)
        elif isinstance(module, ConfidenceHead):
            nn.init.zeros_(module.proj.weight)
            nn.init.zeros_(module.proj.bias)
