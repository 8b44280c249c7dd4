"""What stands before a drafter or a method: the one place that passes every call of ``Drafter`` on, and tells what another
``Method`` tells."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, root_tree
from foretell.draft.base import Commit, Context, Drafter, LightStep, Method, PromptChunk
from foretell.draft.shapes import Shape

_T = TypeVar("_T")


class Forwarding(Drafter):
    """Passes every call to ``inner``. While that is None it proposes the root alone and remembers nothing.

    A subclass overrides what it does otherwise. A call that is added to ``Drafter`` is added here, and to no subclass.
    """

    def __init__(self, inner: Drafter | None) -> None:
        self.inner = inner

    def _read(self, read: Callable[[Drafter], _T], instead: _T) -> _T:
        """A property of the inner drafter, or ``instead`` without one."""
        return instead if self.inner is None else read(self.inner)

    def _call(self, call: Callable[[Drafter], _T], instead: _T) -> _T:
        """The inner drafter's answer to a call, or ``instead`` without one."""
        return self._read(call, instead)

    @property
    def can_join(self) -> bool:  # type: ignore[override]
        """See ``Drafter``: at this time."""
        return self.inner is not None and self.inner.can_join

    @property
    def can_wait(self) -> bool:  # type: ignore[override]
        """See ``Drafter``."""
        return self._read(lambda inner: inner.can_wait, False)

    @property
    def light_steps(self) -> Sequence[LightStep | None] | None:
        """See ``Drafter``."""
        return self._read(lambda inner: inner.light_steps, None)

    @property
    def chance(self) -> Tensor | None:
        """See ``Drafter``."""
        return self._read(lambda inner: inner.chance, None)

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """See ``Drafter``."""

        def proposed(inner: Drafter) -> TokenTree | None:
            return inner.propose(context, shape, draws, noise)

        found = self._call(proposed, None)
        return root_tree(context.pending) if found is None else found

    def read_prompt(self, chunk: PromptChunk) -> None:
        """See ``Drafter``."""
        self._call(lambda inner: inner.read_prompt(chunk), None)

    def observe(self, commit: Commit) -> None:
        """See ``Drafter``."""
        self._call(lambda inner: inner.observe(commit), None)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter``."""
        self._call(lambda inner: inner.observe_all(commits), None)

    def keep(self, rows: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._call(lambda inner: inner.keep(rows), None)

    def join(self, other: Drafter, context: Context) -> None:
        """See ``Drafter``: other forwards, too."""
        assert isinstance(other, Forwarding)
        theirs = other.inner
        assert theirs is not None
        self._call(lambda inner: inner.join(theirs, context), None)

    def num_unread(self, context: Context) -> list[int]:
        """See ``Drafter``."""
        return self._call(lambda inner: inner.num_unread(context), [0] * context.num_rows)

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """See ``Drafter``."""
        return self._call(lambda inner: inner.catch_up(context, row, most), 0)

    def taps_of(self, row: int) -> Tensor | None:
        """See ``Drafter``."""
        return self._call(lambda inner: inner.taps_of(row), None)

    def adopt(self, method: Method) -> None:
        """See ``Drafter``."""
        self._call(lambda inner: inner.adopt(method), None)


def joined_layers(taps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Layers that several methods tap, each once; those of one method as they are."""
    return tuple(taps[0]) if len(taps) == 1 else tuple(dict.fromkeys(layer for one in taps for layer in one))


def _of_part(name: str, join: Callable[[list[Any]], Any] = lambda told: told[0]) -> Any:
    return property(lambda self: join([getattr(part, name) for part in (self.part, *self.others)]))


class ForwardingMethod(Method):
    """Needs of a target and of a service what ``part``, and with it ``others``, need."""

    part: Method
    others: Sequence[Method] = ()

    foresees: Any = _of_part("foresees")
    chains_only: Any = _of_part("chains_only")
    taps: Any = _of_part("taps", joined_layers)
    prompt_taps: Any = _of_part("prompt_taps", joined_layers)
    bytes_per_token: Any = _of_part("bytes_per_token", sum)
    bytes_per_row: Any = _of_part("bytes_per_row", sum)
    runs_as: Any = _of_part("runs_as")
