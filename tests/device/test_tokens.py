"""On an accelerator every method, shape, verifier and option writes the tokens that it writes on the CPU.

The bundled pair in float32. The CPU draws by C kernels and reads values where it may; the device does neither.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from foretell import Engine, LearnOptions, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.core.builtin import METHODS, SHAPES, VERIFIERS
from foretell.model.hf.adapter import TransformersModel
from foretell.model.load import load_tokenizer
from tests.device.counting import PROMPTS, both, engine_on, requests, run
from tests.device.pretend import NAME, device
from tests.engine.harness import ToyTokenizer, restless
from tests.model.recurrent import family_module
from tests.model.tiny import VOCAB, tiny_module
from tests.service.test_service import Mailbox

SHORT = SamplingParams(max_new_tokens=10, ignore_eos=True)
ROWS = [SHORT, replace(SHORT, temperature=0.0), replace(SHORT, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=6)]
"""One that samples, one at temperature 0, and one with filters that ends before the others."""

HEADLESS = {"mtp", "acceptance", "judge"}  # no head of the bundled target, or no drafter
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4}
FAST: dict[str, Any] = {
    "none": "none",
    "draft_model": DRAFT,
    "eagle3": "eagle3",
    "medusa": "medusa",
    "kangaroo": "kangaroo",
    "hybrid": "hybrid",
    "specdec": {"method": "draft_model", "shape": "specdec"},
    "dyspec": {"method": "draft_model", "shape": "dyspec/size=8", "verify": "rejection"},
    "static, transport": {"method": "draft_model", "shape": "static/branching=3x1", "verify": "transport"},
    "static, traversal": {"method": "draft_model", "shape": "static/branching=2x1x1", "verify": "traversal"},
    "rejection": {**DRAFT, "verify": "rejection"},
    "top_n": {**DRAFT, "verify": "top_n"},
}
SLOW: dict[str, Any] = {
    **{name: name for name, parts in METHODS.items() if parts.config and name not in {*HEADLESS, *FAST}},
    **{shape: {"method": "draft_model", "shape": shape} for shape in SHAPES if shape not in FAST},
    **{verify: {**DRAFT, "verify": verify} for verify in VERIFIERS if verify not in FAST},
    **{
        f"static, {verify}": {"method": "draft_model", "shape": "static/branching=3x1x1", "verify": verify}
        for verify in ("greedy_block", "k_seq", "importance", "rejection", "judge")
    },
    **{f"{name}, eagle2": {"method": name, "shape": "eagle2/size=8"} for name in ("eagle1", "eagle3", "medusa")},
}


def assert_same(config: Any, given: list[Request], **options: Any) -> None:
    """The tokens; and the same guesses of them were kept, step by step."""
    expected, found = both(config, given, **options)
    assert found.tokens == expected.tokens
    if config != "hybrid":  # whose trees are as large as pays on the device
        assert [step.shape[1:] for step in found.steps] == [step.shape[1:] for step in expected.steps]
    assert len({tuple(ids) for ids in found.tokens}) == len(found.tokens)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_tokens_are_the_cpus(name: str) -> None:
    assert_same({**FAST, **SLOW}[name], requests(ROWS))


@pytest.mark.parametrize("name", ["dflash", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_masks_are_as_wide_as_the_keys(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """CUDA refuses a mask with one value for all keys (seen on an H200, where rows joined others)."""
    attend, widths = functional.scaled_dot_product_attention, []

    def checked(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        if attn_mask is not None:
            widths.append((attn_mask.shape[-1], key.shape[-2]))
        return attend(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", checked)
    run(engine_on("cpu", name), requests([*ROWS, *ROWS]), batch_size=2)
    assert len(widths) > 10
    assert all(width == keys for width, keys in widths)


OPTIONS: Mapping[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "filters": {"top_k": 30, "top_p": 0.8, "min_p": 0.05},
    "bias": {"logit_bias": {40: 3.0}, "banned_token_ids": (12, 13), "min_new_tokens": 8, "ignore_eos": False},
    "processor": {"logits_processor": restless},
}


@pytest.mark.parametrize("shape", ["chain", pytest.param("static/branching=2x1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("verify", ["coupled", pytest.param("rejection", marks=pytest.mark.slow)])
def test_options_of_sampling(shape: str, verify: str) -> None:
    """All together, a row each."""
    assert_same(
        {"method": "draft_model", "shape": shape, "verify": verify},
        requests([replace(SHORT, max_new_tokens=8, **options) for options in OPTIONS.values()]),
    )


def test_groups_of_several_methods_and_verifiers() -> None:
    """Rows of one batch: no guesses, a draft model under rejection, a head, guesses from the text."""
    configs: list[Any] = ["none", {**DRAFT, "verify": "rejection"}, "eagle3", "ngram"]
    given = requests([SHORT] * 4)
    found = []
    for where in ("cpu", NAME):
        asked = [replace(request, speculative=config) for request, config in zip(given, configs, strict=True)]
        found.append([done.token_ids for done in engine_on(where, "none").generate_batch(asked)])
    assert found[0] == found[1]


def test_prefixes_are_taken_up() -> None:
    """The second request's prompt is that of the first, and more."""
    text = PROMPTS[1] + "\n    def push(self, item):\n        self.items.append(item)\n"
    given = requests([SHORT] * 2, [text, text + "\n    def pop"])
    found = []
    for where in ("cpu", NAME):
        engine = engine_on(where, "eagle3", prefix_memory_gib=0.1)
        done = [engine.generate_batch([request])[0] for request in given]
        assert done[1].num_cached_tokens > 5
        found.append([each.token_ids for each in done])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["mixture", pytest.param("recurrent", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed
def test_the_transformers_module(name: str) -> None:
    """Mixtures of experts and recurrent layers run as transformers' module there."""
    found = []
    for where in ("cpu", str(device())):
        module = tiny_module("qwen3_moe") if name == "mixture" else family_module("qwen3_next")
        model = TransformersModel(module.to(where), name=name)
        tokenizer = ToyTokenizer([f"w{i} ".encode() for i in range(VOCAB)], special=(2,))
        engine = Engine(model, tokenizer, speculative={"method": "suffix"}, drafter_errors="raise")
        asked = [
            Request([3, 4, 5] * 4, replace(SHORT, seed=1)),
            Request([7, 8], replace(SHORT, seed=2, temperature=0.0)),
        ]
        found.append([done.token_ids for done in engine.generate_batch(asked)])
    assert found[0] == found[1]


def test_a_service_on_its_own_thread() -> None:
    """Requests come one after the other."""
    found = []
    for where in ("cpu", NAME):
        engine = engine_on(where, DRAFT)
        made, box = Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=120, speculation="on")), Mailbox()
        made.start()
        ids = [load_tokenizer("bundled/target").encode(prompt) for prompt in PROMPTS]
        for number, prompt in enumerate(ids):
            made.submit(Submission(str(number), prompt, replace(SHORT, seed=number)), box.hear)
        done = [box.last(str(number), 60.0).completion for number in range(len(ids))]
        made.close()
        found.append([None if each is None else each.token_ids for each in done])
    assert None not in found[0]
    assert found[0] == found[1]


