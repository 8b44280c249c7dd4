"""Work of an accelerator that is recorded once for a kind of step, and launched again as a whole: captured graphs.

A kind is whatever fixes the kernels and their shapes: numbers of rows, nodes and slots, each from few buckets, what is
decoded and how. The first step of a kind runs as it is, so that all that is made once is there; the second is captured;
every later one is a copy of its inputs and one launch. What fills a bucket up is padding and changes no token.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from foretell.core.probs import Processors
from foretell.core.upload import refused_within

T = TypeVar("T")
logger = logging.getLogger(__name__)

MOST_KINDS = 128
"""Kinds whose graphs are held: each keeps the memory of its intermediate results. The one unused longest gives way."""


def bucket(count: int, least: int = 1) -> int:
    """The smallest of least, 2 * least, 4 * least, ... that is at least count."""
    size = least
    while size < count:
        size *= 2
    return size


class GraphRecorder(Protocol):
    """How a device captures work. One for each ``Graphs``."""

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """(launch, what function returned): launch does again, on the same memory, all that function asked of the device.
        The values of what it returned are there after a launch. Raises RuntimeError where it cannot be captured."""


class CudaRecorder:
    """``torch.cuda.CUDAGraph``. All graphs of a recorder share one pool of memory, so what one of them returned is valid
    until the next one is launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See ``GraphRecorder``. Other threads may use the device meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The stream is put back here: a capture that fails leaves its own as the current one.
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"),
        ):
            out = function()
        return graph.replay, out


RECORDERS: dict[str, Callable[[torch.device], GraphRecorder]] = {"cuda": CudaRecorder}
"""By the type of the device. Tests add one."""


@dataclass(frozen=True)
class Feed:
    """A tensor that a captured function reads. Its values are copied into a buffer of the graph."""

    tensor: Tensor
    shape: tuple[int, ...]  # the buffer's: on no axis smaller than the tensor's
    fill: int = 0  # what stands in the buffer beyond the tensor
    constant: bool = False  # whether the tensor's values never change: then it is copied once


class _Kind:
    """The buffers and the graph of one kind."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.buffers = [feed.tensor.new_full(feed.shape, feed.fill) for feed in feeds]
        self._held: list[Tensor | None] = [None] * len(feeds)  # constants that the buffers hold
        self._shapes = [feed.tensor.shape for feed in feeds]  # of what was copied last
        # What is captured: all that it names stays alive, and its key true
        self.function: Callable[..., Any] | None = None
        self.launch: Callable[[], None] | None = None
        self.out: Any = None
        self.refused = ""

    def feed(self, feeds: Sequence[Feed]) -> None:
        """Copy in all that may have changed."""
        into, given = [], []
        for index, (feed, buffer) in enumerate(zip(feeds, self.buffers, strict=True)):
            if feed.constant and feed.tensor is self._held[index]:
                continue
            if feed.tensor.shape != self._shapes[index]:  # rows or nodes of an earlier step are padding now
                buffer.fill_(feed.fill)
                self._shapes[index] = feed.tensor.shape
            self._held[index] = feed.tensor if feed.constant else None
            into.append(buffer[tuple(slice(size) for size in feed.tensor.shape)])
            given.append(feed.tensor)
        if into:
            torch._foreach_copy_(into, given)


class Graphs:
    """The captured graphs of one caller, by kind. What ``run`` returns is valid until its next call. One thread at a
    time."""

    def __init__(self, device: torch.device) -> None:
        """device: of a type that has ``RECORDERS``."""
        self.device = device
        self._recorder = RECORDERS[device.type](device)
        self._kinds: dict[Hashable, _Kind] = {}
        self._processors: dict[Hashable, tuple[Processors, Processors]] = {}  # (whose values they have, in one memory)
        self.steps: Counter[str] = Counter()
        """Calls of ``run`` by how they ran: "warm", "captured", "launched"; and steps that ran without a graph, by why."""

    @cached_property
    def moves(self) -> "Graphs":
        """Graphs of the same caller whose launches leave what ``run`` returned here as it is."""
        return self.sibling()

    def sibling(self) -> "Graphs":
        """Graphs of another caller on the same device."""
        return Graphs(self.device)

    def run(
        self,
        key: Hashable,
        feeds: Sequence[Feed],
        function: Callable[..., T],
        *,
        outcome: Callable[[T], Tensor] | None = None,
    ) -> T:
        """function(*buffers), which have the feeds' values. It must ask everything of the device and nothing of the host:
        between calls with one key only the feeds' values change. What it returns is in one place for each key.

        outcome: of what it returns, the integers that decide. A graph's first launch must come to those of the function
        itself, else the kind is never launched. None: the function cannot run twice.
        """
        kind = self._kinds.pop(key, None)
        if kind is None:
            kind = _Kind(feeds)
            if len(self._kinds) >= MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
        self._kinds[key] = kind  # the last is the one used last
        kind.feed(feeds)
        if kind.function is None or kind.refused:
            kind.function = function
            self.steps[kind.refused or "warm"] += 1
            return function(*kind.buffers)
        if kind.launch is None:
            return self._capture(kind, function, outcome)
        self.steps["launched"] += 1
        kind.launch()
        out: T = kind.out
        return out

    def _capture(self, kind: _Kind, function: Callable[..., T], outcome: Callable[[T], Tensor] | None) -> T:
        expected = None if outcome is None else function(*kind.buffers)
        try:
            with refused_within("a captured graph: what the host knows must be one of its feeds"):
                launch, out = self._recorder.capture(lambda: function(*kind.buffers))
        except RuntimeError as error:
            kind.refused = f"cannot be captured: {error}"
            logger.warning("a step %s; it is launched call by call", kind.refused)
            self.skipped(kind.refused)
            return function(*kind.buffers) if expected is None else expected
        launch()
        if outcome is not None and expected is not None and not torch.equal(outcome(out), outcome(expected)):
            kind.refused = "the first launch of its graph came to another outcome"
            logger.warning("%s: it is launched call by call", kind.refused)
            self.skipped(kind.refused)
            return expected
        self.steps["captured"] += 1
        kind.launch, kind.out = launch, out
        return out

    def skipped(self, reason: str) -> None:
        """A step is not launched as a graph. Each reason is logged once."""
        if not self.steps[reason]:
            logger.info("not launched as a captured graph: %s", reason)
        self.steps[reason] += 1

    def processors(self, given: Processors, num_rows: int) -> Processors:
        """The same for num_rows rows, those beyond given's as its last, in memory that all of a kind share."""
        key = (num_rows, given.kind)
        source, held = self._processors.get(key, (None, None))
        if held is None or source is not given:
            padded = given.keep([min(row, len(given.params) - 1) for row in range(num_rows)])
            if held is None:
                held = padded
                held.make()
            else:
                held.take_values(padded)
            self._processors[key] = (given, held)
        return held

    def forget(self) -> None:
        """Drop all graphs: memory that they use lies elsewhere now."""
        self._kinds.clear()
