"""P-EAGLE: every guess is what a plain forward over the text's pairs and the masked ones says; the text is the target's."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell import Completion, Engine, Request, SamplingParams, StepEvent
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import chain_parent, layout
from foretell.heads import formats
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.methods.eagle import parallel
from foretell.methods.eagle.parallel import PEagle, PEagleHead, PEagleHeadConfig
from foretell.model.llama.run.lean import LeanModel
from foretell.model.target import PassOptions
from tests.engine.harness import ToyTokenizer, mixed_params, outcome
from tests.methods.mtp import reference
from tests.model.tiny import VOCAB, tiny_module

TARGET = LeanModel.from_hf(tiny_module("qwen3"))
SIZE = TARGET.spec.hidden_size
TOKENIZER = ToyTokenizer([b"w"] * VOCAB, special=(2,))
GUESSES = 4


def random_head() -> PEagleHead:
    """Of two layers, with a draft vocabulary; no number is neutral."""
    config = PEagleHeadConfig(
        SIZE, VOCAB, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, draft_vocab_size=40,
        layer_ids=(0, 1, 3), rope_theta=100.0, num_layers=2, mask_token_id=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    head = PEagleHead(config)
    counts = torch.randint(0, 1000, (VOCAB,), generator=generator)
    maps = draft_vocabulary(counts, config.draft_vocab_size)
    with torch.no_grad():
        head.d2t.copy_(maps[0])
        head.t2d.copy_(maps[1])
        for parameter in head.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))
        head.lm_head.weight *= 8.0
    return head.eval().requires_grad_(requires_grad=False)


def engine_of(head: PEagleHead, shape: str = "chain", verify: str = "coupled") -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": GUESSES, "shape": shape, "verify": verify}
    return Engine(TARGET, TOKENIZER, speculative=config, method=PEagle(head, TARGET))


def requests(lengths: tuple[int, ...] = (2, 9, 3, 30, 5, 17)) -> list[Request]:
    rng = torch.Generator().manual_seed(1)
    return [
        Request(torch.randint(3, VOCAB, (length,), generator=rng).tolist(), params)
        for length, params in zip(lengths, mixed_params(14), strict=False)
    ]


def by_hand(head: PEagleHead, text: list[int], count: int) -> list[int]:
    """The best tokens of ``count`` guesses behind a text, whose last token is pending: one forward, no cache."""
    tensors, config = head.state_dict(), head.config
    known = len(text) - 1
    plan = layout(chain_parent(known, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 96)
    taps = TARGET.forward(
        torch.tensor([text[:-1]]), plan, TARGET.new_cache(1, 96), PassOptions(taps=config.layer_ids)
    ).taps
    assert taps is not None
    outputs = torch.cat([taps[0], head.mask_hidden[0].expand(count - 1, -1)])
    tokens = torch.tensor([*text[1:], *[config.mask_token_id] * (count - 1)])
    hidden, embeds = outputs @ tensors["fc.weight"].T, TARGET.embed(tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        return reference.rms(x, tensors[f"{name}.weight"], eps=config.rms_norm_eps)

    for prefix in ("midlayer.", "layers.1."):
        block = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if prefix == "midlayer.":
            x = torch.cat([norm(embeds, prefix + "input_layernorm"), norm(hidden, prefix + "hidden_norm")], -1)
        else:
            x = norm(hidden, prefix + "input_layernorm")
        q, k, v = (reference.heads(reference.projected(block, name, x), 8) for name in "qkv")
        mixed = reference.attended(reference.rotated(q, 100.0, 8), reference.rotated(k, 100.0, 8), v)
        hidden = hidden + mixed @ block["self_attn.o_proj.weight"].T
        hidden = hidden + reference.mlp(block, "mlp.", norm(hidden, prefix + "post_attention_layernorm"))
    logits = norm(hidden[known - 1 :], "norm") @ tensors["lm_head.weight"].T
    return head.target_ids[logits.argmax(-1)].tolist()


def test_every_guess_is_that_of_a_plain_forward() -> None:
    head, seen = random_head(), []
    engine = engine_of(head, verify="exact")
    engine.observers.append(
        lambda event: seen.append((int(event.commit.length[0]), event.commit.tree.tokens[0, 1:].tolist()))
    )
    prompt = [5, 9, 33, 7, 41]
    completion = engine.generate(prompt, max_new_tokens=20, temperature=0.0, ignore_eos=True)
    text = prompt + completion.token_ids
    guesses = [(length, found) for length, found in seen if found]
    assert len(guesses) > 8
    assert len({tuple(found) for _, found in guesses}) > 4
    assert any(len(set(found)) > 1 for _, found in guesses), "masked pairs differ by their positions"
    for length, found in guesses:
        assert by_hand(head, text[: length + 1], len(found)) == found


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2", "eagle2/size=6/width=2"])
def test_the_text_is_the_targets_own(shape: str) -> None:
    asked, plain = requests(), Engine(TARGET, TOKENIZER)
    expected = [outcome(plain.generate(one.prompt, one.params)) for one in asked]
    found = engine_of(random_head(), shape).generate_batch(asked, batch_size=4)
    assert [outcome(one) for one in found] == expected
    assert sum(one.num_draft_tokens for one in found) > 50


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_batch_guesses_as_each_row_alone(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches, and where texts are longer than a chunk, so that their pairs are read before the masked ones."""
    head = random_head()
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    asked = [Request(one.prompt, params) for one in requests()]
    alone, expected = [], []
    for one in asked:
        completions, guesses = watched(engine_of(head), [one])
        alone += completions
        expected.append(guesses[0])
    monkeypatch.setattr(parallel, "PREFILL_CHUNK", chunk)
    found, together = watched(engine_of(head), asked)
    assert [one.steps for one in found] == [one.steps for one in alone]
    assert [together[index] for index in range(len(asked))] == expected
    assert rate(alone) > 0


