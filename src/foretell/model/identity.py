"""What tells a target from others, for files that outlive a process: its weights, its vocabulary, and its arithmetic."""

import hashlib
import json
from typing import Any

import torch

from foretell.checkpoints.directories import find_here
from foretell.checkpoints.source import open_weights
from foretell.core.errors import ModelError
from foretell.core.platform import processor
from foretell.core.provenance import source_digest
from foretell.kernels.build import BuildError, variant_of
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target

EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"
NUM_PROBED = 64
"""Tokens that are read to see which numbers a model computes."""


@torch.no_grad()
def target_hash(model: CausalModel) -> str:
    """An identifier of a target, independent of its directory, implementation and dtype.

    sha256 of its sizes and of a few embeddings as bfloat16: cheap, and different for any two models that were trained.
    """
    spec = model.spec
    digest = hashlib.sha256(f"{spec.vocab_size} {spec.num_layers} {spec.hidden_size}".encode())
    ids = torch.arange(0, spec.vocab_size, max(1, spec.vocab_size // 64), device=spec.device)
    embedded = model.embed(ids[None])[0].bfloat16()
    digest.update(embedded.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def weights_hash(name: str) -> str | None:
    """An identifier of the model whose weights lie in files here, in any precision and form: without loading it.

    sha256 of the number of layers, the rows of the embedding, and the last norm, which converters and quantisers keep as
    it is. Weights that were trained further have another one, unless that left the norm alone, as LoRA does. None of a
    hub id, and where tensors are not called as Llama's are. Raises ModelError where the files cannot be read.
    """
    path = find_here(name)
    if path is None:
        return None
    source = open_weights(path, name=name)
    if not {EMBEDDING, LAST_NORM} <= set(source.names):
        return None
    num_layers = len({key.split(".")[2] for key in source.names if key.startswith("model.layers.")})
    digest = hashlib.sha256(f"{num_layers} {source.shape(EMBEDDING)[0]}".encode())
    digest.update(source.read(LAST_NORM, torch.float32, torch.device("cpu")).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Of the vocabulary: which token has which id. None where there is no tokenizer."""
    if tokenizer is None:
        return None
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return hashlib.sha256(json.dumps(sorted(known.items())).encode()).hexdigest()[:16]


@torch.inference_mode()
def arithmetic(model: CausalModel) -> dict[str, Any]:
    """All that the bits of keys and values depend on, as JSON values: equal where the KV of another process can stand for
    that of this one. It is no more than that: a model's time, threads and directory are not in it.

    ``computed`` is a digest of the keys, values, states and logits of a pass over ``NUM_PROBED`` tokens, so weights that
    were changed anywhere on their way, a dtype, an adapter and a kernel are in it; what that pass does not meet (an
    expert, a rare token) is in the sizes and times of the files that the model was read from.
    """
    spec = model.spec
    count = min(NUM_PROBED, spec.max_positions)
    ids = torch.arange(1, 1 + count).mul(7919).remainder(spec.vocab_size).tolist()
    target = Target(model, 1, max(64, count))
    logits = feed(target, [ids], [0], head=True)
    assert logits is not None
    states = getattr(target.cache, "states", None)
    found = [*(x[0, :, :count] for x in (*target.cache.keys, *target.cache.values)), logits]
    found += [] if states is None else [x for tensors in states.tensors for x in tensors.values()]
    digest = hashlib.sha256()
    for tensor in found:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    try:
        variant = variant_of("native") if spec.implementation == "native" else ""
    except BuildError:
        variant = ""
    return {
        "computed": digest.hexdigest()[:16],
        "files": _files(spec.name),
        "model": [spec.architecture, spec.implementation, spec.weights, str(spec.dtype), spec.device.type],
        "code": source_digest(),
        "torch": str(torch.__version__),
        "processor": [processor(), variant],
    }


def _files(name: str) -> str | None:
    """A digest of the sizes and times of a model's files; None where they are not known by name."""
    try:
        path = find_here(name)
    except ModelError:  # a model in memory may have any name
        path = None
    if path is None:
        return None
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
