"""The adapters of a service: of each tenant, and of each of its methods, a set of weights that learns."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.forwarding import Forwarding, ForwardingMethod
from foretell.draft.shapes import Shape
from foretell.engine.engine import Engine
from foretell.engine.speculation import Speculation
from foretell.learn.options import MAX_TENANTS, RECIPES, LearnOptions, check_configs, weights_of
from foretell.learn.store import VersionStore
from foretell.learn.training.pool import TrainerPool
from foretell.learn.training.process import TrainerProcess
from foretell.learn.training.student import EndMatrices, Origin, matrices_of
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.draft_model.vocabulary.narrow import NarrowModel
from foretell.model.load import parse_device
from foretell.model.target import Target
from foretell.service.drift import DriftWatch

KEPT = 2
"""Versions kept beside the base."""


class LearnedMethod(ForwardingMethod):
    """A loaded method and the versions made of it. Thread-safe where it says so.

    A proposal and its q come from one set of weights, because weights are swapped only where a proposal begins: the
    verifier then judges every guess by the distribution that it was drawn from, whatever is learned meanwhile.
    """

    def __init__(self, base: Method) -> None:
        self.base = self.part = base
        self.name = base.name
        self.capabilities: Capabilities = base.capabilities
        self.exit_layer, self.max_positions = base.exit_layer, base.max_positions
        self.serving: tuple[int, Method] = (0, base)
        """(number, method) of now: replaced as a whole, so that any thread may read it."""
        self.changes = 0  # how often it was replaced
        self._versions: OrderedDict[int, Method] = OrderedDict({0: base})

    def serve(self, number: int, method: Method) -> None:
        """A version that passed the gate serves from the next proposal on."""
        self._versions[number] = method
        for old in list(self._versions)[1:-KEPT]:
            del self._versions[old]
        self.serving, self.changes = (number, method), self.changes + 1

    def revert(self, number: int | None = None) -> int:
        """Serve an earlier version again: the given one, or the one before; returns its number. The base is always kept."""
        now = self.serving[0]
        earlier = [other for other in self._versions if other < now]
        number = (earlier[-1] if earlier else 0) if number is None or number not in self._versions else number
        for later in [other for other in self._versions if other > number]:
            del self._versions[later]
        self.serving, self.changes = (number, self._versions[number]), self.changes + 1
        return number

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions that are kept."""
        return list(self._versions)

    @property
    def runs_as(self) -> str | None:
        """See ``Method``."""
        return self.serving[1].runs_as

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A drafter of the version that serves now, which goes on with later ones."""
        return LearnedDrafter(self, context, capacity, target)


class LearnedDrafter(Forwarding):
    """A drafter of one version, which adopts the next where a proposal begins."""

    def __init__(self, method: LearnedMethod, context: Context, capacity: int, target: Target) -> None:
        super().__init__(method.serving[1].open(context, capacity, target))
        self.method = method
        self.changes = method.changes

    def _renew(self) -> None:
        if self.changes != self.method.changes:
            self.changes = self.method.changes
            self.adopt(self.method.serving[1])

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """The newest version's proposal, with that version's q."""
        self._renew()
        return super().propose(context, shape, draws, noise)

    def join(self, other: Drafter, context: Context) -> None:
        """Both sides adopt the newest version first: one cache holds the keys of one version."""
        assert isinstance(other, LearnedDrafter)
        self._renew()
        other._renew()
        super().join(other, context)

    def num_unread(self, context: Context) -> list[int]:
        """Of the newest version: a draft model reads the texts again after a swap, which the planner counts."""
        self._renew()
        return super().num_unread(context)

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """See ``Drafter``."""
        self._renew()
        return super().catch_up(context, row, most)


FALL, FALL_STEPS = 0.05, 200
"""A version is given up where live acceptance lies so much lower over so many steps after its swap."""


@dataclass
class ServedAdapter:
    """One adapter of one tenant, as it serves."""

    name: str  # "tenant/method/0": its folder has this name
    tenant: str  # "": all requests without a key
    method: LearnedMethod
    origin: Origin
    watch: DriftWatch = field(default_factory=DriftWatch)
    before_swap: float = 0.0  # live acceptance when the version was swapped in
    since_swap: int = -1  # steps since; -1: nothing to watch
    kept_since: int = 0
    num_reverts: int = 0  # versions made before the last one are not served
    # Methods that this one is a part of, by those that they stand for: each is one object, so that its rows share a batch.
    _wholes: WeakKeyDictionary[Method, Method] = field(default_factory=WeakKeyDictionary)

    def within(self, method: Method) -> Method:
        """A loaded method, or what a tenant has of it, with this adapter as its ``trained``."""
        if method.trained is method:
            return self.method
        made = self._wholes.get(method)
        if made is None:
            made = self._wholes[method] = method.with_trained(self.method)
        return made

    def swap(self, number: int, method: Any) -> None:
        """Serve a new version, and watch what it does."""
        quick = self.watch.quick
        self.before_swap, self.kept_since = quick or 0.0, 0
        self.since_swap = -1 if quick is None else 0
        self.method.serve(number, method)

    def revert(self, number: int | None = None) -> None:
        """Serve an earlier version again."""
        self.method.revert(number)
        self.since_swap = -1

    def fell(self, *, kept: bool) -> float | None:
        """One step of it after a swap: live acceptance since then, where FALL_STEPS are over and it lies FALL lower."""
        if self.since_swap < 0:
            return None
        self.since_swap += 1
        self.kept_since += kept
        if self.since_swap < FALL_STEPS:
            return None
        rate, self.since_swap = self.kept_since / self.since_swap, -1
        return rate if rate < self.before_swap - FALL else None


class Adapters:
    """All of them, opened when a tenant first asks. ``find`` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        choices: list[Speculation],
        options: LearnOptions,
        trainers: TrainerPool | TrainerProcess,
        on_restored: Callable[[str, str], None],
    ) -> None:
        """choices: the loaded methods. on_restored is called with an adapter whose weights were found in ``learn_dir``, and
        why they cannot be used (""). Raises ConfigError where the folder cannot be used."""
        self.able = able_to_learn(choices)
        self.engine, self.options, self.trainers = engine, options, trainers
        self.store = None if options.learn_dir is None else VersionStore(options.learn_dir)
        # The least recently used tenant first; its adapters by the id of the loaded method that learns.
        self.by_tenant: dict[str, dict[int, ServedAdapter]] = {}
        self.by_name: dict[str, ServedAdapter] = {}
        self._on_restored = on_restored
        self._is_starting = True
        self._lock = threading.RLock()
        heads = any(choice.config.trained.method != "draft_model" for choice in self.able.values())
        self._matrices: EndMatrices | None = matrices_of(engine.model) if heads else None

    def open_all(self) -> None:
        """Open what requests without a key use: a wrong drafter is found at the start. Raises ConfigError, ModelError."""
        for choice in self.able.values():
            self.find("", choice)
        self._is_starting = False

    def find(self, tenant: str, choice: Speculation) -> ServedAdapter:
        """The adapter that guesses for a tenant's requests by this method, and learns from them."""
        with self._lock:
            mine = self.by_tenant[tenant] = self.by_tenant.pop(tenant, {})
            if id(choice.method.trained) not in mine:
                mine[id(choice.method.trained)] = self._open(tenant, choice)
            while len(self.by_tenant) > MAX_TENANTS + 1:  # "" is always there
                oldest = next(name for name in self.by_tenant if name)
                for one in self.by_tenant.pop(oldest).values():
                    self.by_name.pop(one.name, None)
                    self.trainers.close(one.name)
            return mine[id(choice.method.trained)]

    def of(self, tenant: str | None) -> list[ServedAdapter]:
        """A tenant's; None: all."""
        return [one for one in list(self.by_name.values()) if tenant is None or one.tenant == tenant]

    def _open(self, tenant: str, choice: Speculation) -> ServedAdapter:
        base = choice.method.trained
        origin, method = self._origin(choice), LearnedMethod(base)
        name = f"{tenant}/{choice.config.method}/0"
        found = self._restored(name, origin, base)
        if found is not None:
            origin, method = replace(origin, weights=found[0]), LearnedMethod(found[1])
            self._on_restored(name, "")
        one = self.by_name[name] = ServedAdapter(name, tenant, method, origin)
        self.trainers.open(name, origin)
        return one

    def _restored(self, name: str, origin: Origin, method: Method) -> tuple[dict[str, Tensor], Method] | None:
        """Kept weights, and the method with them. Raises ConfigError at the start alone: later a client's request would be
        refused for what it knows nothing of, so it begins anew."""
        if self.store is None:
            return None
        try:
            found = self.store.load(name, origin)
            if found is None:
                return None
            try:
                return found, method.rebuilt(found)
            except Exception as error:  # each implementation has its own
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise ConfigError(
                    f"{self.store.folder(name)}: the weights that were learned do not fit drafter {origin.init} "
                    f"({said[0]}): it was another one; give another learn_dir, or delete them to begin anew"
                ) from None
        except ConfigError as error:
            if self._is_starting:
                raise
            self.store.set_aside(name)
            self._on_restored(name, str(error))
            return None

    def _origin(self, choice: Speculation) -> Origin:
        config: Any = choice.config.trained
        base: Any = choice.method.trained
        name, init = config.method, weights_of(config)
        slots = min(config.num_speculative_tokens, config.proposal_shape.depth)
        spec = self.engine.model.spec
        if name != "draft_model":
            return Origin(name, init, spec, self._matrices, slots, _floats(base.head.state_dict()))
        tokens = base.model.tokens.cpu() if isinstance(base.model, NarrowModel) else None
        longest = base.model.spec.max_positions
        return Origin(name, init, spec, None, slots, tokens=tokens, longest=longest)