@pytest.mark.slow
def test_learning_while_serving() -> None:
    """A draft model learns on the device, on the service's own thread: no token changes."""
    found = []
    for where in ("cpu", NAME):
        options = LearnOptions(learn_share=1.0, learn_lr=3e-3, learn_every=1, where="inline")
        made = Service(
            engine_on(where, DRAFT), ServiceOptions(max_num_seqs=2, max_model_len=120, speculation="on"), learn=options
        )
        made.start()
        box = Mailbox()
        for number in range(4):
            made.submit(
                Submission(str(number), [5 + number, 6, 7], replace(SHORT, max_new_tokens=24, seed=number)), box.hear
            )
            box.last(str(number), 60.0)
        deadline = time.monotonic() + 120.0
        while not made.learner()["figures"]["num_updates"] and time.monotonic() < deadline:
            time.sleep(0.1)
        figures = made.learner()["figures"]
        assert figures["num_updates"] > 0, figures
        assert figures["num_failures"] == 0, figures
        made.submit(Submission("last", [5, 6, 7], replace(SHORT, seed=1)), box.hear)
        done = [box.last(name, 60.0).completion for name in (*map(str, range(4)), "last")]
        made.close()
        found.append([None if each is None else each.token_ids for each in done])
    assert None not in found[0]
    assert found[0] == found[1]
