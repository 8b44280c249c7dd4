"""Whether a card comes to the right values: the parts of ``gpu.py right``, each of which can run alone.

Tokens are those of plain decoding on the CPU in float32 (of a width on the same card), and nodes have the logits of their
own paths. A comparison that differs or raises is told at once, and the others go on.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from foretell import Engine, Request, SamplingParams
from foretell.core.noise import Stream, stream_keys
from foretell.core.tree import layout
from foretell.engine.engine import Completion
from foretell.model.llama.run.lean import LeanModel
from foretell.model.load import as_model
from foretell.model.target import CausalModel

METHODS: tuple[Any, ...] = (
    "ngram", "suffix", {"method": "draft_model", "num_speculative_tokens": 5},
    {"method": "draft_model", "shape": "sequoia/size=16"}, {"method": "draft_model", "shape": "dyspec/size=15"},
    {"method": "eagle3", "num_speculative_tokens": 5}, {"method": "eagle3", "shape": "eagle2/size=15"},
    "dflash", "medusa", "kangaroo", {"method": "hybrid"},
)  # fmt: skip
RULES = "rejection", "block", "traversal"
"""Rules whose tokens are not those of plain decoding: they are compared with the CPU's."""
CHAIN, TREE = (
    {"method": "draft_model", "model": "draft", **more}
    for more in ({"num_speculative_tokens": 3}, {"shape": "static/branching=2x2"})
)
PROMPTS = ("def add(a, b):\n    return", "class Stack:\n", "x = 1; x = 1; x", "import os\n", "for i in range(")
LENGTHS = 32, 9, 23, 17, 14  # with three rows others join and leave beside each


