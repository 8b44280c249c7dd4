"""The models of a server that has several: which there are, which are loaded, and whom they answer.

All state is the event loop's. Models are loaded and unloaded on other threads, one at a time, while those that are loaded
answer. A request has its model from ``take`` to ``release``: until then it is not unloaded. What was read of prompts
outlives a model (``Service.prefixes``), so one that comes back goes on from there.
"""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any

from foretell.core.errors import ConfigError, ForetellError, ServiceClosedError
from foretell.core.platform import free_memory
from foretell.engine.prefix import PrefixStore
from foretell.server.backend import LATEST, Backend
from foretell.server.entries import Entry, about, models_in, stamp_of
from foretell.server.errors import ApiError, bad, internal, of_engine
from foretell.server.logs import log
from foretell.server.metrics import lasting, render_several
from foretell.server.options import GGUF, ModelsOptions, ServerOptions
from foretell.service.memory import TooLittleMemoryError, collect
from foretell.service.service import STATES, Service
from foretell.service.snapshot import Snapshot

MOST_NAMES = 32  # of an error
FILL = 0.8  # share of the free memory that the weights of a further model may take
Load = Callable[[str, str, PrefixStore | None], Service]
"""Of (name, target, what an earlier load has read) a service that was started. Raises ForetellError."""


