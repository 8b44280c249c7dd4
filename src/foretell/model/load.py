"""Loading models and tokenizers by name: the one place that chooses between the implementations of ``CausalModel``."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from os import PathLike, fspath
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch

from foretell.checkpoints import tokenizer as tokenizers
from foretell.checkpoints.directories import check_files, check_layers, resolve
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.tokenizer import read_tokenizer
from foretell.checkpoints.lora import Lora, read_loras
from foretell.checkpoints.names import FAST, torch_name
from foretell.checkpoints.source import is_file, read_config, read_plain
from foretell.checkpoints.weights import ShapeError
from foretell.core.errors import ConfigError, ModelError, first_line
from foretell.core.progress import tell
from foretell.core.settings import value_of
from foretell.kernels.build import SETTLED, warn_once
from foretell.model.host import drawn_on_host
from foretell.model.loading import OWN_CODE, Found, Loading, Wish, no_loras, plan_loading
from foretell.model.target import CausalModel

if TYPE_CHECKING:  # transformers takes seconds to import: only what needs it imports it, and what imports it
    from transformers import PreTrainedModel

    from foretell.model.parallel import Launch

LARGE = 10**8  # bytes of weights from which it is said that a token could read fewer
ModelInMemory: TypeAlias = Union[CausalModel, "PreTrainedModel"]
"""What ``as_model`` takes."""
LoraGiven: TypeAlias = Mapping[str, str | PathLike[str]] | str | PathLike[str] | None
"""Adapters by name, or the directory of one; see ``load_model``."""
logger = logging.getLogger(__name__)
_draws_bars = True


@drawn_on_host
def load_model(
    name: str | PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    device_map: str | dict[str, Any] | None = None,
    implementation: str = "auto",
    tensor_parallel: bool = False,
    weights: str = "auto",
    kv: str = "auto",
    memory_gib: float | None = None,
    trust_remote_code: bool = False,
    lora: LoraGiven = None,
) -> CausalModel:
    """Load a decoder-only language model: "bundled/target", a directory, a GGUF file, or a Hugging Face id.

    dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own. By default (None) the checkpoint's own
    on accelerators and float32 on the CPU. device_map is accelerate's, for models larger than one device; it implies
    ``implementation="transformers"``, and so does tensor_parallel: this process's shard, of as many as torchrun started
    (docs/parallel.md). implementation "auto" takes the fastest that supports the model. An id may end in "@" and a
    revision: a branch, a tag or a commit. trust_remote_code runs the Python code that a model comes with.

    weights: "auto" holds matrices as the checkpoint does: those of a quantised GGUF file stay packed and are multiplied as
    they are, others are in dtype. "fp32" and "bf16" dequantise. "int8" and "int4" round any checkpoint's, which only the
    native implementation runs; "least", for drafts, rounds to 4 bits where that implementation runs a model of 64 million
    weights or more, and is "auto" elsewhere. Where matrices are quantised, dtype is that of keys, values and of what is not
    quantised, by default bfloat16 where the CPU multiplies it; and the distribution is the quantised model's.

    kv: "auto" holds keys and values in dtype; "int8" rounds each of a head's with a scale of its own, which only the native
    implementation reads: about half the memory of bfloat16, and the distribution of a model that reads them so.

    memory_gib: for weights, keys and values, and passes together, which only the native implementation keeps to. A mixture
    that does not fit leaves experts in its files and reads them as they are needed, with the same text; so it does without
    memory_gib where it does not fit what is free.

    lora: adapters in directories of peft. {name: directory, ...} holds them beside the weights (``CausalModel.loras``).
    One directory is merged into weights that are floats before they are rounded; beside those that stay quantised it is
    held under its own name. "native" and "lean" run them.

    Raises ConfigError for invalid options (with the reason, where a forced implementation does not support this model)
    and ModelError where the model cannot be found, is damaged, or cannot be decoded over trees.
    """
    name = fspath(name)
    loras = read_loras(named_loras(lora))
    wish = Wish(
        name, parse_dtype(dtype), dtype == "auto", device_map=device_map, implementation=implementation,
        tensor_parallel=tensor_parallel, weights=weights, kv=kv, num_loras=len(loras),
        merges=bool(loras) and not isinstance(lora, Mapping), memory_gib=value_of(memory_gib, float | None, "memory_gib"),
    )  # fmt: skip
    wish.check()
    launch = None
    if tensor_parallel:
        from foretell.model.parallel import Launch

        launch = Launch.find()
    wish = replace(wish, device=parse_device(device if launch is None else launch.device(device)))
    path = resolve(name, code=trust_remote_code)
    found = _found(wish, path, trusted=trust_remote_code)
    loading = plan_loading(wish, found)
    if loading.is_widened:
        _tell_widened(name, path, found)
    if launch is not None:
        return _shard(wish, path, loading, launch)
    (merged,), held = (loras.values(), {}) if loading.merges else ((None,), loras)
    model = _run(wish, path, loading, merged)
    if held:
        model.add_loras(held)
    return model


def _found(wish: Wish, path: Path, *, trusted: bool) -> Found:
    """Look at the files. Raises ModelError where they cannot be used."""
    name = wish.name
    plain = None if is_file(path) else _plain(path, name=name)
    if plain is None and not is_file(path):
        from foretell.model.hf.code import has_code

        if has_code(path, name=name, trusted=trusted):
            return Found(has_code=True)
    files = check_files(path, name=name)
    if is_file(path):
        plain = _plain(path, name=name)
    if plain is None or wish.tensor_parallel:
        from foretell.model.hf.refusals import check_config

        config = load_config(path, name=name)
        check_config(config, name=name)
    else:
        config = plain[0]
    check_layers(files, config, name=name)
    stored = getattr(config.get_text_config(), "dtype", None) or files.dtype
    return Found(
        is_gguf=is_file(path),
        stored=stored,
        is_quantised=files.is_quantised,
        unsupported=lambda kind, dtype: unsupported(kind, config, dtype, wish.device),
    )


def _run(wish: Wish, path: Path, loading: Loading, merged: Lora | None) -> CausalModel:
    """The model by the first of the ways that works."""
    name, reasons = wish.name, dict(loading.reasons)
    for way in loading.ways:
        if way in FAST:
            assert loading.dtype is not None
            try:
                model = _load_fast(way, wish, path, loading.dtype, merged)
                _tell_slower(name, way, reasons, wish.device)
                return model
            except Exception as error:
                # A fast implementation that fails must not prevent loading by another one.
                if isinstance(error, ShapeError) or wish.implementation in FAST or wish.rounds:
                    raise
                reasons[way] = first_line(error)
        else:
            _tell_slower(name, way, reasons, wish.device)
            return _load_module(way, wish, path, loading.dtype)
    raise no_loras(name, reasons)


def _load_module(way: str, wish: Wish, path: Path, dtype: torch.dtype | None) -> CausalModel:
    """As a module of transformers, or by the code that the model comes with."""
    from foretell.model.hf.adapter import TransformersModel
    from foretell.model.hf.code import load_with_code

    if way == OWN_CODE:
        return load_with_code(
            path, name=wish.name, dtype=dtype, device=wish.device, device_map=wish.device_map,
            implementation=wish.implementation, is_auto_dtype=wish.is_auto_dtype,
        )  # fmt: skip
    if not _draws_bars:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    begun = monotonic()
    tell(wish.name, 0.0)
    assert dtype is not None
    model = TransformersModel.load(path, dtype=dtype, device=wish.device, device_map=wish.device_map, name=wish.name)
    _tell_loaded(wish.name, way, begun)
    return model


def _shard(wish: Wish, path: Path, loading: Loading, launch: "Launch") -> CausalModel:
    """This process's part of a model."""
    from foretell.model.parallel import ShardedModel, check_divides

    assert loading.dtype is not None
    check_divides(load_config(path, name=wish.name), launch.num_processes, name=wish.name)
    return ShardedModel.load_shard(path, launch, dtype=loading.dtype, device=wish.device, name=wish.name)


