"""A pretend accelerator: tensors say that they lie on ``pretend:0``, and hold their values in CPU memory.

Every operator on such a tensor comes to ``_run``, on whichever thread, in inference mode or under autograd. It runs the
same operator on the values, counts what an accelerator would do (``Meter``), and raises where CUDA would: tensors on
several devices in one operator, products of integers. ``data_ptr`` returns an address that is not mapped, so a C kernel
that is given a tensor of the device ends the process. Not seen: speed, rounding (it is the CPU's), streams.

Counts are lower bounds: an operator that CUDA runs as several kernels counts as one launch.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
UNMAPPED = 1 << 62
"""Added to addresses: no program may read there."""
WAITS = frozenset({
    "nonzero", "masked_select", "unique_dim", "unique_consecutive", "_unique2", "bincount", "equal", "is_nonzero", "item",
    "_local_scalar_dense", "linalg_solve",
})  # fmt: skip
"""Operators that wait for the device: how large their result is, or what it is, must be known on the host."""
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
SHAPED = frozenset({"expand_as", "view_as", "reshape_as", "is_same_size"})  # of their last argument the shape alone
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "dot", "mv", "linear"})
FREE = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "lift_fresh", "detach", "detach_",
})  # fmt: skip
"""Neither launches nor views: memory is taken, and nothing is computed."""

BY_NAME = (
    "copy_", "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm", "randperm.generator",
)  # fmt: skip
"""Operators that torch would else look for in vain, or make of others that change the shape of a tensor."""

Op = Any
"""An overload of an aten operator."""


@dataclass
class Call:
    """An operator that ran on the device, and can run again on the same memory (``replay``)."""

    phase: str
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    launched: bool  # else a view, or memory that is taken

    def described(self, addresses: bool = False) -> tuple[Any, ...]:
        """(operator, arguments, result): a tensor by its shape, dtype and strides, with addresses where it lies."""

        def describe(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            where = x.untyped_storage().data_ptr() + x.storage_offset() * x.element_size() if addresses else None
            return tuple(x.shape), x.dtype, x.stride(), where

        flat = [describe(x) for x in tree_flatten((self.args, self.kwargs, self.out))[0]]
        return (str(self.op), *map(str, flat))


@dataclass
class Meter:
    """What the device has done since ``reset``."""

    phase: str = "other"
    launches: Counter[str] = field(default_factory=Counter)  # by phase
    reads: Counter[str] = field(default_factory=Counter)  # device to host, by place; each waits
    uploads: Counter[str] = field(
        default_factory=Counter
    )  # host to device, by place; each from memory that is not pinned
    calls: list[Call] | None = None  # in order, where they are recorded
    captures: bool = False  # then a host read and an upload are errors
    graphs: int = 0  # launches that were a graph's
    places: bool = False  # whether places are found: the stack is walked for each

    def reset(self) -> None:
        """Forget all counts."""
        for counter in (self.launches, self.reads, self.uploads):
            counter.clear()

    def place(self, kind: str) -> str:
        """Where the package asked for it."""
        if not self.places:
            return kind
        import traceback

        frames = [frame for frame in traceback.extract_stack() if "/foretell/" in frame.filename]
        at = [f"{frame.filename.rpartition('/foretell/')[2]}:{frame.lineno} {frame.name}" for frame in frames[-2:]]
        return f"{kind} {' < '.join(reversed(at))}"

    def refuse(self, kind: str) -> None:
        """Raise as CUDA does while it captures."""
        if self.captures:
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind}")

    def launch(self, count: int = 1) -> None:
        """Work for the device."""
        self.launches[self.phase] += count

    def read(self, kind: str) -> None:
        """A value comes to the host."""
        self.refuse(kind)
        self.reads[self.place(kind)] += 1

    def upload(self, kind: str) -> None:
        """Values go to the device, and the host waits until they are copied."""
        self.refuse(kind)
        self.uploads[self.place(kind)] += 1


METER = Meter()
"""Of the one pretend device in this process."""


class OnDevice(Tensor):
    """A tensor of the pretend device; ``values`` is the CPU tensor that it stands for."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> "OnDevice":
        """See the class."""
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=device(), requires_grad=requires_grad,
        )  # fmt: skip
        made.values = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``_run``."""
        return _run(op, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """As of any tensor."""
        return self.detach()

    @data.setter
    def data(self, other: "OnDevice") -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.values = other.values

    def data_ptr(self) -> int:
        """An address to compare, not to read."""
        return self.values.data_ptr() + UNMAPPED

    def tolist(self) -> Any:
        """By one copy to the host, as any tensor."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnDevice":
        memo[id(self)] = copied = OnDevice(self.values.clone(), self.requires_grad)
        return copied

    def __repr__(self) -> str:
        return f"OnDevice({self.values!r})"


