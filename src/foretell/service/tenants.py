"""Which texts the guesses for a request may come from: its own, its tenant's, or those of all requests.

A tenant is a sender of requests, which the server identifies by API key. A method that learns from requests
(``Capabilities.learns``) keeps what it learned in stores. A store belongs to one tenant. By default there is no store,
and each request learns from its own text alone. Guesses reveal their source (``trace``, and timing), so tenants must
not share a store.
"""

from collections import OrderedDict
from dataclasses import replace
from threading import Lock

from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.engine.speculation import Speculation
from foretell.service.keeper import Keeper
from foretell.service.options import check_shared

MAX_STORE_BYTES = 256 << 20
"""Limit of all stores together; the least recently used is dropped first."""
MAX_STORES = 1024
"""The same limit for their number: a store that has learned nothing is held too."""


class Tenants:
    """The methods of requests, each with the store that it may use. Thread-safe."""

    def __init__(self, shared_drafts: str, *, max_bytes: int = MAX_STORE_BYTES, keeper: Keeper | None = None) -> None:
        """keeper: knows what stores have learned before the start. Raises ConfigError for an unknown way of sharing."""
        check_shared(shared_drafts)
        self._keeper = keeper
        self._used: set[tuple[Method, str]] = set()  # since ``learned`` was asked
        self.shared_drafts, self.max_bytes = shared_drafts, max_bytes
        # By method and owner: the store, and a choice that it serves. The most recently used last.
        self._stores: OrderedDict[tuple[Method, str], tuple[Method, Speculation]] = OrderedDict()
        self._lock = Lock()

    def choice(
        self, choice: Speculation, tenant: str | None, lora: str | None = None, *, store: bool = True
    ) -> Speculation:
        """The choice with the store of a tenant and an adapter. Tenant None: the sender is unknown; such requests share
        nothing unless sharing is "all". store: see ``Submission``; False shares nothing. Raises ConfigError for a method
        that learns and cannot be separated."""
        method = choice.method
        if not method.capabilities.learns:
            return choice
        owner = "" if self.shared_drafts == "all" else tenant
        if self.shared_drafts == "off" or owner is None or not store:
            return replace(choice, method=_separate(method, method.isolated()))
        with self._lock:
            # Another adapter writes other texts, so its guesses have a store of their own; no name holds a zero.
            owner = owner if lora is None else f"{owner}\0{lora}"
            mine = method, owner
            held = self._stores[mine] if mine in self._stores else (self._opened(choice, owner), choice)
            self._stores[mine] = held
            self._stores.move_to_end(mine)
            self._used.add(mine)
            while len(self._stores) > MAX_STORES or (len(self._stores) > 1 and self._held() > self.max_bytes):
                key, (dropped, of) = self._stores.popitem(last=False)
                if self._keeper is not None and key in self._used:
                    self._keeper.leave(dropped, of, key[1])
                self._used.discard(key)
        return replace(choice, method=held[0])

    def _opened(self, choice: Speculation, owner: str) -> Method:
        made = _separate(choice.method, choice.method.fresh())
        if self._keeper is not None:
            self._keeper.recall(made, choice, owner)
        return made

    def learned(self, *, at_rest: bool, whole: bool = False) -> list[tuple[Method, Speculation, str]]:
        """(store, a choice that it serves, owner) of those that may have learned since the last call, or of all (whole).
        at_rest: no request is running that may go on to teach them."""
        with self._lock:
            found = [(*self._stores[key], key[1]) for key in (self._stores if whole else self._used)]
            if at_rest:
                self._used.clear()
        return found

    def measured(self, choice: Speculation) -> Speculation:
        """The choice with a separate, temporary store: for steps that are run to be timed."""
        method = choice.method
        if not method.capabilities.learns:
            return choice
        made = method.isolated() if self.shared_drafts == "off" else method.fresh()
        return replace(choice, method=_separate(method, made))

    @property
    def learned_bytes(self) -> int:
        """Bytes that all stores take."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return sum(store.learned_bytes for store, _ in self._stores.values())


def _separate(method: Method, made: Method) -> Method:
    if made is method:
        raise ConfigError(
            f"method {method.name!r} learns from requests and has no store of its own for each tenant: its fresh() must "
            "return another method of the same weights that has learned nothing"
        )
    return made
