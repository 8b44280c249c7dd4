"""A draft that has layers of its own and nothing else: its embedding is its target's, and so are its head's rows.

Two thirds of a small model with a large vocabulary are the embedding, which takes more text to learn than a draft sees.
Such a directory holds ``config.json`` (a Llama configuration of the target's width, with the key ``borrows``) and
``model.safetensors``: layers, final norm, and ``draft_tokens`` [n] int32, the tokens that it guesses. Made by
``recipes.distill_layers``. It is no model by itself: it is put together beside the target, by ``load_borrowed``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell.checkpoints.directories import resolve
from foretell.checkpoints.files import read_json
from foretell.checkpoints.weights import TensorWeights
from foretell.core.errors import ConfigError, ModelError
from foretell.heads.config_values import check_ids
from foretell.heads.directories import read_tensors
from foretell.methods.draft_model.vocabulary.narrow import NarrowModel
from foretell.model.llama import shape as llama
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.load import from_tensors, load_config, unsupported
from foretell.model.target import CausalModel
from foretell.model.windows import DraftWindow

BORROWS = "borrows"
"""The key of config.json by which such a directory is known: {"target": its name, "sample": ``sample_of`` it}."""
TOKENS = "draft_tokens"
_SAMPLE = 64
"""Rows of the target's embedding that ``likeness`` reads."""


def load_borrowed(
    path: Path, target: CausalModel, *, name: str, weights: str = "auto", limit: DraftWindow | None = None
) -> NarrowModel:
    """The draft of a directory, in the target's dtype and implementation, beside its target.

    weights: as ``load_model`` has it; limit: see ``CausalModel.limited``. Raises ConfigError for weights that do not go
    with the target, ModelError where the directory is damaged or made for another target.
    """
    config, spec = load_config(path, name=name), target.spec
    _check_weights(config, weights, target)
    about = getattr(config, BORROWS)
    delattr(config, BORROWS)  # what is put together here is whole
    _check_target(config, about, target, name)
    tensors = read_tensors(path, name=name)
    tokens = _tokens(tensors.pop(TOKENS, None), spec.vocab_size, name)
    shape = llama.read_shape(config)
    _check_tensors(tensors, shape, name)
    tensors[llama.EMBEDDING] = _embedding(target)
    whole = _build(config, shape, tensors, target, name, weights)
    return NarrowModel(whole if limit is None else whole.limited(limit), tokens)


def _check_weights(config: Any, weights: str, target: CausalModel) -> None:
    spec = target.spec
    asked = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(weights, spec.dtype)
    if asked != spec.dtype:
        raise ConfigError(f"draft_weights = {weights!r}: the draft's table is its target's, in {spec.dtype}; drop it")
    if weights in ("int8", "int4"):
        slow = spec.implementation == "transformers"
        reason = "the target runs by transformers" if slow else unsupported("native", config, spec.dtype, spec.device)
        if reason is not None:
            raise ConfigError(f"draft_weights = {weights!r} needs the native implementation, and {reason}; drop it")


def _check_target(config: Any, about: dict[str, Any], target: CausalModel, name: str) -> None:
    spec = target.spec
    made_for, sample = (about.get(key) for key in ("target", "sample")) if isinstance(about, dict) else (None, None)
    numbers = sample if isinstance(sample, list) and len(sample) == _SAMPLE else [None]
    if not isinstance(made_for, str) or not all(isinstance(x, int | float) and abs(x) < 1e30 for x in numbers):
        raise ModelError(
            f"{name}: {BORROWS} in config.json must name the target and hold a sample of {_SAMPLE} numbers of its "
            "embedding; fetch the draft again"
        )
    sizes = (config.vocab_size, config.hidden_size)
    if sizes != (spec.vocab_size, spec.hidden_size):
        raise ModelError(
            f"{name} borrows the embedding of {made_for} (vocabulary and width {sizes}), and target {spec.name} has "
            f"{spec.vocab_size, spec.hidden_size}: it guesses for its own target alone"
        )
    found = likeness(target, torch.tensor(sample))
    if found < 0.9:  # rounding to four bits leaves 0.99, another model's is near 0
        raise ModelError(
            f"{name} borrows the embedding of {made_for}, and that of target {spec.name} is another (correlation "
            f"{found:.2f}): it guesses for its own target alone"
        )


