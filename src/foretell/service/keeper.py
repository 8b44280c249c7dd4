"""What outlives a service: what it has learned from requests (``state_dir``), and KV of texts (``prefix_dir``).

One thread writes, every ``BEAT_S`` seconds and at the end. What is to be written is taken between two steps, and is a
copy that nothing changes. A disk that is full costs a line in the log. Nothing of a request with ``store`` false is among
it: such requests use no stores, are counted apart, and their texts are marked in the prefix store.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, ServiceClosedError
from foretell.core.shelf import Shelf
from foretell.draft.base import Method
from foretell.engine.engine import Engine
from foretell.engine.failures import Failures
from foretell.engine.prefix import Prefix, PrefixStore
from foretell.engine.prefix_files import PrefixFiles
from foretell.engine.speculation import Speculation
from foretell.model.identity import arithmetic, target_hash, tokenizer_hash
from foretell.planner.planner import Planner
from foretell.service.options import ServiceOptions

logger = logging.getLogger(__name__)
BEAT_S = 10.0
"""Between two writings: a kill loses what came since."""
MAX_STATE_BYTES = 1 << 30
"""Of all files of ``state_dir``."""
RATES = "acceptance 2"
"""The kind of its file; the number is that of what is counted (2: kept of those allowed)."""


Content = tuple[dict[str, str], dict[str, Tensor]]
"""What ``Shelf.put`` is given beside a name."""


@dataclass(frozen=True)
class Taken:
    """What is to be written: state by the names of the files, and texts."""

    state: dict[str, Content] = field(default_factory=dict)
    prefixes: list[Prefix] = field(default_factory=list)


class Keeper:
    """See the module's docstring. Without directories it does nothing."""

    def __init__(self, engine: Engine, options: ServiceOptions) -> None:
        """Opens the directories. Raises ConfigError where one cannot be written to or another server uses it, and for a
        model that several processes share."""
        self._state: Shelf | None = None
        self._prefixes: PrefixFiles | None = None
        self._stopped, self._ending = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._left: dict[str, Content] = {}  # of stores that were dropped since the last beat
        if (options.state_dir or options.prefix_dir) and engine.model.is_shared:
            raise ConfigError("state_dir and prefix_dir are for one process; several share this model: leave them out")
        model = engine.model
        try:
            if options.state_dir:
                identity = {"target": target_hash(model), "tokenizer": tokenizer_hash(engine.tokenizer)}
                self._state = Shelf(options.state_dir, option="state_dir", identity=identity, max_bytes=MAX_STATE_BYTES)
            if options.prefix_dir:
                shelf = Shelf(
                    options.prefix_dir, option="prefix_dir", identity=arithmetic(model), max_bytes=options.prefix_bytes
                )
                self._prefixes = PrefixFiles(shelf)
        except BaseException:
            self.close()
            raise

    @property
    def prefixes(self) -> PrefixFiles | None:
        """Where the prefix store looks further."""
        return self._prefixes

    # -- what was learned ------------------------------------------------------------------------------------------

    def recall(self, method: Method, choice: Speculation, owner: str) -> None:
        """Give a fresh store what an earlier one of the same method and owner has learned."""
        if self._state is None:
            return
        name = self._name(choice, owner)
        with self._lock:
            left = self._left.get(name)
        try:
            found = self._state.get(name) if left is None else left[1]
            if found:
                method.recall(found)
        except Exception as error:  # of a package's method, or of the disk
            logger.warning("state_dir: what %s has learned cannot be used (%s)", method.name, error)

    def leave(self, method: Method, choice: Speculation, owner: str) -> None:
        """A store is dropped from memory: its file is written with the next beat."""
        with self._lock:
            self._left |= self.stores([(method, choice, owner)])

    def stores(self, held: Sequence[tuple[Method, Speculation, str]]) -> dict[str, Content]:
        """What stores have learned, by the names of their files."""
        if self._state is None:
            return {}
        made = {}
        for method, choice, owner in held:
            memory = method.memory()
            if any(tensor.numel() for tensor in memory.values()):
                made[self._name(choice, owner)] = {"kind": method.name}, memory
        return made

    def recall_rates(self, planner: Planner, settings: Mapping[str, str]) -> None:
        """Give a planner the rates of acceptance that an earlier one has learned, of methods with the same settings."""
        if self._state is None:
            return
        name = self._state.name_of(RATES)
        found = self._state.get(name)
        if found is None:
            return
        about = self._state.entries[name].about
        try:
            was = json.loads(about["settings"])
            pools = [(str(method), int(heat)) for method, heat in json.loads(about["pools"])]
            same = [at for at, (method, _) in enumerate(pools) if was.get(method) == settings.get(method)]
            if same:
                planner.acceptance.recall([pools[at] for at in same], found["counts"][same].numpy())
        except (ValueError, KeyError) as error:
            logger.warning("state_dir: rates of acceptance are learned anew (%s)", error)

    def rates(self, planner: Planner, settings: Mapping[str, str]) -> dict[str, Content]:
        """The rates of acceptance of a planner, by the name of their file."""
        if self._state is None:
            return {}
        pools, counts = planner.acceptance.memory()
        about = {"kind": RATES, "settings": json.dumps(settings), "pools": json.dumps(pools)}
        tensors = {"counts": torch.from_numpy(counts)}
        return {self._state.name_of(RATES): (about, tensors)}

    def _name(self, choice: Speculation, owner: str) -> str:
        assert self._state is not None
        asks = choice.config.proposal_shape.asks_acceptance
        return self._state.name_of(json.dumps([*choice.config.weights, asks], default=str), owner)

    # -- writing ---------------------------------------------------------------------------------------------------

    def start(self, take: Callable[[], Taken], failures: Failures) -> None:
        """Write what take() returns, every beat. It is called on the writer's thread, and may wait for a step to end.
        failures: where its own are counted."""
        if self._state is None and self._prefixes is None:
            return

        def beat() -> None:
            while not self._stopped.wait(BEAT_S):
                try:
                    self.write(take())
                except ServiceClosedError:
                    return  # the end writes
                except Exception as error:  # nothing that is kept is worth the service
                    failures.fault("keeper", error, "what the service has learned was not written")

        self._thread = threading.Thread(target=beat, name="foretell-keeper", daemon=True)
        self._thread.start()

    def write(self, taken: Taken) -> None:
        """Write all of it."""
        with self._lock:
            left, self._left = self._left, {}
        if self._state is not None:
            for name, (about, tensors) in {**left, **taken.state}.items():
                self._state.put(name, about, tensors)
        if self._prefixes is not None:
            for prefix in taken.prefixes:
                self._prefixes.put(prefix)

    def take_prefixes(self, store: PrefixStore | None) -> list[Prefix]:
        """Texts of a store that may be written."""
        return [] if store is None or self._prefixes is None else store.to_store()

    def finish(self, take: Callable[[], Taken] | None) -> None:
        """Wait until the thread writes no more, write what take() returns, and close. Idempotent, and whoever calls it
        meanwhile waits."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        with self._ending:
            try:
                if take is not None and (self._state or self._prefixes) is not None:
                    self.write(take())
            finally:
                self.close()

    def close(self) -> None:
        """Leave the directories to others. Idempotent."""
        for shelf in (self._state, None if self._prefixes is None else self._prefixes.shelf):
            if shelf is not None:
                shelf.close()
        self._state = self._prefixes = None
