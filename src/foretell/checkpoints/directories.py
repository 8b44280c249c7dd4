"""Checkpoint directories: resolve a name, and check that the files are complete before any library opens them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.checkpoints.catalogue import BUNDLED, CATALOGUE, pulled
from foretell.checkpoints.files import SAFETENSORS, weight_files
from foretell.checkpoints.gguf.file import is_gguf, open_gguf
from foretell.checkpoints.packed import BLOCK_KINDS
from foretell.core.errors import ModelError, nearest

if TYPE_CHECKING:  # the command line resolves names before torch is imported
    import torch

_SAFE = (SAFETENSORS, f"{SAFETENSORS}.index.json", "medusa_lm_head.safetensors")  # what makes pickled weights needless
_HUB_ID = re.compile(r"\w([\w.-]*\w)?(/\w([\w.-]*\w)?)?(@\S+)?")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Weights:
    """Facts about weights that are read without loading them."""

    dtype: "torch.dtype | None"  # of the first floating tensor
    layer_counts: frozenset[int]  # of every numbered stack of modules: layers, and perhaps a vision tower's
    is_quantised: bool = False  # whether the file holds matrices in blocks of small integers


def resolve(name: str, *, code: bool = False) -> Path:
    """The directory of a model or head: bundled, local, or fetched from (or found in the cache of) the Hugging Face hub;
    or a GGUF file, given by its path or pulled by its name.

    A hub id may end in "@" and a revision. code: fetch a model's own Python code too. Raises ModelError for a directory
    or hub id that does not exist, and where the hub cannot be reached.
    """
    return find_here(name) or _from_hub(name, code=code)


def find_here(name: str) -> Path | None:
    """The same of what needs no network; None for a hub id. Raises ModelError as ``resolve``."""
    if name == "bundled" or name.startswith("bundled/"):
        return _bundled(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if is_gguf(path):
        return path
    if path.exists():
        raise ModelError(
            f"{name} is a file; expected a GGUF file, or the directory that holds config.json and the weights"
        )
    if path.suffix.lower() == ".gguf":
        raise ModelError(f"file {name} does not exist")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(f"directory {name} does not exist")
    if name in CATALOGUE:
        file = pulled(name)
        if file is None:
            size = f"{CATALOGUE[name].size / 1e6:.0f} MB"
            raise ModelError(f"{name} is not here yet ({size}): fetch it with 'foretell pull {name}'")
        return file
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name!r} is neither a directory nor a Hugging Face id (owner/name)")
    return None


def _bundled(name: str) -> Path:
    from foretell import bundled  # imported here: not needed to load any other model

    try:
        path: Path = Path(bundled.path(name.removeprefix("bundled").removeprefix("/") or "target"))
    except KeyError as error:
        raise ModelError(f"{name}: {error.args[0]}") from None
    if not path.exists():
        raise ModelError(
            f"{name}: wheels leave {name} out, and this installation is of one: install foretell from a clone of its "
            "repository, or train one ('foretell train --help')"
        )
    return path


def _from_hub(name: str, *, code: bool) -> Path:
    model_id, _, revision = name.partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    small = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", *(["*.py"] if code else [])]
    try:
        path = Path(snapshot_download(model_id, revision=revision or None, allow_patterns=[*small, "*.safetensors"]))
        if not any((path / file).is_file() for file in _SAFE):  # other safetensors are no weights: an adapter's, a copy
            patterns = [*small, "*.bin", "*.pt"]
            path = Path(snapshot_download(model_id, revision=revision or None, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a directory nor a Hugging Face id (owner/name)") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated on the Hugging Face hub: accept its terms there and run 'hf auth login'"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model_id} has no revision {revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no directory {name} here and no model {name} on the Hugging Face hub{_meant(name)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no directory {name} here, it is not in the Hugging Face cache, and the hub cannot be reached: "
            f"check the network, or give the directory of a downloaded model{_meant(name)}"
        ) from error
    except Exception as error:  # network libraries raise many kinds of errors
        raise ModelError(f"{name} could not be fetched from the Hugging Face hub: {error}") from error
    return path


def _meant(name: str) -> str:
    """A hint where a name is nearly one of the catalogue's; empty else."""
    hint = nearest(name, [*CATALOGUE, *BUNDLED])
    return hint if "did you mean" in hint else ""


def check_files(path: Path, *, name: str) -> Weights:
    """Look at a directory's files, or at a GGUF file, without loading them.

    Raises ModelError for a missing config.json, no weights, a shard that the index names and that is absent, a Git LFS
    pointer in place of a file, and a safetensors or GGUF file that is cut short, damaged or of an unknown kind.
    """
    if path.is_file():
        return _check_gguf(path, name=name)
    if not (path / "config.json").is_file():
        raise ModelError(f"{name}: no config.json in {path}; expected the directory of a Hugging Face model")
    stored = weight_files(path, name=name)
    if not stored.is_safetensors:  # what a pickle holds is not known without loading it
        return Weights(None, _layer_counts(stored.shard_of))
    tensors = stored.tensors(name=name)
    dtypes = (_dtype(entry["dtype"]) for _, entry in tensors.values() if entry["dtype"] in _DTYPES)
    has_blocks = any(key.endswith(("_proj_blocks", "_proj.weight_scale")) for key in tensors)
    return Weights(next(dtypes, None), _layer_counts(tensors), has_blocks)


def _dtype(kind: str) -> "torch.dtype":
    import torch

    return getattr(torch, _DTYPES[kind])  # type: ignore[no-any-return]


def _check_gguf(path: Path, *, name: str) -> Weights:
    from foretell.checkpoints.gguf.weights import GGUFWeights  # imported here: it imports what imports this module

    source = GGUFWeights(open_gguf(path, name=name))
    float_kinds = source.kinds & _DTYPES.keys()
    kind = next(iter(float_kinds)) if float_kinds == source.kinds and len(float_kinds) == 1 else "BF16"
    return Weights(_dtype(kind), _layer_counts(source.names), not source.kinds.isdisjoint(BLOCK_KINDS))


def check_layers(weights: Weights, config: Any, *, name: str) -> None:
    """Raise ModelError where the weights have another number of layers than the configuration.

    Every implementation would silently drop surplus layers, and a truncated model still produces text.
    """
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    # DeepSeek and its kin keep layers of multi-token prediction after the model's own.
    most = num_layers + int(getattr(text, "num_nextn_predict_layers", None) or 0)
    counts = weights.layer_counts
    if counts and not any(num_layers <= count <= most for count in counts):
        raise ModelError(
            f"{name}: the weights do not match config.json: num_hidden_layers is {num_layers}, but they hold "
            f"{' and '.join(map(str, sorted(counts)))} layers; expected both of one checkpoint"
        )


def _layer_counts(keys: Iterable[str]) -> frozenset[int]:
    """How many entries each numbered stack has: one more than the largest number after each prefix."""
    largest: dict[str, int] = {}
    for key in keys:
        if match := re.match(r"(.*?)\.(\d+)\.", key):
            largest[match[1]] = max(largest.get(match[1], 0), int(match[2]))
    return frozenset(number + 1 for number in largest.values())