class _Backend(_DummyBackendModule):
    """``torch.pretend``: what torch asks of a backend. Random numbers are the CPU's."""

    def get_rng_state(self, where: Any = None) -> Tensor:
        return torch.empty(0)

    def set_rng_state(self, state: Tensor, where: Any = None) -> None:
        return


@cache
def device() -> torch.device:
    """``pretend:0``, after torch was told of it. It is not the accelerator that torch finds: other tests of the process
    run on this machine as it is."""
    found = torch.accelerator.current_accelerator()
    torch.accelerator.current_accelerator = lambda check_available=False: found  # type: ignore[assignment]
    _setup_privateuseone_for_python_backend(NAME, _Backend())
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL", "PrivateUse1")
    everything.fallback(_fallback, "PrivateUse1")
    for name in BY_NAME:
        packet, _, overload = name.partition(".")
        some.impl(name, partial(_fallback, getattr(getattr(torch.ops.aten, packet), overload or "default")))
    _KEPT.extend((everything, some))
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign]
    return torch.device(f"{NAME}:0")


_KEPT: list[torch.library.Library] = []


def _pin_memory(tensor: Tensor) -> Tensor:
    """There is no accelerator whose driver would pin it: it is only marked."""
    pinned = tensor.clone()
    pinned.is_pretended_pinned = True  # type: ignore[attr-defined]
    return pinned


def _fallback(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Operators that reach the device's own dispatch key: factories, and what C++ calls below Python."""
    return _run(op, args, kwargs)


def _run(op: Op, args: Any, kwargs: dict[str, Any]) -> Any:
    meter, name = METER, op._schema.name.removeprefix("aten::")
    flat = tree_flatten((args, kwargs))[0]
    mine = [x for x in flat if isinstance(x, OnDevice)]
    hosts = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
    to = next((torch.device(x) for x in flat if isinstance(x, torch.device)), None)
    leaves = bool(mine) and to is not None and to.type == "cpu"
    args_inside, kwargs_inside = tree_map(_inside, args), tree_map(_inside, kwargs)
    if name == "_has_compatible_shallow_copy_type":
        return False
    if name == "copy_" and not isinstance(args[0], OnDevice):
        leaves = True
    elif name == "copy_" and hosts:
        if not (getattr(args[1], "is_pretended_pinned", False) and (args[2] if len(args) > 2 else False)):
            meter.upload("upload")
    elif name in INDEXED:
        _check_index(meter, name, args)
    elif mine and name not in SHAPED and any(x.dim() for x in hosts):
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {op} is given tensors of {NAME} and of the cpu"
        )
    if name in PRODUCTS and mine and not mine[0].dtype.is_floating_point:
        raise RuntimeError(f"{op} of {mine[0].dtype} is not there on CUDA")
    if name in WAITS or (
        name == "repeat_interleave" and not isinstance(args[-1], int) and kwargs.get("output_size") is None
    ):
        meter.read(name)
    if name == "histc" and not args_inside[0].is_floating_point():  # CUDA has it of integers, the CPU has not
        out = op(args_inside[0].float(), *args_inside[1:], **kwargs_inside).to(args_inside[0].dtype)
    else:
        out = op(*args_inside, **kwargs_inside)
    if name in SHAPED and not isinstance(args[0], OnDevice):
        return out
    if leaves:
        meter.read("copy to the host")
        meter.launch()
        return args[0] if name == "copy_" else out
    if name in ("equal", "is_nonzero", "item", "_local_scalar_dense"):
        meter.launch()
        return out
    if any(x.shape != x.values.shape for x in mine):
        raise NotImplementedError(f"{op} changes the shape of its argument: name it in BY_NAME")
    inside = [x.values for x in mine]
    launched = _is_launch(op, name, inside, out)
    if launched:
        meter.launch()
    if meter.calls is not None and (launched or name in FREE or mine):
        meter.calls.append(Call(meter.phase, op, args_inside, kwargs_inside, out, launched))
    back = {id(x.values): x for x in mine}
    return tree_map(lambda x: back[id(x)] if id(x) in back else _outside(x), out)


