"""What a GGUF architecture is made of: transformers' type, names of tensors, its configuration, and what llama.cpp's
converter changes. One value an architecture, listed in ``architectures.py``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.rope import FREQS, LONG, SHORT

LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BIASES = {f"{theirs}.bias": f"{ours}.bias" for theirs, ours in LINEARS.items()}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
HEAD = {"output.weight": "lm_head.weight"}  # absent where the head is the embedding


class Change(NamedTuple):
    """How a tensor of transformers follows from those of the file."""

    order: Tensor | None = None  # [rows] int64, where each row is in the file, whose blocks can stay packed; None: at i
    undo: Callable[[list[Tensor]], Tensor] | None = None  # of the file's tensors in float32, one a name; None: as it is
    shape: tuple[int, ...] | None = None  # of the whole; None: that of the file's
    columns: Tensor | None = None  # [columns] int64, where each column is in the file; None: at i


@dataclass(frozen=True)
class Architecture:
    """One architecture. Tables go from names in the file to transformers'; several names that go to one of transformers'
    are joined by its ``Change``, which has them in the table's order: by undo, or, without, as rows below each other, of
    which order says where each is."""

    model_type: str
    class_name: str
    layer: Mapping[str, str]  # what every layer has: without blk.N. and model.layers.N.
    # What config.json would say, without what all files have (``gguf/config.py``)
    config: Callable[[GGUFFile], dict[str, Any]]
    some: Callable[[GGUFFile, int], Mapping[str, str]] | None = None  # what layer N alone has beside these
    may: Mapping[str, str] = field(default_factory=lambda: BIASES)  # what every layer may have
    some_may: Callable[[GGUFFile, int], Mapping[str, str]] | None = None  # what layer N alone may have beside these
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)  # of no layer
    whole_may: Mapping[str, str] = field(default_factory=lambda: HEAD)
    adjust: Callable[[GGUFFile, str, tuple[str, ...]], Change | None] | None = None  # (file, ours, theirs)
    # Of each layer that has them: further names (``WeightSource.apart``)
    apart: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = (FREQS, SHORT, LONG)  # tensors that are read as part of the configuration
    prefix: str = "model.layers"

    def required(self, num_layers: int, file: GGUFFile | None = None) -> Iterator[tuple[str, str]]:
        """(name in the file, transformers' name) of all that a model must have. file: None for layers that are alike."""
        return self._named(self.whole, self.layer, self.some, num_layers, file)

    def optional(self, num_layers: int, file: GGUFFile | None = None) -> Iterator[tuple[str, str]]:
        """The same of what it may have."""
        return self._named(self.whole_may, self.may, self.some_may, num_layers, file)

    def _named(
        self,
        whole: Mapping[str, str],
        every: Mapping[str, str],
        some: Callable[[GGUFFile, int], Mapping[str, str]] | None,
        num_layers: int,
        file: GGUFFile | None,
    ) -> Iterator[tuple[str, str]]:
        yield from whole.items()
        for layer in range(num_layers):
            own = {} if some is None or file is None else some(file, layer)
            for theirs, ours in {**every, **own}.items():
                yield f"blk.{layer}.{theirs}", f"{self.prefix}.{layer}.{ours}"