@dataclass
class Findings:
    """What was compared, and what of it differs or raised."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, about: str, compare: Callable[[], str]) -> None:
        """compare: "" where all is as it should be, else what is not."""
        self.compared += 1
        try:
            found = compare()
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:300]}"
            print(traceback.format_exc(), flush=True)
        if found:
            self.wrong.append(f"{about}: {found}")
            print(f"WRONG {about}: {found}", flush=True)


def lean_of(config: Any, dtype: torch.dtype, device: torch.device, seed: int = 0) -> CausalModel:
    """A model of random weights as ``lean``."""
    return LeanModel.from_hf(module_of(config, dtype, device, seed), name=config.model_type)


def module_of(config: Any, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model of random weights as transformers has it."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def families(
    dtype: torch.dtype, device: torch.device, seed: int = 0, implementations: Sequence[str] = ("lean", "transformers")
) -> Iterator[tuple[str, CausalModel]]:
    """Tiny random models: what their traits differ in is in docs/model-types.md."""
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "eos_token_id": None,
    }  # fmt: skip
    for kind in (LlamaConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig):
        for made in implementations:
            module = module_of(kind(**sizes), dtype, device, seed)
            model = LeanModel.from_hf(module) if made == "lean" else as_model(module)
            model.spec = replace(model.spec, name="draft" if seed else "target")
            yield f"{kind.model_type} {made} {str(dtype).removeprefix('torch.')}", model


def requests(temperature: float, prompts: Sequence[Any] = PROMPTS) -> list[Request]:
    """Of several lengths."""
    return [
        Request(prompt, SamplingParams(temperature=temperature, seed=seed, max_new_tokens=LENGTHS[seed], top_p=0.95))
        for seed, prompt in enumerate(prompts)
    ]


def texts(engine: Engine, given: list[Request], rows: int) -> list[list[int]]:
    done: list[Completion] = engine.generate_batch(given, batch_size=rows)
    return [each.token_ids for each in done]


def differs(found: list[list[int]], expected: list[list[int]]) -> str:
    """Where the first tokens differ, for a near tie differs once and late."""
    if found == expected:
        return ""
    firsts = [
        next((at for at, pair in enumerate(zip(*both, strict=False)) if pair[0] != pair[1]), min(map(len, both)))
        for both in zip(found, expected, strict=True)
        if both[0] != both[1]
    ]
    return f"{len(firsts)} of {len(found)} texts, from tokens {firsts}"


def keys(device: torch.device, findings: Findings) -> None:
    """Noise keys, and nodes of trees against their own paths, in all dtypes."""
    index = torch.arange(64)
    for stream in Stream:
        expected, found = (stream_keys(at[:, None], at, stream, 3) for at in (index, index.to(device)))
        findings.check(
            f"keys of {stream.name}", lambda a=expected, b=found: "" if torch.equal(a, b.cpu()) else "differ"
        )
    for dtype, limit in ((torch.float32, 1e-3), (torch.bfloat16, 0.06), (torch.float16, 0.01)):
        for name, model in families(dtype, device):
            findings.check(f"{name}: nodes of a tree against their path", lambda m=model, e=limit: _nodes(m, device, e))
    print(f"keys and nodes: {findings.compared} compared", flush=True)


def _nodes(model: CausalModel, device: torch.device, limit: float) -> str:
    tokens = torch.randint(512, (1, 6), generator=torch.Generator().manual_seed(1)).to(device)
    parent, nothing = (
        torch.tensor([[-1, 0, 0, 1, 1, 3]], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    path, line = torch.tensor([0, 1, 3, 5], device=device), torch.arange(-1, 3, device=device)[None]
    logits = model.forward(tokens, layout(parent, nothing, 64), model.new_cache(1, 64)).logits
    alone = model.forward(tokens[:, path], layout(line, nothing, 64), model.new_cache(1, 64)).logits
    assert logits is not None
    assert alone is not None
    error = float((logits[0, path].float() - alone[0].float()).norm() / alone.float().norm())
    return "" if error <= limit else f"relative error {error:.2g}"


def _bundled(where: Any, launch: str, implementation: str = "lean", dtype: str = "float32", width: int = 0) -> Engine:
    return Engine.load(
        "bundled", device=str(where), implementation=implementation, dtype=dtype, cuda_graphs=launch, width=width
    )


def methods(device: torch.device, findings: Findings, launch: str, implementation: str = "lean") -> None:
    """Every method on the card against plain decoding on the CPU, and rules against themselves there."""
    here, there = _bundled("cpu", "off"), _bundled(device, launch, implementation)
    for temperature, rows in ((0.0, 1), (1.0, 3)):
        given = requests(temperature)
        plain = texts(here, given, 5)

        def compare(config: Any, reference: Any, given: Any = given, rows: int = rows) -> str:
            expected = texts(here.with_method(config), given, 5) if reference is None else reference
            return differs(texts(there.with_method(config, drafter_errors="raise"), given, rows), expected)

        about = f"{implementation}, graphs {launch}, {rows} rows, temperature {temperature}"
        for config in (None, *METHODS):
            findings.check(f"{about}: {config or 'plain'}", partial(compare, config, plain))
        for rule in RULES if temperature else ():
            config = {"method": "draft_model", "num_speculative_tokens": 4, "verify": rule}
            findings.check(f"{about}: {rule}", partial(compare, config, None))
        print(f"{about}: {findings.compared} compared", flush=True)


def tiny(device: torch.device, findings: Findings) -> None:
    """Tiny models of every family with a random draft, against plain decoding on the card; 16-bit types with a width."""
    prompts = [[5, 6, 7, 8], [9] * 7, [1, 2], [3] * 80, [4, 5]]  # the fourth is longer than a tree may be
    for dtype, width in ((torch.float32, 0), (torch.bfloat16, 8), (torch.float16, 8)):
        drafts = families(dtype, device, 1)
        for (name, target), (_, draft) in zip(families(dtype, device), drafts, strict=True):
            given = requests(1.0, prompts)

            def compare(target: Any = target, draft: Any = draft, given: Any = given, width: int = width) -> str:
                plain = texts(Engine(target, width=width), given, 3)
                for config in (CHAIN, TREE):
                    engine = Engine(target, speculative=config, draft=draft, width=width, drafter_errors="raise")
                    if found := differs(texts(engine, given, 3), plain):
                        return f"{config}: {found}"
                return ""

            findings.check(f"{name}, width {width}", compare)
        print(f"tiny models in {dtype}: {findings.compared} compared", flush=True)
    engine, given = _bundled(device, "off", "lean", "bfloat16", 32), requests(1.0)
    plain = texts(engine, given, 3)
    for config in METHODS:
        made = engine.with_method(config, drafter_errors="raise")
        findings.check(f"bundled in bfloat16, width 32: {config}", lambda e=made: differs(texts(e, given, 3), plain))


PARTS: dict[str, Callable[[torch.device, Findings], None]] = {
    "keys": keys,
    "off": lambda device, findings: methods(device, findings, "off"),
    "auto": lambda device, findings: methods(device, findings, "auto"),
    "tiny": tiny,
    "transformers": lambda device, findings: methods(device, findings, "off", "transformers"),
}
