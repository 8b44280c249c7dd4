"""The structures of ``native/common.h`` as ctypes sees them, field for field."""

import ctypes

from torch import Tensor, bfloat16 as _bfloat16, dtype, float32

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of a layer's matrices, in order."""
FORMATS: dict[dtype, int] = {float32: 0, _bfloat16: 1}
"""Formats of matrices that are plain tensors."""
OUTPUTS = ("logit_scale", "logit_cap")
"""What makes logits of the output head's products."""


class Matrix(ctypes.Structure):
    """A matrix of weights where it lies in memory; whoever makes one keeps the memory alive."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("format", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, tensor: Tensor) -> "Matrix":
        """A contiguous [rows, columns] float32 or bfloat16 tensor on the CPU, shared and not copied."""
        assert tensor.is_contiguous()
        columns = tensor.shape[1]
        return cls(tensor.data_ptr(), None, FORMATS[tensor.dtype], columns, columns * tensor.itemsize)


class Expert(ctypes.Structure):
    """One expert of a mixture; inner: rows of gate (where it has one) and of up."""

    _fields_ = [
        *((name, Matrix) for name in ("gate", "up", "down")),
        ("inner", ctypes.c_int64),
        *((f"{name}_bias", ctypes.c_void_p) for name in ("gate", "up", "down")),
    ]


class Stored(ctypes.Structure):
    """Where files have the gates, the ups or the downs of a layer's experts, all alike."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "rows", "row_bytes", "step", "at")),
        ("grid", ctypes.c_void_p),
    ]


class Store(ctypes.Structure):
    """Experts of a layer that stay in files, and the frames of memory for those that are held."""

    _fields_ = [
        ("parts", Stored * 3),
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("frames", "frame_bytes", "pass")),
        *((name, ctypes.c_void_p) for name in ("memory", "frame", "held", "score", "last", "foreseen")),
    ]


class Disk(ctypes.Structure):
    """What a model's layers with such experts have in common: the greatest read, an error, and figures."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "reading",
            "failed",
            "bytes",
            "bytes_ahead",
            "hits",
            "misses",
            "named",
            "used",
            "waited_ns",
            "next",
        )
    ]


class Experts(ctypes.Structure):
    """A mixture in place of a layer's MLP; a shared expert stands behind the others."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "top", "shared", "over_chosen", "sigmoid")),
        *((name, ctypes.c_int64) for name in ("groups", "groups_chosen", "groups_best")),
        *((name, ctypes.c_double) for name in ("epsilon", "scale")),
        *((name, ctypes.c_void_p) for name in ("bias", "router_bias")),
        ("router", Matrix),
        ("shared_gate", Matrix),
        ("each", ctypes.POINTER(Expert)),
        ("store", ctypes.POINTER(Store)),
    ]


class Mixer(ctypes.Structure):
    """A recurrent mixer of a layer (``native/mixer.h``); addresses are of float32 vectors, or None."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "parts", "width")),
        ("in", Matrix * 4),
        ("sizes", ctypes.c_int64 * 4),
        ("in_bias", ctypes.c_void_p),
        ("in_scale", ctypes.c_void_p),
        ("out", Matrix),
        ("out_bias", ctypes.c_void_p),
        ("out_scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("taps", "channels", "conv_at")),
        *((name, ctypes.c_void_p) for name in ("conv", "conv_bias")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "rows", "columns", "q_at", "k_at", "v_at")),
        *((name, ctypes.c_int64) for name in ("gate_at", "step_at", "beta_at")),
        *((name, ctypes.c_void_p) for name in ("rate", "shift", "skip", "norm")),
        *((name, ctypes.c_int64) for name in ("norm_size", "gate_first")),
        *((name, ctypes.c_double) for name in ("eps", "low", "high")),
        ("held", ctypes.c_int64),
    ]


class MixerState(ctypes.Structure):
    """A mixer's memory of the rows of a cache."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("conv", "state", "terms")),
        ("room", ctypes.c_int64),
        ("meta", ctypes.c_void_p),
    ]


class LowRank(ctypes.Structure):
    """An adapter's part of a product: addresses of A [rank, columns] and of B [groups, rank, 16]."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("rank", "columns")),
        ("scale", ctypes.c_double),
    ]


class Layer(ctypes.Structure):
    """One decoder layer; addresses are of float32 vectors, or None."""

    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        *((f"{name}_bias", ctypes.c_void_p) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("attention_after", "mlp_after")),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_int64),
        ("rope", ctypes.c_int64),
        ("query_rope", ctypes.c_int64),
        ("experts", ctypes.POINTER(Experts)),
        ("mixer", ctypes.POINTER(Mixer)),
        ("gates", Matrix),
        ("gates_bias", ctypes.c_void_p),
        ("loras", ctypes.POINTER(LowRank)),
        ("spread", ctypes.c_void_p),
        ("unspread", ctypes.c_void_p),
        ("sink_logits", ctypes.c_void_p),
        ("mixed_norm", ctypes.c_void_p),
        ("inner_norm", ctypes.c_void_p),
        *((name, Matrix) for name in ("q_b", "k_b", "v_b")),
    ]


class Model(ctypes.Structure):
    """Sizes, outer matrices and layers; ``bf16`` is the type of activations, keys and values."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("bf16", "num_layers", "vocab", "hidden", "intermediate")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        ("eps", ctypes.c_double),
        ("embedding", Matrix),
        ("head", Matrix),
        ("final_norm", ctypes.c_void_p),
        ("layers", ctypes.POINTER(Layer)),
        *((name, ctypes.c_int64) for name in ("gelu", "flat")),
        *((name, ctypes.c_double) for name in ("embedding_scale", "score_scale", "score_cap", "residual_scale")),
        *((name, ctypes.c_double) for name in OUTPUTS),
        *((name, ctypes.c_int64) for name in ("experts", "chosen", "expert_inner")),
        *((name, ctypes.c_int64) for name in ("gated", "projected", "conved", "scanned", "state_rows")),
        *((name, ctypes.c_double) for name in ("attention_scale", "gate_scale", "mlp_scale")),
        ("low_rank", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("swiglu_alpha", "swiglu_limit")),
        ("disk", ctypes.POINTER(Disk)),
        *((name, ctypes.c_int64) for name in ("rank", "rope", "nope", "value", "query_rank")),
        ("latent_eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("centred", "parallel", "norms_last")),
    ]


class Cache(ctypes.Structure):
    """Addresses of keys and values by layer, and of the tables of rotations; coded: keys and values are int8."""

    _fields_ = [
        ("keys", ctypes.POINTER(ctypes.c_void_p)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("rows", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("coded", ctypes.c_int64),
    ]
