"""Checkpoints of heads: Hugging Face directories (config.json and safetensors) in the layouts of other engines.

Whatever a head needs is always written, defaults too: layer ids, norm flags, mask token, the layer it reads. Keys that
other tools' files lack are filled in only where all engines use the same default.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from foretell.checkpoints.directories import resolve
from foretell.checkpoints.gguf.heads import OUTPUT_LENT
from foretell.checkpoints.packed import Packed
from foretell.checkpoints.source import is_file
from foretell.core import builtin
from foretell.core.errors import ConfigError, ForetellError, ModelError, nearest
from foretell.core.jsontext import parse_json
from foretell.core.registry import Registry, UnusableError, load_reference, part_of
from foretell.heads.config_keys import Keys
from foretell.heads.directories import HOLDERS, as_json, read_config, read_tensors, replace
from foretell.heads.head import AnyHead, Head
from foretell.heads.layout import (
    MARKER,
    FoundLayout,
    Layout,
    TargetInfo as TargetInfo,
    an,
    architecture,
    check_layer_ids,
    fill,
    marker,
)
from foretell.heads.repacked import OUTPUT
from foretell.model.target import CausalModel, ModelSpec


@contextmanager
def blamed(layout: Layout) -> Iterator[None]:
    """While inside, whatever a package's layout, or its training, raises is one ModelError that names the package."""
    try:
        yield
    except ForetellError:
        raise
    except Exception as error:
        what = f"{HEADS.called(layout.name)} ({type(layout).__module__})"
        raise ModelError(f"{what} cannot be used ({type(error).__name__}: {error})") from error


def _layout(name: str, found: Any) -> Layout:
    """The layout of a package. Raises UnusableError."""
    made = part_of(name, found, Layout, ("summary", "head"), options=False)  # type: ignore[type-abstract]
    if wrong := [key for key, value in made.options.items() if type(value) not in (bool, int, float, str)]:
        raise UnusableError(f"the default of its option {wrong[0]!r} must be of type bool, int, float or str")
    for call in ("claims", "suits", "outward", "inward", "describe", "parse", "build", "objective"):
        setattr(made, call, blamed(made)(getattr(made, call)))
    return made


HEADS: Registry[Layout] = Registry(
    "head", {one.name: one for one in (load_reference(each)() for each in builtin.LAYOUTS)}, "foretell.heads", _layout
)
"""Layouts by name: of two for one head the first that suits is the default; a directory is read in the first that
claims it. Those of packages come from entry points of the group "foretell.heads": a subclass of Layout."""


def default_layout(head: Head) -> Layout:
    """The layout that a head is written in where none is named. Raises ConfigError for a head that has none."""
    for layout in HEADS.values():
        if layout.suits(head) is None:
            return layout
    raise ConfigError(f"{type(head).__name__} has no checkpoint layout")