def sample_of(embedding: Tensor) -> Tensor:
    """[64] a value of each of 64 rows of an embedding [V, H], by which it is known again, quantised too."""
    rows = torch.arange(_SAMPLE) * (len(embedding) // _SAMPLE)
    return embedding[rows, torch.arange(_SAMPLE) % embedding.shape[1]].float()


@torch.no_grad()
def likeness(target: CausalModel, sample: Tensor) -> float:
    """Correlation (no mean taken off) of the target's embedding with ``sample_of`` the one that a draft was made with."""
    rows = torch.arange(_SAMPLE) * (target.spec.vocab_size // _SAMPLE)
    found = target.embed(rows.to(target.spec.device)[None])[0].float().cpu()
    mine = found[torch.arange(_SAMPLE), torch.arange(_SAMPLE) % found.shape[1]]
    return float(torch.nn.functional.cosine_similarity(mine, sample.float(), dim=0))


def _tokens(found: Tensor | None, vocab_size: int, name: str) -> Tensor:
    if found is None or found.ndim != 1 or not len(found):
        raise ModelError(f"{name}: the draft has no list {TOKENS!r} of the tokens that it guesses")
    check_ids(found, len(found), vocab_size, name=name, of=repr(TOKENS), hint=", ascending")
    tokens = found.long()
    if not bool((tokens.diff() > 0).all()):
        raise ModelError(f"{name}: {TOKENS!r} must be ascending")
    return tokens


def _check_tensors(tensors: Mapping[str, Tensor], shape: llama.LlamaShape, name: str) -> None:
    """Raise ModelError where a tensor is missing, or not what the configuration says: kernels read as many numbers."""
    if shape.num_layers > len(tensors):  # before as many names are made
        raise ModelError(f"{name}: num_hidden_layers is {shape.num_layers}, and the draft holds {len(tensors)} tensors")
    expected = _shapes(shape)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ModelError(f"{name}: the draft lacks {len(missing)} tensors, {missing[0]} among them; fetch it again")
    for key, sizes in expected.items():
        found = tensors[key]
        if tuple(found.shape) != sizes or not found.is_floating_point() or not bool(found.isfinite().all()):
            kind = str(found.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name}: {key} of the draft is {list(found.shape)} of {kind}, and config.json says {list(sizes)} finite "
                "numbers; fetch it again"
            )
    other = sorted(key for key in tensors.keys() - expected.keys() if not key.endswith((".bias", "_norm.weight")))
    if other:
        raise ModelError(f"{name}: the draft holds {other[0]}, which config.json has no place for; fetch it again")


def _shapes(shape: llama.LlamaShape) -> dict[str, tuple[int, ...]]:
    """Of every tensor that such a draft has."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    of_kind = {
        "input_norm": (hidden,), "mlp_norm": (hidden,), "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden),
        "o": (hidden, queries), "gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide),
    }  # fmt: skip
    names = (llama.layer_names(layer, shape.traits) for layer in range(shape.num_layers))
    return {llama.FINAL_NORM: (hidden,)} | {found[kind]: of_kind[kind] for found in names for kind in of_kind}


@torch.no_grad()
def _embedding(target: CausalModel) -> Tensor:
    """[V, H] the target's table itself where it is in memory as such, else a copy of what it looks up."""
    plain = target.matrices.plain.get(llama.EMBEDDING) if isinstance(target, NativeModel) else None
    if plain is not None:
        return plain
    spec = target.spec
    ids = torch.arange(spec.vocab_size, device=spec.device)
    return torch.cat([target.embed(part[None])[0].to(spec.dtype) for part in torch.split(ids, 4096)])


def _build(
    config: Any, shape: llama.LlamaShape, tensors: dict[str, Tensor], target: CausalModel, name: str, weights: str
) -> CausalModel:
    spec = target.spec
    if spec.implementation != "transformers":
        if unsupported("native", config, spec.dtype, spec.device) is None:
            return NativeModel(shape, TensorWeights(tensors), dtype=spec.dtype, name=name, weights=weights)
        if unsupported("lean", config, spec.dtype, spec.device) is None:
            return LeanModel(shape, TensorWeights(tensors), dtype=spec.dtype, device=spec.device, name=name)
    return from_tensors(config, tensors, dtype=spec.dtype, device=spec.device, name=name)


def borrowing(name: str) -> Path | None:
    """The directory of that name, bundled or local, where it holds such a draft; None for all others."""
    path = resolve(name) if name.startswith("bundled/") else Path(name).expanduser()
    file = path / "config.json"
    return path if file.is_file() and BORROWS in read_json(file, name=name) else None


def save_borrowed(
    layers: Mapping[str, Tensor], tokens: Tensor, config: Any, embedding: Tensor, out: Path, *, target: str
) -> None:
    """Write such a directory. layers: by the names of a whole model's checkpoint; config: the Llama configuration of the
    whole draft; embedding [V, H] its target's. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().bfloat16().contiguous() for name, tensor in layers.items()}
    save_file({**kept, TOKENS: tokens.to(torch.int32)}, out / "model.safetensors", metadata={"format": "pt"})
    about = {"target": target, "sample": [round(x, 5) for x in sample_of(embedding).tolist()]}
    keys = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", BORROWS: about}
    (out / "config.json").write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")
