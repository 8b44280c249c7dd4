"""A trained head: for each place ahead a linear layer on the target's last hidden state, read by the target's own head."""

from dataclasses import dataclass
from typing import ClassVar

import torch

import foretell


@dataclass(frozen=True)
class LinearConfig(foretell.HeadConfig):  # hidden_size and vocab_size are the target's
    tap_layer: int
    num_guesses: int


class LinearHead(foretell.Head):
    method = "linear"

    def __init__(self, config):
        super().__init__()
        self.config, size = config, config.hidden_size
        self.ahead = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(config.num_guesses))

    @property
    def taps(self):
        return (self.config.tap_layer,)

    def logits(self, model, hidden, place):  # hidden [M, H] -> [M, V]
        moved = hidden + self.ahead[place](hidden.to(self.dtype))
        return model.head(model.normed(moved[None].to(model.spec.dtype)))[0].float()


class LinearObjective(foretell.Objective):
    def __init__(self, head):
        self.head = head

    def outcome(self, labeled, teacher, generator, *, training):
        slots = []
        for place in range(self.head.config.num_guesses):  # the hidden state of t guesses token t + 2, t + 3, ...
            row, at = labeled.batch.supervised[:, place + 1 :].nonzero(as_tuple=True)
            logits = self.head.logits(teacher.model, labeled.taps[row, at], place)
            slots.append(foretell.LossSlot(logits, row, at + place + 1))
        return foretell.Outcome(slots)


class LinearLayout(foretell.FlatLayout):
    summary = "linear layers on the last hidden state (foretell-echo)"
    head, config = LinearHead, LinearConfig
    options: ClassVar = {"num_guesses": 3}

    def objective(self, making, options):
        spec = making.model.spec
        config = LinearConfig(spec.hidden_size, spec.vocab_size, spec.num_layers - 1, options["num_guesses"])
        return LinearObjective(making.head(LinearHead, lambda: LinearHead(config)))


class LinearDrafter(foretell.Drafter):
    def __init__(self, method, num_rows):
        self.method, self.hidden = method, [None] * num_rows  # [1, H] of each row's last committed token

    def read_prompt(self, chunk):
        for row, count in enumerate(chunk.count):
            self.hidden[row] = chunk.taps[row, count - 1 : count].clone() if count else self.hidden[row]

    def observe(self, commit):
        self.hidden = [taps[path[-1:]].clone() for taps, path in zip(commit.taps, commit.path, strict=True)]

    def keep(self, rows):
        self.hidden = [self.hidden[row] for row in rows]

    def propose(self, context, shape, draws, noise):
        head, model, guesses = self.method.head, self.method.model, []
        for hidden, depth in zip(self.hidden, context.depth_limit, strict=True):
            places = range(0 if hidden is None else min(depth, len(head.ahead)))
            guesses.append([int(head.logits(model, hidden, place).argmax()) for place in places])
        return foretell.chain_of(context, guesses)


class Linear(foretell.Method):
    name = "linear"
    capabilities = foretell.Capabilities("linear layers on hidden states", False, needs_head=True, reads_target=True)

    def __init__(self, head, model):
        self.head, self.model = head, model

    @property
    def taps(self):
        return self.head.taps

    def open(self, context, capacity, target):
        return LinearDrafter(self, context.num_rows)


@dataclass(frozen=True)
class LinearMethodConfig(foretell.MethodConfig):
    method = "linear"
    capabilities = Linear.capabilities

    model: str | None = None  # the head's directory: --draft

    def load(self, loader):
        if self.model is None:
            raise foretell.ConfigError("method linear needs a trained head: --draft DIR")
        return Linear(foretell.load_head(self.model, loader.target.spec, LinearHead), loader.target)