def watched(engine: Engine, asked: list[Request]) -> tuple[list[Completion], dict[int, dict[int, list[int]]]]:
    """Completions of batches of four, and of each request what was guessed behind how many committed tokens."""
    seen: dict[int, dict[int, list[int]]] = defaultdict(dict)

    def observe(event: StepEvent) -> None:
        tree = event.commit.tree
        for place, row in enumerate(event.rows):
            guessed = tree.tokens[place, 1:][tree.valid[place, 1:]].tolist()
            seen[row.index][int(event.commit.length[place])] = guessed

    engine.observers.append(observe)
    return engine.generate_batch(asked, batch_size=4), seen


def rate(found: list[Completion]) -> int:
    return sum(one.num_accepted_tokens for one in found)


def test_from_its_directory(tmp_path: Path) -> None:
    formats.save(random_head(), tmp_path, target=TARGET.spec)
    engine = Engine(TARGET, TOKENIZER, speculative={"method": "peagle", "model": str(tmp_path)})
    expected = engine_of(random_head()).generate([5, 9, 33], max_new_tokens=12, temperature=0.0, ignore_eos=True)
    found = engine.generate([5, 9, 33], max_new_tokens=12, temperature=0.0, ignore_eos=True)
    assert found.token_ids == expected.token_ids
    assert engine.resolved()["head"] == "torch: one pass makes all guesses"
    with pytest.raises(ModelError, match=r"holds a peagle head, and an eagle3 head is needed.*choose method 'peagle'"):
        Engine(TARGET, TOKENIZER, speculative={"method": "eagle3", "model": str(tmp_path)})
    with pytest.raises(ConfigError, match="'peagle' needs a trained head"):
        Engine(TARGET, TOKENIZER, speculative={"method": "peagle"})
    with pytest.raises(ModelError, match=r"mask_token_id = 99 must be a token of the vocabulary of 40"):
        PEagleHeadConfig(8, 40, 8, 2, 2, 4, draft_vocab_size=8, layer_ids=(0, 1, 2), mask_token_id=99)
