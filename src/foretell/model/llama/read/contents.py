"""What tensors a model of a shape has, and whether a source of weights has them: checked before any is read.

The decoders take sizes from the shape and memory from the source, so one of another size would be read past its end; and
a tensor that is absent, or that nothing reads, makes another model that still writes text.
"""

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from foretell.checkpoints.weights import ShapeError, WeightSource
from foretell.core.errors import ModelError
from foretell.model.llama import mixture as mixtures
from foretell.model.llama.shape import EMBEDDING, FINAL_NORM, HEAD, LlamaShape, bias_name, layer_names

logger = logging.getLogger(__name__)
_ATTENTION, _MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
_HARMLESS = re.compile(r"rotary_emb\.|\.(masked_bias|attention\.bias)$")
"""Buffers that old checkpoints hold, and that follow from the configuration."""
_DRAFTS = "eh_proj.weight"  # a layer that has one is a module for further tokens (DeepSeek-V3, GLM-4.5)
_NAMED = 4  # tensors of a message
_ROWS = 1 << 12  # of two heads that are compared at a time


@dataclass(frozen=True)
class Contents:
    """What a checkpoint leaves open until its tensors are known."""

    biases: frozenset[str]  # keys of ``shape.layer_names``: linears that have one, in every layer
    head: str  # the tensor that the output head is: its own, or the embedding


def check_contents(source: WeightSource, shape: LlamaShape, *, name: str) -> Contents:
    """Compare the names and shapes of a source (each expert and each linear by itself) with those of a model.

    Raises ModelError for tensors that are missing, ShapeError for those of another shape; surplus ones are named in a
    warning.
    """
    names = set(source.names)
    biases = _biases_of_first_layer(names, shape) if shape.biases is None else shape.biases
    wanted = dict(chain(_outer(shape), *(_layer(index, shape, biases) for index in range(shape.num_layers))))
    missing: dict[str, list[tuple[int, ...]]] = {}  # by the checkpoint's names, of which several may be parts of one
    for each in (each for each in wanted if each not in names):
        missing.setdefault(source.called(each), []).append(wanted[each])
    other = [each for each, size in wanted.items() if each in names and source.shape(each) != size]
    if missing or other:
        said = [
            f"{each} is missing{f', expected {sizes[0]}' if len(sizes) == 1 else ''}" for each, sizes in missing.items()
        ]
        said += [f"{source.called(each)} has shape {source.shape(each)}, expected {wanted[each]}" for each in other]
        more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
        kind = ShapeError if other else ModelError
        raise kind(
            f"{name}: the weights do not match the configuration: {len(said)} tensors are missing or of another shape "
            f"({'; '.join(said[:_NAMED])}{more}); expected both of one checkpoint"
        )
    head = _head(source, shape, name) if HEAD in names else EMBEDDING
    drafts = tuple(each.removesuffix(_DRAFTS) for each in names if each.endswith(_DRAFTS))
    left = (each for each in names - wanted.keys() - {HEAD} if not _HARMLESS.search(each))
    surplus = sorted(each for each in left if not each.startswith(drafts))
    if surplus:
        listed = ", ".join(source.called(each) for each in surplus[:_NAMED])
        logger.warning(
            "%s: %d tensors of the checkpoint are not read, for a %s of this configuration has none such: %s%s",
            name, len(surplus), shape.architecture, listed, ", ..." if len(surplus) > _NAMED else "",
        )  # fmt: skip
    return Contents(biases, head)


def _biases_of_first_layer(names: Collection[str], shape: LlamaShape) -> frozenset[str]:
    linears = layer_names(0, shape.traits)
    return frozenset(key for key in (*_ATTENTION, *_MLP) if bias_name(linears[key]) in names)


def _outer(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield EMBEDDING, (shape.vocab_size, shape.hidden_size)
    yield FINAL_NORM, (shape.hidden_size,)
    if shape.traits.norm_biases:
        yield bias_name(FINAL_NORM), (shape.hidden_size,)
    if not shape.tied:
        yield HEAD, (shape.vocab_size, shape.hidden_size)


def linear_sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's linears, by the keys of ``LlamaShape.linears``."""
    hidden, inner, latent = shape.hidden_size, shape.intermediate_size, shape.traits.latent
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries),
        "gates": (queries, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
        **(latent.sizes(hidden, shape.num_heads) if latent is not None else {}),
    }  # fmt: skip


def _layer(index: int, shape: LlamaShape, biases: Collection[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all tensors of a layer."""
    names, traits, mixture = layer_names(index, shape.traits), shape.traits, shape.mixture
    sizes, hidden = linear_sizes(shape), shape.hidden_size
    queries, keys = sizes["q"][0], sizes["k"][0]
    for key in shape.linears(index):
        yield names[key], sizes[key]
        if key in biases:
            yield bias_name(names[key]), sizes[key][:1]
    if traits.has_sinks:
        yield names["sinks"], (shape.num_heads,)
    of_all = traits.qk_norm == "all"
    norm_sizes = {"q_norm": queries if of_all else shape.head_dim, "k_norm": keys if of_all else shape.head_dim}
    norm_sizes |= {"mixed_norm": queries, "inner_norm": shape.intermediate_size}
    if (latent := traits.latent) is not None:
        norm_sizes = {"q_norm": latent.query_rank, "k_norm": latent.rank}
    for key in shape.norms(index):
        yield names[key], (norm_sizes.get(key, hidden),)
        if traits.norm_biases and key not in norm_sizes:
            yield bias_name(names[key]), (hidden,)
    mixer = shape.mixer(index)
    if mixer is not None:
        yield from mixer.tensors(index)
    if shape.is_sparse(index) and mixture is not None:
        for name, rows in zip(mixtures.router_names(index, mixture), (mixture.num_experts, 1), strict=False):
            yield name, (rows, hidden)
        if mixture.has_bias:
            yield mixtures.bias_name(index), (mixture.num_experts,)
        if mixture.has_biases:
            yield from mixtures.bias_sizes(index, hidden, mixture).items()
        for expert in mixture.experts:
            rows = mixture.shared_inner if expert is None else mixture.inner
            for key, name in mixtures.expert_names(index, expert, mixture).items():
                yield name, (hidden, rows) if key == "down" else (rows, hidden)


def _head(source: WeightSource, shape: LlamaShape, name: str) -> str:
    """The output head of a source that has one. Of a checkpoint that is said to be tied, its own where it differs from the
    embedding, as transformers has it."""
    if not shape.tied:
        return HEAD
    embedding, head = source.shared(EMBEDDING), source.shared(HEAD)
    if embedding is not None and head is not None and embedding.data_ptr() == head.data_ptr():
        return EMBEDDING
    if source.shape(HEAD) == source.shape(EMBEDDING):
        one, other = source.reader(EMBEDDING), source.reader(HEAD)
        starts = range(0, shape.vocab_size, _ROWS)
        stops = (min(start + _ROWS, shape.vocab_size) for start in starts)
        if all(torch.equal(one(start, stop), other(start, stop)) for start, stop in zip(starts, stops, strict=True)):
            return EMBEDDING
        logger.warning(
            "%s: the configuration says that the output head is the embedding (tie_word_embeddings), but the checkpoint "
            "holds another one (%s), which is read; expected tie_word_embeddings false", name, source.called(HEAD),
        )  # fmt: skip
        return HEAD
    raise ShapeError(
        f"{name}: {source.called(HEAD)} has shape {source.shape(HEAD)}, expected {source.shape(EMBEDDING)}, that of the "
        "embedding, to which the configuration ties it"
    )
