"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): what configurations say of it.

Of each token a layer keeps a vector, of which all heads' keys and values are made, and a rotated key that they share. The
product of a query with such a key is that of the query times a head's matrix with the vector. So attention is that of one
key-value head: its key is the vector and the rotated key, its value the vector. What a head has mixed of vectors becomes
its value behind that. Keys and values are never made.
"""

from dataclasses import dataclass
from typing import Any

TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3")
"""The types with such attention that are covered."""


@dataclass(frozen=True)
class Latent:
    """Sizes of one model's latent attention."""

    rank: int  # numbers of the vector that keys and values are made of
    rope: int  # of a query, and of the key, that are rotated
    nope: int  # of a head's query that are not
    value: int  # of a head's value
    query_rank: int  # of the vector that queries are made of; 0: they are made of the stream
    eps: float = 1e-6  # of the norms of both vectors: that of transformers' norms, whatever ``rms_norm_eps`` says

    @property
    def key(self) -> int:
        """Of what a slot keeps."""
        return self.rank + self.rope

    def sizes(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of attention's matrices, by the keys of ``LlamaShape.linears``."""
        queries = heads * (self.nope + self.rope)
        made = {"q": (self.query_rank or queries, hidden), "k": (self.key, hidden), "o": (hidden, heads * self.value)}
        made |= {"k_b": (heads * self.rank, self.nope), "v_b": (heads * self.value, self.rank)}
        return {**made, "q_b": (queries, self.query_rank)} if self.query_rank else made


def latent_of(config: Any) -> Latent | None:
    """The latent attention of a transformers configuration; None where it has none."""
    if config.model_type not in TYPES:
        return None
    value = config.v_head_dim or config.hidden_size // config.num_attention_heads
    return Latent(config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, value, config.q_lora_rank or 0)


def unsupported(config: Any) -> str | None:
    """Why the latent attention of a configuration of TYPES is not supported; None where it is."""
    if config.model_type == "deepseek_v2" and config.mlp_bias:
        return "experts with biases (mlp_bias)"
    return None
