"""MTP modules read from checkpoints, against the reference, node by node; then through the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell import Engine
from foretell.core.errors import ModelError
from foretell.core.tree import chain_parent, layout
from foretell.methods.mtp import checkpoint
from foretell.methods.mtp.head import CheckpointMTPHead
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.one_layer import text_config
from foretell.model.llama.run.lean import LeanModel
from foretell.model.target import PassOptions
from tests.engine.harness import ToyTokenizer, mixed_params, outcome
from tests.methods.mtp import reference
from tests.methods.mtp.checkpoints import LAYERS, PREFIX, config_of, save
from tests.model.tiny import VOCAB, path_to, tiny_module

FAMILIES = list(reference.FAMILIES)
TARGET = LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=2))
SIZE = TARGET.spec.hidden_size
Made = tuple[CheckpointMTPHead, Any, Any, Any]


def made(path: Path, family: str) -> Made:
    config = config_of(family)
    own, block = save(path, family, config)
    head = CheckpointMTPHead(checkpoint.read(path, name="dir"), text_config(path, name="dir"), TARGET.spec, name="dir")
    return head, config, own, block


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Made]:
    return request.param, made(tmp_path, request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_incremental_equals_the_reference(family: tuple[str, Made]) -> None:
    """Three ragged rows, read in chunks of uneven size: every pair is what it is in one pass over the whole text."""
    name, (head, config, own, block) = family
    lengths, width = [11, 4, 8], 11
    embeds, features = random(3, width, SIZE), random(3, width, SIZE, seed=1)
    whole = [
        reference.module(name, config, own, block, embeds[row, :length], features[row, :length])
        for row, length in enumerate(lengths)
    ]
    cache, done = head.new_cache(3, 40), 0
    for size in (5, 1, 2, 3):
        here = slice(done, done + size)
        plan = layout(chain_parent(size, torch.device("cpu")).expand(3, -1), torch.full((3,), done), 40, span=24)
        feed, read = head.advance(embeds[:, here], features[:, here], plan, cache)
        for row, length in enumerate(lengths):
            for at in range(done, min(done + size, length)):
                for found, wanted in zip((feed, read), whole[row], strict=True):
                    assert torch.allclose(found[row, at - done], wanted[at], atol=1e-5), (row, at)
        done += size


@torch.no_grad()
def test_a_tree_feeds_on_its_own_outputs(family: tuple[str, Made]) -> None:
    """A bushy tree in two rows, level by level, each node on its parent's output; then the text goes on over its slots."""
    name, (head, config, own, block) = family
    parent = [-1, 0, 0, 1, 1, 2]
    lengths = [6, 3]
    embeds, features = random(2, 6, SIZE), random(2, 6, SIZE, seed=1)
    nodes = random(2, len(parent), SIZE, seed=2)
    cache = head.new_cache(2, 40)
    roots: list[Tensor] = []
    for row, length in enumerate(lengths):
        plan = layout(chain_parent(length, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 40)
        feed, _ = head.advance(
            embeds[row : row + 1, :length], features[row : row + 1, :length], plan, cache.rows(row, row + 1)
        )
        roots.append(feed[0, -1])
    outputs = torch.zeros(2, len(parent), SIZE)
    outputs[:, 0] = torch.stack(roots)
    plan = layout(torch.tensor([parent, parent]), torch.tensor(lengths) - 1, 40)
    for level in ([1, 2], [3, 4, 5]):
        start, stop = level[0], level[-1] + 1
        fed = torch.stack([outputs[:, parent[node]] for node in level], 1)
        feed, read = head.advance(nodes[:, start:stop], fed, plan.nodes(start, stop), cache)
        outputs[:, start:stop] = feed
        for row, length in enumerate(lengths):
            for at, node in enumerate(level):
                path = path_to(parent, node)[1:]
                along = torch.cat([embeds[row, :length], nodes[row, path]])
                felt = torch.cat([features[row, :length], outputs[row, [parent[n] for n in path]]])
                wanted = reference.module(name, config, own, block, along, felt)[1][-1]
                assert torch.allclose(read[row, at], wanted, atol=1e-5), (row, node)


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2"])
@pytest.mark.parametrize("family_name", ["deepseek_v3", "qwen3_5"])
def test_the_text_is_the_targets_own(family_name: str, shape: str, tmp_path: Path) -> None:
    """Alone and in ragged batches, at every temperature and with every processor."""
    made(tmp_path, family_name)
    config = {"method": "mtp", "model": str(tmp_path), "shape": shape}
    tokenizer = ToyTokenizer([b"w"] * VOCAB, special=(2,))
    from foretell import Request

    rng = torch.Generator().manual_seed(1)
    lengths = (2, 9, 3, 30, 5, 17, 4, 12)
    asked = [
        Request(torch.randint(3, VOCAB, (length,), generator=rng).tolist(), params)
        for length, params in zip(lengths, mixed_params(14), strict=True)
    ]
    plain = Engine(TARGET, tokenizer)
    expected = [outcome(plain.generate(request.prompt, request.params)) for request in asked]
    engine = Engine(TARGET, tokenizer, speculative=config)
    found = engine.generate_batch(asked, batch_size=4)
    assert [outcome(completion) for completion in found] == expected
    assert sum(completion.num_draft_tokens for completion in found) > 50


def test_a_guess_is_the_reference_argmax(tmp_path: Path) -> None:
    """Through the engine: after the prompt, and after verification gave true hidden states, the first guess is what the
    reference module says of the whole text so far."""
    _, config, own, block = made(tmp_path, "glm4_moe")
    engine = Engine(TARGET, None, speculative={"method": "mtp", "model": str(tmp_path), "verify": "exact"})
    seen: list[tuple[int, int]] = []
    engine.observers.append(
        lambda event: (
            seen.append((int(event.commit.length[0]), int(event.commit.tree.tokens[0, 1])))
            if event.commit.tree.num_nodes > 1
            else None
        )
    )
    prompt = [5, 9, 33, 7, 41]
    completion = engine.generate(prompt, max_new_tokens=16, temperature=0.0, ignore_eos=True)
    text = prompt + completion.token_ids
    with torch.no_grad():
        plan = layout(chain_parent(len(text), torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 64)
        options = PassOptions(taps=(TARGET.spec.num_layers - 1,))
        out = TARGET.forward(torch.tensor([text]), plan, TARGET.new_cache(1, 64), options)
        assert out.taps is not None
        features = TARGET.normed(out.taps)[0]
        for length, guess in seen:
            embeds = TARGET.embed(torch.tensor(text[1 : length + 1]))
            read = reference.module("glm4_moe", config, own, block, embeds, features[:length])[1]
            assert int(TARGET.head(read[None, -1:])[0, 0].argmax()) == guess
    assert len(seen) > 8


def test_from_the_targets_own_directory(tmp_path: Path) -> None:
    """A whole checkpoint: nothing is named, and a module that knows nothing costs no text."""
    config = config_of("glm4_moe")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(config)
    module.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    save(tmp_path, "glm4_moe", config, more=whole)
    engine = Engine(
        TransformersModel.load(tmp_path, dtype=torch.float32, device=torch.device("cpu")), None, speculative="mtp"
    )
    told = "torch: the target runs as 'transformers', and native heads need a native one; the checkpoint's own "
    assert engine.resolved()["head"] == told + "Glm4MoeDecoderLayer"
    plain = engine.with_method("none")
    for temperature in (0.0, 1.0):
        asked = {"max_new_tokens": 12, "temperature": temperature, "seed": 2, "ignore_eos": True}
        found = engine.generate([5, 9, 33], **asked)
        assert found.token_ids == plain.generate([5, 9, 33], **asked).token_ids
        assert found.num_draft_tokens > 10


# -- what is refused -------------------------------------------------------------------------------------------------


def spoiled(path: Path, family_name: str, **changes: Any) -> None:
    config = config_of(family_name)
    save(path, family_name, config)
    tensors = load_file(path / "model.safetensors")
    for key, change in changes.items():
        name = PREFIX[family_name] + key.replace("__", ".")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change
    save_file(tensors, path / "model.safetensors")


def load(path: Path) -> None:
    Engine(TARGET, None, speculative={"method": "mtp", "model": str(path)})


def test_tensors_that_are_missing_unknown_or_of_another_shape(tmp_path: Path) -> None:
    for number, (name, changes, match) in enumerate((
        ("glm4_moe", {"hnorm__weight": None}, rf"lacks tensor model\.layers\.{LAYERS}\.hnorm\.weight"),
        ("glm4_moe", {"mlp__experts__3__up_proj__weight": None}, r"'mlp\.experts"),
        ("deepseek_v3", {"self_attn__o_proj__weight": None}, r"lacks tensor 'self_attn\.o_proj\.weight'"),
        ("deepseek_v3", {"extra__weight": torch.zeros(2)}, r"has the unknown tensor 'extra\.weight'"),
        ("qwen3_5", {"surplus__weight": torch.zeros(2)}, r"mtp\.surplus\.weight is unknown in an MTP head of kind Qwen"),
        ("mimo", {"mlp__up_proj__weight": torch.zeros(3, 32)}, r"is \(3, 32\), and config\.json says \(48, 32\)"),
        ("mimo", {"input_proj__weight": torch.zeros(16, 32)}, "needs .* directory of this target's own checkpoint"),
        ("mimo", {"token_layernorm__weight": torch.ones(31)}, r"token_layernorm\.weight .* \[31\], expected \[32\]"),
        ("mimo", {"final_layernorm__weight": torch.full((32,), torch.nan)}, r"final_layernorm\.weight .* finite numbers"),
        ("mimo", {"mlp__up_proj__weight": torch.full((48, 32), torch.inf)}, r"mlp\.up_proj\.weight .* not finite"),
        ("qwen3_next", {"fc__weight": torch.zeros(32, 64, dtype=torch.int8)}, "stored as int8; expected bfloat16"),
    )):  # fmt: skip
        path = tmp_path / str(number)
        spoiled(path, name, **changes)
        with pytest.raises(ModelError, match=match):
            load(path)


def test_a_checkpoint_without_a_module(tmp_path: Path) -> None:
    tiny_module("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no MTP head: none of its \d+ tensors .*'layers\.0\.eh_proj\.weight'"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights in .*; expected model\.safetensors"):
        load(tmp_path)


def test_further_modules_are_counted_and_left(tmp_path: Path) -> None:
    save(tmp_path, "mimo", config_of("mimo"))
    tensors = load_file(tmp_path / "model.safetensors")
    more = {key.replace("mtp_layers.0.", "mtp_layers.1."): tensor.clone() for key, tensor in tensors.items()}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    engine = Engine(TARGET, None, speculative={"method": "mtp", "model": str(tmp_path)})
    assert engine.resolved()["head"].endswith("Qwen2DecoderLayer, the first of 2")
