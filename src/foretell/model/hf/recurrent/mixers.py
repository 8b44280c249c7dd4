"""Recurrent mixers of an unmodified transformers model (gated delta nets, Mamba, short convolutions): finding them, and
letting them go on from the states of a cache during a pass. Where guesses were rejected, ``rewind.py`` takes up the state
at the last accepted one, of mixers whose scan is known; ``again.py`` reads the accepted ones again, of all others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foretell.model.hf.attention import RecordingCache
from foretell.model.hf.reading import Call, ModuleMixer, StateCache, keeper_of
from foretell.model.hf.recurrent.again import ReadingAgain
from foretell.model.hf.recurrent.branching import Branching
from foretell.model.hf.recurrent.known import rewind_of
from foretell.model.hf.recurrent.rewind import Rewinding
from foretell.model.hf.runner import forwards, hooked
from foretell.model.recurrent import Key, MixerLayout


@contextmanager
def mixing(mixers: Sequence[ModuleMixer], cache: StateCache, *, tokenwise: bool) -> Iterator[None]:
    """Let the mixers go on from the states of a cache while the context is open: one pass. tokenwise: they read token by
    token. Changes the modules while it is open, as ``split.layer_range`` does."""
    calls: list[Call] = []
    for index, mixer in enumerate(mixers):
        run = mixer.module.forward
        if mixer.rewind is not None:
            calls.append((Branching if cache.reading.branches else Rewinding)(index, mixer, run, cache))
        else:
            calls.append(ReadingAgain(index, mixer, run, cache, tokenwise=tokenwise))
    with forwards({call.mixer.module: _forward(call) for call in calls}):
        yield


def _forward(call: Call) -> Callable[..., Any]:
    name = call.mixer.argument

    def forward(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            return call(kwargs.pop(name), args, kwargs)
        return call(args[0], args[1:], kwargs)

    return forward


class StateRecorder(RecordingCache):
    """Notes which module asks for which states, as ``RecordingCache`` does for keys and values, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []  # of the layers: the modules being called now, outermost first
        self.found: dict[nn.Module, tuple[int, dict[Key, Tensor]]] = {}  # module -> layer, and its states

    def _note(self, layer: int, key: Key, state: Tensor | None) -> None:
        owner = self.found.setdefault(self.running[-1], (layer, {}))
        if state is not None:
            owner[1][key] = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: nothing has been read."""
        self._note(layer_idx, ("conv", state_idx), None)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The inputs of the convolution, which keeps conv_kernel_size of them."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(layer_idx, ("conv", state_idx), conv_states.new_zeros(*conv_states.shape[:-1], size))
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: nothing has been read."""
        self._note(layer_idx, ("recurrent", state_idx), None)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The state after the probe's tokens."""
        self._note(layer_idx, ("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """See ``StateCache``."""
        return True

    @contextmanager
    def watching(self, layers: nn.ModuleList) -> Iterator[dict[nn.Module, tuple[str, Tensor]]]:
        """Know which module of the layers is running while the context is open. Yields the name and value of each module's
        first argument."""
        inputs: dict[nn.Module, tuple[str, Tensor]] = {}
        handles = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(module)
            name, given = ("", args[0]) if args else next(iter(kwargs.items()), ("", None))
            if "hidden_states" in kwargs:
                name, given = "hidden_states", kwargs["hidden_states"]
            if isinstance(given, Tensor):
                inputs[module] = (name, given)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        for module in {id(module): module for layer in layers for module in layer.modules()}.values():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        with hooked(handles):
            yield inputs

    def mixers(self, layers: nn.ModuleList, inputs: dict[nn.Module, tuple[str, Tensor]]) -> list[ModuleMixer]:
        """The recurrent modules in the order of their layers."""
        found: list[ModuleMixer] = []
        keepers = {}
        for index, layer in enumerate(layers):
            for module in layer.modules():
                keeper = keeper_of(module)
                if keeper is not None and module in inputs:
                    keepers[module] = keeper
                    self.found[module] = index, keeper.states(inputs[module][1])
        for module, (number, states) in self.found.items():
            name, given = inputs[module]
            kept = keepers.get(module)
            layout = MixerLayout(
                layer=number,
                shapes={key: tuple(x.shape[1:]) for key, x in states.items()},
                dtypes={key: x.dtype for key, x in states.items()},
                held={"": (given.shape[-1], given.dtype)},
                device=given.device,
                fill={} if kept is None else kept.fill,
            )
            rewind = None if kept is not None else rewind_of(module, layout)
            layout = layout if rewind is None else rewind.layout
            found.append(ModuleMixer(module, layout, name, given.shape[-1], given.dtype, kept, rewind))
        if any(mixer.rewind is None for mixer in found):  # positions at which states can be saved are a model's
            found = [mixer.reading_again() for mixer in found]
        return sorted(found, key=lambda mixer: mixer.layout.layer)
