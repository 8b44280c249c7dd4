"""Suffix automata by ``kernels/suffix.c``, where that can be built: ``Automaton`` and ``best_first`` are the slow twins.

A token of text, read with others, and a guess take a fifth of Python's time here, more of which is lost after a pass that
has emptied the caches; and a state takes a third of the memory.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from weakref import finalize

import torch

from foretell.core.tree import TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.automaton import Automaton, Place
from foretell.draft.base import Context
from foretell.kernels.small import AutomatonView, suffix_library

Node = tuple[int, int]
"""(parent, token) of a guess: guesses are numbered from 1 as they stand in their list; 0 is the root."""


def depth_first(nodes: Sequence[Node]) -> list[Node]:
    """The same tree, depth first, siblings as they stood: nodes must come after their parents.

    The line of first children comes first, and keeps its cache slots when it is accepted.
    """
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for node, (parent, _) in enumerate(nodes, start=1):
        children[parent].append(node)
    ordered: list[Node] = []
    stack = [(node, 0) for node in reversed(children[0])]
    while stack:
        node, parent = stack.pop()
        ordered.append((parent, nodes[node - 1][1]))
        stack += [(child, len(ordered)) for child in reversed(children[node])]
    return ordered


def tree_of(context: Context, rows: Sequence[Sequence[Node]]) -> TokenTree:
    """One FIXED tree a row, of guesses in depth-first order; rows may have none."""
    if not any(rows):
        return root_tree(context.pending)
    width = 1 + max(map(len, rows))
    tokens = [[0, *(token for _, token in nodes), *[0] * (width - 1 - len(nodes))] for nodes in rows]
    parents = [[-1, *(parent for parent, _ in nodes), *[-1] * (width - 1 - len(nodes))] for nodes in rows]
    most = max(max(Counter(parent for parent, _ in nodes).values(), default=1) for nodes in rows)
    tensor = tensor_on(context.device, tokens, torch.int64)
    tensor[:, 0] = context.pending
    parent = tensor_on(context.device, parents, torch.int64)
    return TokenTree(tensor, parent, torch.zeros_like(tensor), max_children=most)


_Place = ctypes.c_int64 * 2


class NativeAutomaton:
    """See ``Automaton``. Its methods raise MemoryError where there is no memory; it is not to be used afterwards."""

    def __init__(self, library: ctypes.CDLL, window: int) -> None:
        self.window, self._library = window, library
        self.view = AutomatonView()
        self._address = ctypes.addressof(self.view)
        self._place, self._score = _Place(), ctypes.c_double()
        self._close = finalize(self, _close, library, self.view)
        if library.foretell_suffix_open(self._address, window) < 0:
            raise MemoryError

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return self.view.num_tokens  # type: ignore[no-any-return]

    @property
    def num_states(self) -> int:
        """See ``Automaton``."""
        return self.view.num_states  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        view = self.view
        return 36 * view.room_states + 16 * view.room_edges + 4 * view.num_slots  # type: ignore[no-any-return]

    def begin(self) -> None:
        """See ``Automaton``."""
        self.view.last = self.view.tail_state = self.view.tail_size = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """See ``Automaton``."""
        ids = tokens if isinstance(tokens, Sequence) else list(tokens)
        given = (ctypes.c_int64 * len(ids))(*ids)
        if self._library.foretell_suffix_extend(self._address, given, len(ids)) < 0:
            raise MemoryError

    def follow_all(self, place: Place, tokens: Sequence[int]) -> Place:
        """See ``Automaton``."""
        if not tokens:
            return place
        self._place[0], self._place[1] = place
        given = (ctypes.c_int64 * len(tokens))(*tokens)
        self._library.foretell_suffix_follow(self._address, self._place, given, len(tokens), self.window)
        return self._place[0], self._place[1]

    def repeat(self) -> Place:
        """See ``Automaton``."""
        self._library.foretell_suffix_repeat(self._address, self._place)
        return self._place[0], self._place[1]

    def end_before(self, state: int) -> int:
        """See ``Automaton``."""
        return self.view.earlier[state]  # type: ignore[no-any-return]

    def best_first(
        self, place: Place, *, depth: int, size: int, width: int, least_score: float, least_match: int
    ) -> tuple[list[Node], float]:
        """``suffix.best_first`` in one call."""
        self._place[0], self._place[1] = place
        found = (ctypes.c_int64 * (2 * size))()
        tokens = ctypes.addressof(found) + 8 * size
        count = self._library.foretell_suffix_guesses(
            self._address, self._place, depth, size, width, least_score, least_match,
            found, tokens, ctypes.addressof(self._score),
        )  # fmt: skip
        if count < 0:
            raise MemoryError
        return list(zip(found[:count], found[size : size + count], strict=True)), self._score.value


def _close(library: ctypes.CDLL, view: AutomatonView) -> None:
    library.foretell_suffix_close(ctypes.addressof(view))


AnyAutomaton = Automaton | NativeAutomaton


def new_automaton(window: int) -> AnyAutomaton:
    """An empty automaton: native where that can be."""
    library = suffix_library()
    return Automaton(window) if library is None else NativeAutomaton(library, window)
