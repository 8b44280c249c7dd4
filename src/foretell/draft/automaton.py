"""A suffix automaton: all substrings of texts, grown token by token (Blumer et al. 1985), with exact counts.

States are classes of substrings that end at the same places. State s stands for the suffixes of its longest substring
(``length[s]`` tokens) that are longer than ``length[link[s]]``; ``link`` leads to the class of the next shorter suffix.

An online automaton gets counts wrong unless every end of text is passed to all classes of its suffixes, which in a text
with a period are as many as it has repetitions. Here that stops at suffixes of ``window + 1`` tokens, found in O(1) by a
second pointer. So a token costs O(1) amortised hops to link in (dictionaries of followers that are copied aside, which
texts in practice keep short) and at most ``window + 1`` to count, and counts are exact for all substrings of that length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Place = tuple[int, int]
"""(state, number of tokens): a substring, given by its class and its length."""

NOWHERE: Place = (0, 0)
"""The empty substring."""

STATE_BYTES = 384
"""Of a state, as Python holds it: 350 to 370 measured, a token taking 1.2 to 1.3 states."""

MAX_READ = 2048
"""Tokens of a text that are read at a time: a longer prompt is read over several steps, so that no step waits for it."""


@dataclass(frozen=True)
class Follower:
    """One way in which the texts go on from a place."""

    token: int
    share: float  # of the times that they go on from there at all
    place: Place  # with the token, shortened to the window


class Automaton:
    """Substrings of any number of texts; none reaches across two of them. The slow twin of ``NativeAutomaton``."""

    def __init__(self, window: int) -> None:
        """window: places have at most this many tokens."""
        self.window = window
        self.num_tokens = 0
        self.num_hops = 0  # work counter: links followed, transitions set or copied, counts raised
        self.length = [0]  # of the longest substring of each state
        self.link = [-1]
        self.next: list[dict[int, int]] = [{}]
        self.count = [0]  # ends in the texts; exact for states whose shortest substring has at most window + 1 tokens
        self.latest = [0]  # number of tokens read at the latest end; exact for the same states
        self.earlier = [0]  # the same of the end before that one, for states that end where the text does; 0: none
        self._last = 0  # the state of the whole text being read
        self._tail = NOWHERE  # its suffix of at most window + 1 tokens

    @property
    def num_states(self) -> int:
        """Classes of substrings, the empty one's too: at most two a token."""
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        """Of memory, approximately."""
        return self.num_states * STATE_BYTES

    def begin(self) -> None:
        """A new text."""
        self._last, self._tail = 0, NOWHERE

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._link_in(token)
            self._tail = self.follow(self._tail, token, self.window + 1)
            self.num_tokens += 1
            state = self._tail[0]
            while state:
                self.count[state] += 1
                self.earlier[state] = self.latest[state]
                self.latest[state] = self.num_tokens
                self.num_hops += 1
                state = self.link[state]

    def follow(self, place: Place, token: int, limit: int = 0) -> Place:
        """The longest suffix of place and token that is known, of at most ``limit`` tokens (0: the window).

        A place stays valid while the automaton grows: where its class has been split since, its part is looked up.
        """
        state, size = self._settled(place)
        while state and token not in self.next[state]:
            state = self.link[state]
            size = self.length[state]
        after = self.next[state].get(token)
        return NOWHERE if after is None else self._shortened(after, size + 1, limit or self.window)

    def follow_all(self, place: Place, tokens: Sequence[int]) -> Place:
        """``follow`` of several tokens."""
        for token in tokens:
            place = self.follow(place, token)
        return place

    def end_before(self, state: int) -> int:
        """``earlier`` of a state."""
        return self.earlier[state]

    def repeat(self) -> Place:
        """The longest suffix of the text, of at most window tokens, that also ends somewhere before."""
        before = self.link[self._last]  # the longest suffix with more ends than the whole
        if before <= 0:
            return NOWHERE
        if self.length[before] <= self.window:
            return before, self.length[before]
        return self._shortened(*self._tail, self.window)

    def followers(self, place: Place, least: int, least_share: float = 0.0) -> list[Follower]:
        """How the texts go on from a place, the most frequent first, of equals the latest; rarer ones left out.

        A place at which every text ends is shortened until one goes on; below ``least`` tokens there is no answer.
        Looks once at every token that followed there: a few after two tokens, up to thousands after a single one.
        """
        state, size = self._settled(place)
        while size >= least and not self.next[state]:
            state = self.link[state]
            size = self.length[state]
        if size < least:
            return []
        count, latest = self.count, self.latest
        following = self.next[state]
        total = sum(map(count.__getitem__, following.values()))
        enough = least_share * total
        ways = sorted(
            (-count[after], -latest[after], token, after)
            for token, after in following.items()
            if count[after] >= enough
        )
        return [
            Follower(token, -times / total, self._shortened(after, size + 1, self.window))
            for times, _, token, after in ways
        ]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _settled(self, place: Place) -> Place:
        """The same substring in the class that has it now."""
        state, size = place
        while state and self.length[self.link[state]] >= size:
            state = self.link[state]
        return state, size

    def _shortened(self, state: int, size: int, limit: int) -> Place:
        """The suffix of at most ``limit`` tokens of a substring that has at most one more."""
        if size > limit:
            size = limit
            if self.length[self.link[state]] >= limit:
                state = self.link[state]
        return state, size

    def _link_in(self, token: int) -> None:
        """One token on from the whole text."""
        at = self._last
        known = self.next[at].get(token)
        if known is not None:  # an earlier text begins like this one
            whole = self.length[known] == self.length[at] + 1
            self._last = known if whole else self._split(at, token, known)
            return
        fresh = self._new_state(self.length[at] + 1, {}, 0, 0, 0)
        at = self._point(at, token, None, fresh)
        if at >= 0:
            other = self.next[at][token]
            whole = self.length[other] == self.length[at] + 1
            self.link[fresh] = other if whole else self._split(at, token, other)
        self._last = fresh

    def _split(self, at: int, token: int, state: int) -> int:
        """Give the suffixes of ``state`` up to the one after ``at`` a class of their own, with the same past."""
        part = self._new_state(
            self.length[at] + 1, dict(self.next[state]), self.link[state], self.count[state], self.latest[state]
        )
        self.num_hops += len(self.next[state])
        self.link[state] = part
        self._point(at, token, state, part)
        return part

    def _point(self, at: int, token: int, old: int | None, new: int) -> int:
        """From ``at`` along the links, lead token to ``new`` while it leads to ``old``; returns where that stopped."""
        while at >= 0 and self.next[at].get(token) == old:
            self.next[at][token] = new
            at = self.link[at]
            self.num_hops += 1
        return at

    def _new_state(self, length: int, following: dict[int, int], link: int, count: int, latest: int) -> int:
        self.length.append(length)
        self.next.append(following)
        self.link.append(link)
        self.count.append(count)
        self.latest.append(latest)
        self.earlier.append(0)
        return len(self.length) - 1