def _inside(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.values
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _outside(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.is_inference() == torch.is_inference_mode_enabled():
        return OnDevice(x)
    with torch.inference_mode(x.is_inference()):  # a view of a tensor that was made outside is none of inference mode
        return OnDevice(x)


def _is_launch(op: Op, name: str, given: list[Tensor], out: Any) -> bool:
    if name in FREE:
        return False
    if op._schema.is_mutable:
        return True
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
    held = {x.untyped_storage()._cdata for x in given}
    return any(x.untyped_storage()._cdata not in held for x in made)


def _check_index(meter: Meter, name: str, args: Any) -> None:
    values = args[2] if len(args) > 2 else None
    outside = isinstance(values, Tensor) and not isinstance(values, OnDevice) and values.dim() > 0
    if not isinstance(args[0], OnDevice) or outside:
        raise RuntimeError(f"indices of {NAME} and tensors of the cpu in one {name}")
    for index in args[1]:
        if isinstance(index, Tensor) and not isinstance(index, OnDevice):
            meter.upload("index")
            meter.launch()
        if isinstance(index, Tensor) and index.dtype == torch.bool and not (values is not None and values.numel() == 1):
            meter.read("index by bool")


def replay(calls: list[Call]) -> None:
    """Run recorded operators again, on the memory that they used: what a captured graph does."""
    for call in calls:
        out = call.op(*call.args, **call.kwargs)
        for mine, again in zip(tree_flatten(call.out)[0], tree_flatten(out)[0], strict=True):
            if isinstance(mine, Tensor) and mine.data_ptr() != again.data_ptr():
                mine.copy_(again)


class PretendRecorder:
    """Captures graphs (``core.graphs.Recorder``): operators are recorded, and a launch runs them again.

    A capture of CUDA runs nothing; this one does, so its first launch does nothing. What CUDA refuses is refused. The
    memory that graphs took while they were captured is one pool, which every launch may write over: here it is spoilt, so
    that who reads what an earlier launch left there finds out.
    """

    def __init__(self, device: torch.device) -> None:
        """Of the one pretend device."""
        self._pool: list[Tensor] = []

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See ``Recorder``."""
        before, launches = METER.calls, METER.launches.copy()
        METER.calls, METER.captures = [], True
        try:
            out = function()
            calls = METER.calls
        finally:
            METER.calls, METER.captures, METER.launches = before, False, launches
        self._spoil()
        self._pool += _taken(calls)
        has_run = True

        def launch() -> None:
            nonlocal has_run
            METER.launch()
            METER.graphs += 1
            if not has_run:
                self._spoil()
                replay(calls)
            has_run = False

        return launch, out

    def _spoil(self) -> None:
        for memory in self._pool:
            dtype = memory.dtype
            memory.fill_(
                torch.nan if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max // 2
            )


def _taken(calls: list[Call]) -> list[Tensor]:
    """All memory, as vectors, that operators took."""
    held: set[int] = set()
    taken = []
    for call in calls:
        args = [x for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Tensor)]
        held |= {x.untyped_storage()._cdata for x in args}
        for x in tree_flatten(call.out)[0]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in held:
                held.add(x.untyped_storage()._cdata)
                count = x.untyped_storage().nbytes() // x.element_size()
                taken.append(x.new_empty(0).set_(x.untyped_storage(), 0, (count,)))
    return taken


@contextmanager
def recording() -> Iterator[list[Call]]:
    """The operators that run within."""
    METER.calls = calls = []
    try:
        yield calls
    finally:
        METER.calls = None


@contextmanager
def phase(name: str, *, within: str = "") -> Iterator[None]:
    """Count launches for a phase. Within the phase ``within`` they stay that one's."""
    before = METER.phase
    METER.phase = before if within and before == within else name
    try:
        yield
    finally:
        METER.phase = before


def phased(name: str, function: Callable[..., Any], within: str = "") -> Callable[..., Any]:
    """The function, its launches counted for a phase."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with phase(name, within=within):
            return function(*args, **kwargs)

    return call
