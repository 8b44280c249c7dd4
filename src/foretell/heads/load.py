"""Heads by name, checked against the target that they are to draft for."""

import torch

from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ModelError, nearest
from foretell.heads import formats
from foretell.heads.head import AnyHead, Head
from foretell.heads.layout import an
from foretell.model.target import CausalModel, ModelSpec


def load_head(
    name: str,
    spec: ModelSpec,
    kind: type[AnyHead],
    *,
    dtype: torch.dtype | None = None,
    target: CausalModel | None = None,
) -> AnyHead:
    """The head of this name: a directory, "bundled/<method>" or a Hugging Face id, ready to decode.

    It lies on the target's device, its parameters in dtype (None: the target's, and ``packed`` is kept), frozen, in eval
    mode. Raises ModelError where there is none, where it is of another kind, and where it was not made for a target of this
    size. target: the model of this spec, whose rows a head may have to borrow.
    """
    head = formats.load(resolve(name), num_layers=spec.num_layers, name=name)
    if not isinstance(head, kind) or head.method != kind.method:  # a kind may build on another
        raise ModelError(
            f"{name} holds {an(head.method)}, and {an(kind.method)} is needed here: choose method "
            f"{head.method!r}, or give {an(kind.method)}"
        )
    head.check_target(spec, name=name)
    if dtype is not None:
        head.packed = {}  # values of its own: it may be trained
    if head.lent:
        if target is None:
            raise ModelError(
                f"{name}: its output head is the target's own rows, which only a loaded target can lend it"
            )
        head.borrow(target)
    head.to(spec.device).eval().requires_grad_(requires_grad=False)
    for parameter in head.parameters():  # buffers keep what they are: maps, and calibration in float32
        parameter.data = parameter.data.to(dtype or spec.dtype)
        if parameter.dtype == torch.float16 and not bool(parameter.data.isfinite().all()):
            raise ModelError(f"{name}: float16 has no room for the largest of its weights: load the target in bfloat16")
    return head


def load_kind(
    name: str, spec: ModelSpec, kind: str, *, dtype: torch.dtype | None = None, target: CausalModel | None = None
) -> Head:
    """``load_head`` where only the kind's name is known: that of its layout. Raises ModelError, and ConfigError for a kind
    that there is no layout of."""
    known = {layout.head.method: layout.head for layout in formats.LAYOUTS.values()}
    if kind not in known:
        raise ConfigError(f"there is no kind of head called {kind!r}{nearest(kind, known)}")
    return load_head(name, spec, known[kind], dtype=dtype, target=target)
