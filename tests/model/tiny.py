"""Tiny random models of many architectures, rows of text being decoded, and the plain forward that judges them.

Shapes: B = 3 ragged rows, N = 7 tree nodes. Windows are 4 positions, so that they bite within every prompt.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foretell.core.tree import Plan, layout
from foretell.model.target import CausalModel, Output, Target

VOCAB = 61
WINDOW = 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough for attention to depend on what it sees
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# name -> (configuration class, what differs from COMMON; "only" replaces COMMON altogether)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2Config", {"only": {**GPT2, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, **EXPERTS}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 24, "use_sliding_window": False}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "llama4": (
        "Llama4TextConfig",
        {"head_dim": 8, "attention_chunk_size": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "starcoder2": ("Starcoder2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "bitnet": ("BitNetConfig", {"num_attention_heads": 2}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4}),
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of one of ARCHITECTURES."""
    class_name, differs = ARCHITECTURES[name]
    options = dict(differs["only"]) if "only" in differs else {**COMMON, **differs}
    return getattr(transformers, class_name)(**{**options, **changes})


def tiny_module(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=dtype)
    return module.eval()


def plain_logits(module: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[L, V] as anyone would compute them: no cache, no mask, no positions."""
    call: Any = module
    with torch.no_grad():
        logits: Tensor = call(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


def path_to(parent: list[int], node: int) -> list[int]:
    """The nodes from the root to a node, both included."""
    path = [node]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


BUSHY = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 0, 2, 2, -1, -1], [-1, 0, 1, 2, -1, -1, -1]]
# Three steps over BUSHY: the accepted nodes of each row, of different number, side branches among them.
ACCEPTED = [
    [[0, 2, 5], [0, 2, 4], [0]],
    [[0], [0, 1], [0, 1, 2, 3]],
    [[0, 1, 4], [0, 2, 3], [0, 1]],
]


class Rows:
    """Rows of text behind a target, as the engine would keep them: the smallest loop that uses the seam rightly."""

    def __init__(self, model: CausalModel, module: PreTrainedModel, lengths: tuple[int, ...] = (3, 9, 6)) -> None:
        self.module = module
        self.capacity = 48
        self.target = Target(model, len(lengths), self.capacity)
        self.random = torch.Generator().manual_seed(3)
        self.texts = [self._draw(length) for length in lengths]  # committed tokens
        self.pending = self._draw(len(lengths))

    def _draw(self, count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=self.random).tolist()

    @property
    def length(self) -> Tensor:
        """[B] committed slots."""
        return torch.tensor([len(text) for text in self.texts])

    def prefill(self, chunk: int = 100) -> None:
        """Run the committed texts in chunks, as chains with padding."""
        longest = max(len(text) for text in self.texts)
        for start in range(0, longest, chunk):
            width = min(chunk, longest - start)
            counts = [min(max(len(text) - start, 0), width) for text in self.texts]
            tokens = torch.tensor([(text[start : start + width] + [0] * width)[:width] for text in self.texts])
            parent = torch.tensor([[i - 1 if i < count else -1 for i in range(width)] for count in counts])
            begun = torch.tensor([min(start, len(text)) for text in self.texts])
            self.target.forward(tokens, layout(parent, begun, self.capacity), head=False)

    def tree(self, parents: list[list[int]] = BUSHY) -> tuple[Tensor, Tensor]:
        """Random tokens [B, N] with the pending ones first, and parent [B, N]."""
        parent = torch.tensor(parents)
        tokens = torch.tensor([[root, *self._draw(parent.shape[1] - 1)] for root in self.pending])
        return tokens, parent

    def plan(self, parent: Tensor, *, span: int | None = None) -> Plan:
        """The tree's layout behind the committed texts."""
        return layout(parent, self.length, self.capacity, span=span)

    def expected(self, tokens: Tensor, parent: Tensor) -> list[tuple[int, int, Tensor]]:
        """(row, node, logits [V]) of every node that is not padding, by plain runs of its own path."""
        found = []
        for row, (ids, parents) in enumerate(zip(tokens.tolist(), parent.tolist(), strict=True)):
            for node in range(len(parents)):
                if node == 0 or parents[node] >= 0:
                    path = [ids[i] for i in path_to(parents, node)]
                    found.append((row, node, plain_logits(self.module, self.texts[row] + path)[-1]))
        return found

    def accept(self, tokens: Tensor, paths: list[list[int]]) -> None:
        """Commit the nodes of each row's path (moving their slots) and draw a new pending token."""
        depth = max(len(path) for path in paths)
        base = self.length[:, None]
        src = base + torch.tensor([path + [0] * (depth - len(path)) for path in paths])
        dst = base + torch.tensor([[*range(len(path)), *[0] * (depth - len(path))] for path in paths])
        self.target.commit(src, dst)
        for text, ids, path in zip(self.texts, tokens.tolist(), paths, strict=True):
            text += [ids[node] for node in path]
        self.pending = self._draw(len(self.texts))

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows."""
        self.target.keep(torch.tensor(rows))
        self.texts = [self.texts[row] for row in rows]
        self.pending = [self.pending[row] for row in rows]


def largest_error(output: Output, expected: list[tuple[int, int, Tensor]]) -> float:
    """The largest difference of any logit over all nodes, relative to the spread (standard deviation) of logits."""
    assert output.logits is not None
    spread = torch.stack([logits for _, _, logits in expected]).float().std()
    errors = [(output.logits[row, node].float() - logits.float()).abs().max() for row, node, logits in expected]
    return float(torch.stack(errors).max() / spread)