def check_options(engine: Engine, choices: list[Speculation], options: LearnOptions) -> None:
    """Before costs are measured and a process is started. Raises ConfigError where none of the methods can learn, where a
    draft model cannot, and where the device or the folder cannot be used."""
    if engine.model.is_shared:
        raise ConfigError("learning needs one process: it cannot swap weights in several at the same step")
    check_configs([choice.config for choice in choices])
    for choice in able_to_learn(choices).values():
        base: Any = choice.method.trained
        init = weights_of(choice.config)
        if choice.config.trained.method != "draft_model":
            continue
        if base.model.spec.name != init:
            raise ConfigError(
                f"the draft model {base.model.spec.name!r} is in memory: learning reads its weights again, so give its "
                "directory or hub id"
            )
        if type(base) is not DraftModel:
            raise ConfigError(
                f"draft model {init} has another vocabulary than target {engine.model.spec.name}: its guesses are "
                "translated, and it cannot learn while serving; choose one of the target's own vocabulary"
            )
    if options.learn_device is not None:
        parse_device(options.learn_device)
    if options.learn_dir is not None:
        VersionStore(options.learn_dir).close()


def able_to_learn(choices: list[Speculation]) -> dict[int, Speculation]:
    """By the id of the loaded method that learns."""
    return {id(choice.method.trained): choice for choice in choices if choice.config.trained.method in RECIPES}


def _floats(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float32 on the CPU; integers as they are."""
    return {
        name: value.detach().cpu().to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)
        for name, value in weights.items()
    }
