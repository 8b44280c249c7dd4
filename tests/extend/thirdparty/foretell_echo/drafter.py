"""Guess that what followed the last token before will follow it again."""

from dataclasses import dataclass

import foretell


class EchoDrafter(foretell.Drafter):
    def __init__(self, window: int) -> None:
        self.window = window

    def propose(self, context, shape, draws, noise):
        guesses = []
        for ids, depth_limit in zip(context.history.ids, context.depth_limit, strict=True):
            *before, pending = ids[-self.window :]
            ends = [end for end, token in enumerate(before, 1) if token == pending]
            guesses.append(before[ends[-1] :][:depth_limit] if ends else [])
        return foretell.chain_of(context, guesses)


class Echo(foretell.Method):
    name = "echo"
    capabilities = foretell.Capabilities("what followed the last token before", draws=False)

    def __init__(self, window: int) -> None:
        self.window = window

    def open(self, context, capacity, target):
        return EchoDrafter(self.window)


@dataclass(frozen=True)
class EchoConfig(foretell.MethodConfig):
    method = "echo"
    capabilities = Echo.capabilities

    echo_window: int = 256  # tokens that are looked through

    def load(self, loader):
        return Echo(self.echo_window)