class Models:
    """See the module's docstring. ``start``, ``drain``, ``close`` and ``state`` are as a ``Service`` has them."""

    def __init__(
        self,
        load: Load,
        targets: Mapping[str, str],
        options: ServerOptions | None = None,
        several: ModelsOptions | None = None,
        *,
        free: Callable[[], int] = free_memory,
    ) -> None:
        """targets: by name; the first is that of requests which name none. free: bytes of memory. Raises ConfigError where
        more would be pinned than may be loaded."""
        self.options, self.several = options or ServerOptions(), several or ModelsOptions()
        self._load, self._free = load, free
        self.entries = {name: Entry(name, target, pinned=self.several.preload) for name, target in targets.items()}
        self.folder = None if self.several.models_dir is None else Path(self.several.models_dir).expanduser()
        self.default = next(iter(targets), None)
        self.on_failure: Callable[[], None] = lambda: None  # of a service: here one model's failure is its own
        self.failure = ""
        self.created = int(time())
        self._draining = self._closed = False
        self._turn, self._news = asyncio.Lock(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._services: list[Service] = []  # that were loaded: also those that nobody has taken yet
        self._lock = Lock()
        if self.several.preload and len(targets) > self.several.max_models:
            raise ConfigError(f"--preload of {len(targets)} models needs --max-models {len(targets)} or more")
        if self.folder is not None:
            self._found(models_in(self.folder))

    # -- which there are -------------------------------------------------------------------------------------------

    def _found(self, found: Mapping[str, str]) -> None:
        for name, entry in list(self.entries.items()):
            if entry.is_found and found.get(name) != entry.target and entry.state == "unloaded":
                del self.entries[name]
        for name, target in found.items():
            self.entries.setdefault(name, Entry(name, target, is_found=True))

    async def all(self) -> list[Entry]:
        """All there are now, those of the command line first."""
        if self.folder is not None:
            self._found(await asyncio.to_thread(models_in, self.folder))
        return sorted(self.entries.values(), key=lambda one: one.is_found)

    @property
    def loaded(self) -> list[Entry]:
        """Those that are."""
        return [entry for entry in list(self.entries.values()) if entry.backend is not None]

    def _known(self, name: str) -> Entry | None:
        tagged = name.removesuffix(LATEST)
        return self.entries.get(name) or self.entries.get(tagged) or self.entries.get(tagged.removesuffix(GGUF))

    async def entry(self, name: str | None) -> Entry:
        """A model by its name, its tag ":latest" and ".gguf" left out or not; without one the default. Raises ApiError 404,
        and 400 where there is no default."""
        name = name or self.default or ""
        if (found := self._known(name)) is not None:
            return found
        there = [one.name for one in await self.all()]
        if (found := self._known(name)) is not None:
            return found
        if not name and len(there) == 1:
            return self.entries[there[0]]
        names = get_close_matches(name[:128], there, n=max(1, len(there)), cutoff=0.0) if name else there
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        has = f"this server has {', '.join(map(repr, names[:MOST_NAMES])) or 'none'}{more}"
        if not name:
            raise bad(f"model: no model is the default here, so name one; {has}", "model")
        shown = name if len(name) <= 128 else name[:125] + "..."
        raise ApiError(404, f"the model {shown!r} does not exist; {has}", param="model", code="model_not_found")

    # -- whom they answer ------------------------------------------------------------------------------------------

    async def take(self, name: str | None, keep_alive_s: float | None = None) -> Entry:
        """A model, loaded, for a request, which must ``release`` it. keep_alive_s: how long it then stays where nobody
        asks; None: as the server's options say. Raises ApiError 404, 500 where it cannot be loaded, and 503."""
        entry = await self.entry(name)
        if self._draining:
            raise stopping()
        if entry.serves:
            entry.users += 1
        else:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry.waiters.append(waiter)
            if entry.bringing is None:
                entry.bringing = self._spawn(self._bring(entry))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self.release(entry)  # it was given, and nobody is there to use it
                self._news.set()
                raise
        self.touched(entry)
        entry.keep_alive_s = self.several.keep_alive_s if keep_alive_s is None else keep_alive_s
        return entry

    def release(self, entry: Entry) -> None:
        """A request that has had a model has ended."""
        entry.users -= 1
        self.touched(entry)
        self._news.set()

    def expire(self, entry: Entry) -> None:
        """Unload a model when nobody has it any more."""
        entry.keep_alive_s = 0.0
        self.touched(entry)

    def touched(self, entry: Entry) -> None:
        """Somebody came or left: the time after which a model that nobody uses is unloaded begins anew."""
        entry.used = monotonic()
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        if entry.users or entry.backend is None or entry.pinned or entry.keep_alive_s == inf or self._closed:
            return
        later = asyncio.get_running_loop().call_later
        entry.expiry = later(entry.keep_alive_s, lambda: self._spawn(self._expired(entry, entry.expiry)))

    async def _expired(self, entry: Entry, expiry: asyncio.TimerHandle | None) -> None:
        async with self._turn:
            if entry.expiry is expiry and not entry.users:  # nobody has come since
                await self._unload(entry)

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task

    # -- loading and unloading -------------------------------------------------------------------------------------

    async def _bring(self, entry: Entry) -> None:
        """Load a model for all who wait for it, or tell them why it cannot be."""
        error: ApiError | None = None
        try:
            async with self._turn:
                if not entry.serves:
                    await self._unload(entry)  # where its engine has failed
                    await self._load_in_turn(entry)
        except ApiError as raised:
            error = raised.with_traceback(None)
        except Exception as raised:
            log("internal error", level="error", error=raised)
            error = internal()
        waiters, entry.waiters, entry.bringing = entry.waiters, [], None
        for waiter in waiters:
            if waiter.done():  # its client has left
                continue
            if error is None:
                entry.users += 1
                waiter.set_result(None)
            else:  # each its own: routes change what they raise
                told = ApiError(error.status, error.message, code=error.code, headers=error.headers)
                waiter.set_exception(told)
        self.touched(entry)
        if error is not None:
            await asyncio.to_thread(collect)  # what the failed load has left

    async def _load_in_turn(self, entry: Entry) -> None:
        """Load a model once there is room. Raises ApiError."""
        until = monotonic() + (self.options.request_timeout_s or inf)
        is_short = False  # whether loading has shown that its keys and values do not fit
        while not self._draining:
            if reason := self._without_room(entry, is_short=is_short):
                is_short = False
                if not await self._make_room(entry, reason, until):
                    return  # nobody waits for it any more
                continue
            try:
                entry.backend = await asyncio.to_thread(self._loaded, entry)
                break
            except TooLittleMemoryError as error:
                if not self._others(entry) and not self._kept(entry):
                    raise _unloadable(entry, error) from None
                is_short = True
        if self._draining:
            raise stopping()

    def _loaded(self, entry: Entry) -> Backend:
        """Load it, on a thread. Raises TooLittleMemoryError and ApiError."""
        begun = monotonic()
        log("loading a model", model=entry.name)
        try:
            backend = self._opened(entry)
        except TooLittleMemoryError:
            raise
        except Exception as error:
            known = isinstance(error, (ForetellError, OSError, MemoryError))
            told = _unloadable(
                entry, error if known else ConfigError("an internal error, which is in the server's log")
            )
            log("not loaded", level="error", model=entry.name, error=told.message if known else error)
            raise told from None
        log("loaded a model", model=entry.name, seconds=round(monotonic() - begun, 3))
        return backend

    def _opened(self, entry: Entry) -> Backend:
        """Load it. Raises ForetellError, and whatever else loading raises."""
        stamp, held = stamp_of(entry.path), entry.prefixes
        service = self._load(entry.name, entry.target, held if stamp == entry.stamp else None)
        with self._lock:
            self._services.append(service)
        try:
            if self._closed:
                raise ServiceClosedError(STATES["draining"])
            backend = Backend(service, replace(self.options, served_model_name=(entry.name,)))
        except BaseException:
            self._close(service)
            raise
        entry.about, entry.stamp, entry.prefixes = about(backend), stamp, None
        entry.num_loads += 1
        return backend

    async def _unload(self, entry: Entry) -> None:
        """To be called in turn, of a model that nobody has."""
        backend = entry.backend
        if backend is None:
            return
        entry.counted, entry.backend = lasting(chain(entry.counted, backend.metrics.families())), None
        service = backend.service
        entry.prefixes, model = service.prefixes, weakref.ref(service.engine.model)
        backend.close()
        await asyncio.to_thread(self._close, service)
        del backend, service  # the last references
        await asyncio.to_thread(collect, model)
        log("unloaded a model", model=entry.name)
        kept = self._kept()  # takes no more than what a model that is loaded may hold
        left = max((store.max_bytes for _, store in kept), default=0)
        for _, store in reversed(kept):
            store.shrink(max(0, left))
            left -= store.num_bytes

    def _close(self, service: Service) -> None:
        service.close()
        with self._lock:
            self._services = [one for one in self._services if one is not service]

    # -- room ------------------------------------------------------------------------------------------------------

    def _others(self, entry: Entry) -> list[Entry]:
        """Loaded models that may be unloaded for another, the least recently used first."""
        others = [one for one in self.loaded if one is not entry and not one.pinned]
        return sorted(others, key=lambda one: one.used)

    def _kept(self, but: Entry | None = None) -> list[tuple[Entry, PrefixStore]]:
        """Models that are not loaded and of whose prompts something is kept, the least recently used first."""
        kept = [(one, one.prefixes) for one in self.entries.values() if one.prefixes is not None and one is not but]
        return sorted(kept, key=lambda one: one[0].used)

    def _without_room(self, entry: Entry, *, is_short: bool) -> str:
        """Why a model cannot be loaded beside the others; "" where it can."""
        if len(self.loaded) >= self.several.max_models:
            return f"at most {self.several.max_models} are loaded at once"
        if is_short:
            return "its keys and values find no memory"
        need, free = entry.told().size, self._free()
        if need <= FILL * free or not (self._others(entry) or self._kept(entry) or need > free):
            return ""
        return f"it needs about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"

    async def _make_room(self, entry: Entry, reason: str, until: float) -> bool:
        """Unload another model, or wait until one can be. False where nobody waits for this one any more. Raises ApiError
        503."""
        others, left = self._others(entry), until - monotonic()
        if idle := [one for one in others if not one.users]:
            await self._unload(idle[0])
            return True
        if len(self.loaded) < self.several.max_models and (kept := self._kept(entry)):
            store = weakref.ref(kept[0][1])
            kept[0][0].prefixes = None  # prompts that may come again are worth less than an answer
            del kept
            await asyncio.to_thread(collect, store)
            return True
        if not others or left <= 0:
            there = ", ".join(f"{one.name!r} ({one.doing})" for one in self.loaded) or "none"
            text = f"the model {entry.name!r} cannot be loaded now: {reason}; loaded are {there}"
            raise ApiError(503, text, code="no_room", headers={"retry-after": "5"})
        others[0].is_leaving = True
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if left == inf else left):
                await self._news.wait()
        others[0].is_leaving = False
        return any(not waiter.done() for waiter in entry.waiters)

    # -- as a service ----------------------------------------------------------------------------------------------

    def preload(self) -> None:
        """Before the server runs: load the default model, or all that are pinned. Raises ForetellError as loading does."""
        for entry in self.entries.values():
            if entry.pinned or entry.name == self.default:
                entry.backend = self._opened(entry)
                entry.used, entry.keep_alive_s = monotonic(), self.several.keep_alive_s

    def begin(self) -> None:
        """On the event loop, once it runs: what was loaded before is unloaded as others are."""
        for entry in self.loaded:
            self.touched(entry)

    def start(self) -> None:
        """Nothing: services are started as they are loaded."""

    @property
    def state(self) -> str:
        """See ``Service.state``."""
        return "stopped" if self._closed else "draining" if self._draining else "ready"

    @property
    def says(self) -> str:
        """See ``Service.says``."""
        return STATES[self.state]

    def snapshot(self) -> Snapshot:
        """Requests now."""
        entries = list(self.entries.values())
        waiting = sum(len(one.waiters) for one in entries)
        return Snapshot(num_running=sum(one.users for one in entries), num_waiting=waiting)

    def drain(self, timeout_s: float) -> bool:
        """See ``Service.drain``. For any thread."""
        self._draining, until = True, monotonic() + timeout_s
        with self._lock:
            services = list(self._services)
        done = [service.drain(max(0.0, until - monotonic())) for service in services]  # all refuse requests from now on
        return all(done)

    def close(self) -> None:
        """See ``Service.close``. For any thread."""
        self._draining = self._closed = True
        for entry in self.loaded:
            assert entry.backend is not None
            entry.backend.close()
        with self._lock:
            services = list(self._services)
        for service in services:
            self._close(service)

    def render_metrics(self) -> tuple[bytes, str]:
        """As ``Metrics.render``."""
        loads = {one.name: (one.backend is not None, one.num_loads) for one in self.entries.values()}
        now = [one.backend.metrics.families() for one in self.loaded if one.backend is not None]
        return render_several([*now, *(one.counted for one in self.entries.values())], loads)


def stopping() -> ApiError:
    """For who comes while the server ends."""
    return of_engine(ServiceClosedError(STATES["draining"]))


def _unloadable(entry: Entry, error: BaseException) -> ApiError:
    """What loading has raised, without paths of this machine."""
    reason = str(error) or type(error).__name__
    for path in {entry.target, str(entry.path or entry.target)}:
        reason = reason.replace(path, entry.name)
    text = f"the model {entry.name!r} cannot be loaded: {reason}"
    return ApiError(500, text, code="model_not_loaded", headers={"x-should-retry": "false"})