@drawn_on_host
def from_module(module: "PreTrainedModel", *, name: str | None = None) -> CausalModel:
    """Wrap a transformers model that is already in memory and stays as it is (one in training mode is in eval mode during
    passes alone). Raises ModelError as above."""
    from foretell.model.hf.adapter import TransformersModel

    return TransformersModel(module, name=name)


def as_model(given: Any) -> CausalModel:
    """A model in memory as foretell decodes it: its own kind, or wrapped by ``from_module``. Raises ConfigError for
    anything else."""
    if isinstance(given, CausalModel):
        return given
    if "transformers" in sys.modules:  # else it is none of its models
        from transformers import PreTrainedModel

        if isinstance(given, PreTrainedModel):
            return from_module(given)
    hint = "; for a name or directory use Engine.load" if isinstance(given, str) else ""
    raise ConfigError(f"{given!r} is no model: expected one of transformers or of foretell{hint}")


def load_tokenizer(name: str | PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, by the same names as ``load_model``: one of transformers, or ``PlainTokenizer``, which has
    all its methods. Raises ModelError where there is none."""
    name = fspath(name)
    path = resolve(name)
    if is_file(path):
        return read_tokenizer(open_gguf(path, name=name))
    found = tokenizers.read_tokenizer(path, partial(_whole, path, name))
    found = found or _transformers_tokenizer(path, name, trust_remote_code=trust_remote_code)
    if set(found.get_vocab()) <= set(found.all_special_tokens):  # what some classes make of a folder without one
        raise ModelError(
            f"{name}: no tokenizer could be loaded from {path} (it has none, or one without a single word)"
        )
    return found


def _whole(path: Path, name: str, _: tokenizers.PlainTokenizer) -> Any:
    return _transformers_tokenizer(path, name, trust_remote_code=False)


def _transformers_tokenizer(path: Path, name: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        has_any = any(word in file.name for file in path.iterdir() for word in ("token", "vocab", ".model"))
        why = first_line(error) if has_any else "it holds none; expected the directory of a Hugging Face model"
        raise ModelError(f"{name}: no tokenizer could be loaded from {path} ({why})") from error
    if not getattr(found, "chat_template", None):  # transformers reads this file for processors alone
        found.chat_template = tokenizers.processors_template(path)
    return found


def load_config(path: Any, *, name: str) -> Any:
    """The transformers configuration of a directory or GGUF file. Raises ModelError where it cannot be read."""
    return _read(read_config, path, name=name)


def _plain(path: Path, *, name: str) -> Any:
    """See ``read_plain``."""
    return _read(read_plain, path, name=name)


def _read(read: Callable[..., Any], path: Path, *, name: str) -> Any:
    try:
        return read(path, name=name)
    except ModelError:
        raise
    except Exception as error:
        what = path.name if is_file(path) else "config.json"
        raise ModelError(f"{name}: {what} cannot be used ({first_line(error)})") from error


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name; None for None and "auto". Raises ConfigError for anything else."""
    if dtype is None:
        return None
    name = torch_name(dtype)
    return None if name is None else getattr(torch, name)


def parse_device(device: str | torch.device) -> torch.device:
    """A device that exists here. Raises ConfigError for one that is no device, or that torch cannot use."""
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:  # "not compiled with CUDA enabled" is an AssertionError
        raise ConfigError(f"device {str(device)!r} cannot be used here ({first_line(error)}); try 'cpu'") from error
    return where


def unsupported(kind: str, config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why implementation ``kind`` ("lean" or "native") cannot run a configuration; None where it can."""
    try:
        module = importlib.import_module(f"foretell.model.llama.run.{kind}")
        reason: str | None = module.supports(config, dtype, device)
    except Exception as error:  # no compiler, or an operator that does not build
        return first_line(error)
    return reason


def _tell_slower(name: str, chosen: str, reasons: Mapping[str, str], where: torch.device) -> None:
    """Warn once that a faster implementation does not run, and why; not of what the user chose or the machine cannot do."""
    before = [kind for kind in takewhile(lambda kind: kind != chosen, FAST) if kind in reasons]
    for kind in before:
        logger.info("%s: not loaded as %s: %s", name, kind, reasons[kind])
    for kind in before:
        reason = reasons[kind]
        if not reason.startswith(SETTLED) and (kind != "native" or where.type == "cpu"):
            warn_once(f"{name} runs as {chosen!r}, which is slower than {kind!r}: {reason}", reason)
            return


def _tell_widened(name: str, path: Path, found: Found) -> None:
    """Warn once that a large checkpoint runs in float32 though it could as it is stored: a token reads twice the bytes."""
    size = sum(file.stat().st_size for file in ([path] if is_file(path) else path.glob("*.safetensors")))
    if size >= LARGE and found.stored is not None and found.unsupported("native", found.stored) is None:
        stored = str(found.stored).removeprefix("torch.")
        told = f"{name} is stored in {stored} and runs in float32"
        warn_once(f"{told}, which reads twice the bytes for each token: dtype 'auto' runs it as it is stored", told)


def named_loras(lora: LoraGiven) -> Mapping[str, str | PathLike[str]]:
    """Adapters by name; a single directory by its own."""
    if lora is None or isinstance(lora, Mapping):
        return lora or {}
    return {Path(fspath(lora)).expanduser().resolve().name: lora}


def _load_fast(kind: str, wish: Wish, path: Path, dtype: torch.dtype, merged: Lora | None) -> CausalModel:
    begun = monotonic()
    tell(wish.name, 0.0)
    module = importlib.import_module(f"foretell.model.llama.run.{kind}")
    options: dict[str, Any] = {"weights": wish.weights, "kv": wish.kv} if kind == "native" else {}
    if wish.memory_gib is not None:
        options["memory"] = int(wish.memory_gib * 2**30)
    if merged is not None:
        options["merged"] = merged
    model: CausalModel = getattr(module, FAST[kind]).load(
        path, dtype=dtype, device=wish.device, name=wish.name, **options
    )
    if merged is not None:
        model.spec = replace(model.spec, merged=str(merged.path))
    _tell_loaded(wish.name, kind, begun)
    return model


def _tell_loaded(name: str, kind: str, begun: float) -> None:
    """Say that a model is in memory. begun: ``monotonic()`` when it was asked for."""
    tell(name, 1.0)
    logger.info("%s: loaded as %s in %.1f s", name, kind, monotonic() - begun)


def draw_no_bars() -> None:
    """No bars on the terminal while weights load: for a process that has none of its own."""
    global _draws_bars
    _draws_bars = False