def save(
    head: Head,
    path: str | Path,
    layout: str | None = None,
    *,
    target_name: str | None = None,
    target: ModelSpec | TargetInfo | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a head to directory path, in the dtypes that it has. All or nothing: see ``files.replace``.

    target (or its name alone) goes into the keys that layouts have for it; extra, anything JSON, under this library's
    own key. Raises ConfigError for an unknown layout, one that cannot hold this head (with the reason), and a path
    that holds a model not written here; ModelError where the head's layer ids are such that engines would order them
    otherwise; OSError where the disk is full.
    """
    if layout is not None and layout not in HEADS:
        raise ConfigError(f"layout {layout!r} is unknown{nearest(layout, HEADS.names())}")
    chosen = default_layout(head) if layout is None else HEADS[layout]
    _check_whole(head)
    reason = chosen.suits(head)
    if reason is not None:
        raise ConfigError(f"layout {chosen.name!r} cannot hold this head: {reason}")
    if head.taps:
        check_layer_ids(head.taps, name=str(path), source="the head's configuration")
    _check_ours(Path(path))
    about = _about(target, target_name)
    config = chosen.describe(head, about)
    dtype = str(head.dtype).removeprefix("torch.")
    known = {key: value for key, value in asdict(about).items() if value is not None}
    said = {"layout": chosen.name, "method": head.method, "target": known, **config.get(MARKER, {})}
    config |= {"dtype": dtype, "torch_dtype": dtype, MARKER: {**said, **({"extra": dict(extra)} if extra else {})}}
    tensors = {
        chosen.outward(name, head.config): tensor.detach().cpu().contiguous().clone()  # stacked ones share memory
        for name, tensor in head.state_dict().items()
    }
    files = {chosen.weights: to_bytes(tensors, metadata={"format": "pt"}), "config.json": as_json(config)}
    replace(Path(path), files, stale=[file for file in HOLDERS if file != chosen.weights])


def save_gguf(
    head: Head,
    path: str | Path,
    vocabulary: Mapping[str, Any],
    *,
    target: ModelSpec | TargetInfo | None = None,
    kind_of_matrices: str | None = None,
    lend_output: bool = False,
) -> None:
    """Write a head as a GGUF file of llama.cpp's architectures. vocabulary: what ``gguf.write_heads.vocabulary_of`` says of
    the target. kind_of_matrices: see ``gguf.write_heads.write_head``. lend_output: leave out the output head, which must be
    the target's own rows, as where it was not trained: they are read from the target when the head is loaded. Raises
    ConfigError for a head that these do not have, or a path that holds another model."""
    from foretell.checkpoints.gguf.heads import HeadFile
    from foretell.checkpoints.gguf.write_heads import write_head

    if not lend_output:
        _check_whole(head)
    layout, about = default_layout(head), _about(target, None)
    tensors = {layout.outward(name, head.config): tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    config = layout.describe(head, about)
    if lend_output:
        if head.method != "eagle3" or "d2t" not in tensors:
            raise ConfigError(f"the output head of {head.method} heads is their own: it cannot be left out")
        del tensors[OUTPUT]
        config = {**config, MARKER: {OUTPUT_LENT: True}}
    file = HeadFile(config, tensors, {})
    write_head(
        Path(path), file, vocabulary, method=head.method, context=about.max_positions, kind_of_matrices=kind_of_matrices
    )


def load(path: str | Path, *, num_layers: int | None = None, name: str | None = None) -> Head:
    """Read a head from a directory in any of HEADS, or from a GGUF file; its weights keep the dtype that they were stored
    in, and quantised ones are dequantised, and kept in ``Head.packed`` too.

    num_layers: of the target, from which some files' defaults follow. name: used in messages. Raises ModelError for a
    directory without a head, and for every tensor or key that is missing, unexpected or wrong.
    """
    called = str(path) if name is None else name
    config, tensors, layout, packed = _open(Path(path), called)
    held = {layout.inward(key): tensor for key, tensor in tensors.items() if layout.inward(key) not in layout.ignored}
    lent = config.get(MARKER, {}).get(OUTPUT_LENT) is True and is_file(Path(path))  # by a key of the GGUF file
    if lent:
        held[OUTPUT] = torch.zeros(len(held["d2t"]), held["fc.weight"].shape[0], dtype=held["fc.weight"].dtype)
    found = FoundLayout(called, Keys(config, called), held, num_layers)
    try:
        head = layout.build(layout.parse(found), found)
    except (ConfigError, ModelError) as error:  # raised by the head's configuration, without the directory's name
        message = str(error)
        raise ModelError(message if message.startswith(called) else f"{called}: {message}") from error
    fill(head, found.tensors, name=called)
    head.lent = (OUTPUT,) if lent else ()
    head.max_positions, head.trained_length = _max_positions(Keys(config, called)), _trained_length(Path(path))
    head.packed = {layout.inward(key): matrix for key, matrix in packed.items() if layout.inward(key) in found.tensors}
    return head


def detect(path: str | Path) -> Layout:
    """The layout of a directory. Raises ModelError where it is none of them."""
    return _open(Path(path), str(path))[2]


def describe_target(path: str | Path) -> TargetInfo:
    """The target recorded in a directory, for which its head was trained."""
    if is_file(Path(path)):
        return TargetInfo()  # a GGUF file says of the sizes alone what its target is
    keys = Keys(read_config(Path(path), name=str(path)), str(path))
    said = keys.inner(MARKER).inner("target")
    verifier = keys.inner("speculators_config").inner("verifier")
    architectures = verifier.values.get("architectures")
    values = {
        "name": verifier.values.get("name_or_path") or keys.values.get("base_model_name_or_path"),
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "num_layers": keys.values.get("num_target_layers"),
        "max_positions": _max_positions(keys),
        **said.values,
    }
    texts = {key: values[key] for key in ("name", "architecture") if isinstance(values[key], str)}
    sizes = {key: values[key] for key in ("num_layers", "max_positions") if isinstance(values[key], int)}
    return TargetInfo(**texts, **sizes)


def _max_positions(keys: Keys) -> int | None:
    layer = keys.inner("transformer_layer_config").values
    given = layer.get("max_position_embeddings", keys.values.get("max_position_embeddings"))
    return given if isinstance(given, int) else None


def _trained_length(path: Path) -> int | None:
    """By the record that training here leaves beside a head."""
    folder = path.parent if is_file(path) else path
    try:
        found = parse_json((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    config = found.get("config") if isinstance(found, Mapping) else None
    length = config.get("max_length") if isinstance(config, Mapping) else None
    return length if isinstance(length, int) and length > 0 else None


def describe_extra(path: str | Path) -> dict[str, Any]:
    """What ``save`` was given as extra; empty where there was none."""
    found = None if is_file(Path(path)) else marker(read_config(Path(path), name=str(path))).get("extra")
    return dict(found) if isinstance(found, Mapping) else {}


def _open(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor], Layout, dict[str, Packed]]:
    if is_file(path):
        from foretell.checkpoints.gguf.heads import read_head

        file = read_head(path, name=name)
        claimed = next(layout for layout in HEADS.values() if layout.claims(file.config, file.tensors))
        return file.config, file.tensors, claimed, file.packed
    config = read_config(path, name=name)
    prefer = next((layout.weights for layout in HEADS.values() if layout.claims(config, {})), "model.safetensors")
    tensors = read_tensors(path, name=name, prefer=prefer)
    kind = config.get("speculators_model_type")
    for layout in HEADS.values():
        if layout.claims(config, tensors) and kind in (None, layout.speculators):
            return config, tensors, layout, {}
    if isinstance(written := marker(config).get("layout"), str) and written not in list(HEADS):
        absent = f"it holds a head of layout {written!r}, of a package that is not installed here: install it"
        raise ModelError(f"{name}: {HEADS.refused.get(written, absent)}")
    said = f"speculators_model_type {kind!r}" if kind else f"architecture {architecture(config)!r}"
    known = sorted({name for layout in HEADS.values() for name in layout.architectures})
    whole = ""
    if kind:
        read = sorted({layout.speculators for layout in HEADS.values() if layout.speculators})
        whole = f"; of the speculators library, heads of type {', '.join(map(repr, read))} are read"
    elif "lm_head.weight" in tensors:
        whole = "; it looks like a whole model: use method 'draft_model'"
    raise ModelError(
        f"{name}: config.json names {said}, which is no head known here (known: {', '.join(known)}, and Medusa "
        f"directories with medusa_num_heads){whole}"
    )


def is_ours(path: Path) -> bool:
    """Whether a directory holds a head that foretell wrote."""
    return (path / "config.json").is_file() and bool(marker(read_config(path, name=str(path))))


def _check_ours(path: Path) -> None:
    """Refuse to overwrite files of other tools: a wrong --out must not destroy a model."""
    if not any((path / file).exists() for file in ("config.json", *HOLDERS)):
        return
    if not is_ours(path):
        raise ConfigError(f"{path} holds a model that foretell did not write; choose another directory for the head")


def _check_whole(head: Head) -> None:
    """Refuse to write zeros for what is the target's."""
    if head.lent:
        raise ConfigError(
            "the output head of this head is rows of its target, which it was not loaded with: name the target (--target)"
        )


def _about(target: ModelSpec | TargetInfo | None, name: str | None) -> TargetInfo:
    if target is None:
        return TargetInfo(name)
    return TargetInfo(name or target.name, target.architecture, target.num_layers, target.max_positions)


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
    head = load(resolve(name), num_layers=spec.num_layers, name=name)
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
    found = next((layout.head for layout in HEADS.values() if layout.head.method == kind), None)
    if found is None:
        known = {layout.head.method for layout in HEADS.values()}
        raise ConfigError(f"there is no kind of head called {kind!r}{nearest(kind, known)}")
    return load_head(name, spec, found, dtype=dtype, target=target)
