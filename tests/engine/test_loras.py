"""Requests with adapters: the texts of the merged weights, and the same with guesses and beside any other request."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foretell import Completion, ConfigError, Engine, Request, SamplingParams
from foretell.checkpoints.lora import Lora, read_lora
from foretell.checkpoints.weights import ModuleWeights
from foretell.core.params import HEATS
from foretell.draft.base import Method
from foretell.engine.request.request import row_of, submission_of
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.kangaroo.drafter import Kangaroo
from foretell.methods.kangaroo.head import KangarooHead
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.loras import MergedWeights
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import read_shape
from foretell.model.target import CausalModel
from foretell.planner.acceptance import Acceptance
from foretell.service.options import ServiceOptions
from foretell.service.tenants import Tenants
from tests.engine.harness import ToyTokenizer
from tests.model.adapters import write_adapter
from tests.model.tiny import VOCAB, tiny_module

NAMES = (None, "one", "two")


def lower_layers(model: CausalModel, _: int) -> Kangaroo:
    """An adapter that adds nothing."""
    return Kangaroo(KangarooHead.fresh(model, exit_layer=2, head_dim=16), model)


METHODS: dict[str, tuple[dict[str, Any], Any]] = {
    "ngram": ({"method": "ngram", "num_speculative_tokens": 4}, None),
    "suffix": ({"method": "suffix"}, None),
    "chain": ({"method": "draft_model", "num_speculative_tokens": 3}, DraftModel),
    "tree": ({"method": "draft_model", "num_speculative_tokens": 3, "shape": "static/branching=2x2x1"}, DraftModel),
    "dynamic": ({"method": "draft_model", "num_speculative_tokens": 3, "shape": "eagle2/size=5/width=2"}, DraftModel),
    "lower layers": ({"method": "kangaroo", "num_speculative_tokens": 3}, lower_layers),
}


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    return tiny_module("llama", head_dim=16, eos_token_id=None)


@pytest.fixture(scope="module")
def loras(module: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lora]:
    made = {}
    for seed, name in enumerate(("one", "two"), start=1):
        path = tmp_path_factory.mktemp(name)
        made[name] = read_lora(write_adapter(path, module.state_dict(), seed=seed, rank=2 + seed))
    return made


@pytest.fixture(scope="module")
def model(module: PreTrainedModel, loras: dict[str, Lora]) -> CausalModel:
    made = NativeModel.from_hf(module)
    made.add_loras(loras)
    return made


def prompts(count: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(8)
    lengths = torch.randint(1, 24, (count,), generator=random).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in lengths]


def requests(count: int, temperature: float, new: int = 12) -> list[Request]:
    """Adapters and none in turn."""
    return [
        Request(ids, SamplingParams(temperature=temperature, seed=at, max_new_tokens=new), lora=NAMES[at % 3])
        for at, ids in enumerate(prompts(count))
    ]


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_200_texts_are_those_of_the_merged_weights(
    module: PreTrainedModel, loras: dict[str, Lora], model: CausalModel, temperature: float
) -> None:
    """All in batches of adapters mixed; float32, and no two tokens of these texts are nearer than rounding."""
    asked = requests(200, temperature)
    found = Engine(model, speculative="none").generate_batch(asked, batch_size=32)
    different = 0
    for at, name in enumerate(NAMES):
        source = ModuleWeights(module)
        shape = read_shape(module.config, module.generation_config)
        whole = source if name is None else MergedWeights(source, loras[name])
        merged = Engine(NativeModel(shape, whole, dtype=torch.float32, name="merged"), speculative="none")
        mine = [Request(one.prompt, one.params) for one in asked[at::3]]
        assert ids_of(merged.generate_batch(mine, batch_size=32)) == ids_of(found[at::3])
        plain = Engine(model, speculative="none").generate_batch(mine, batch_size=32)
        different += sum(one.token_ids != other.token_ids for one, other in zip(plain, found[at::3], strict=True))
    assert different > 100, "adapters must matter"


@pytest.mark.parametrize("method", METHODS)
def test_guesses_change_no_token(module: PreTrainedModel, model: CausalModel, method: str) -> None:
    """Bit for bit, alone and among others, greedy and drawn; the guesses are tried."""
    config, kind = METHODS[method]
    draft: Any = NativeModel.from_hf(module) if kind is DraftModel else model
    loaded: Method | None = None if kind is None else kind(draft) if kind is DraftModel else kind(draft, 2)
    engine = Engine(model, speculative=config, method=loaded, prefix_memory_gib=0.01)
    asked = [*requests(12, 0.0, 24), *requests(12, 1.0, 24)]
    alone = [Engine(model, speculative="none").generate_batch([one])[0].token_ids for one in asked]
    found = engine.generate_batch(asked, batch_size=8)
    assert ids_of(found) == alone
    assert ids_of([engine.generate_batch([one])[0] for one in asked[:3]]) == alone[:3]
    assert sum(one.num_accepted_tokens for one in found) > 0


def test_lean_decodes_adapters_too(module: PreTrainedModel, loras: dict[str, Lora], model: CausalModel) -> None:
    lean = LeanModel.from_hf(module)
    lean.add_loras(loras)
    asked = requests(12, 1.0)
    expected = ids_of(Engine(model, speculative="none").generate_batch(asked))
    draft = {"method": "draft_model", "num_speculative_tokens": 3, "shape": "static/branching=2x2x1"}
    for speculative, method in (("none", None), (draft, DraftModel(LeanModel.from_hf(module)))):
        found = Engine(lean, speculative=speculative, method=method).generate_batch(asked)
        assert ids_of(found) == expected


def test_prefixes_are_those_of_the_adapter(model: CausalModel) -> None:
    """The KV of a text is another with another adapter; of the same it is found."""
    prompt, params = prompts(60)[-1] * 8, SamplingParams(temperature=0.0, max_new_tokens=12)
    expected = {name: Engine(model, speculative="none").generate(prompt, params, lora=name).token_ids for name in NAMES}
    assert len({tuple(ids) for ids in expected.values()}) == 3
    engine = Engine(model, speculative="none", prefix_memory_gib=0.01)
    for cached in (False, True):
        for name in NAMES:
            found = engine.generate(prompt, params, lora=name)
            assert found.token_ids == expected[name], name
            assert (found.num_cached_tokens > 0) == cached, name


def test_scores_are_the_adapters(model: CausalModel) -> None:
    """Also where the text before had another: what was read with that is not taken over within one call of one adapter."""
    prompt = prompts(60)[-1] * 8
    engine = Engine(model, speculative="none")
    base, one = (list(engine.score([prompt, prompt], lora=name)) for name in (None, "one"))
    assert base[0] == base[1]
    assert one[0] == one[1]
    assert sum(abs((a.logprob or 0.0) - (b.logprob or 0.0)) > 1e-3 for a, b in zip(base[0], one[0], strict=True)) > 50


def test_an_engine_may_have_one_for_all(model: CausalModel) -> None:
    prompt, params = prompts(3)[2], SamplingParams(temperature=0.0, max_new_tokens=12)
    named = Engine(model, speculative="none").generate(prompt, params, lora="two")
    engine = Engine(model, speculative="none", lora="two")
    assert engine.generate(prompt, params).token_ids == named.token_ids
    assert engine.with_method("ngram").generate(prompt, params).token_ids == named.token_ids
    assert engine.stream(prompt, params)._row.submission.lora == "two"
    assert engine.resolved()["loras"] == ["one", "two"]


def test_unknown_names_are_refused(model: CausalModel, module: PreTrainedModel) -> None:
    engine = Engine(model, speculative="none")
    for call in (engine.generate, engine.stream, lambda prompt, lora: list(engine.score([prompt], lora=lora))):
        with pytest.raises(ConfigError, match="lora = 'three' is no adapter that is loaded; there are 'one', 'two'"):
            call([5], lora="three")
    with pytest.raises(ConfigError, match="there are none: load them with lora="):
        Engine(NativeModel.from_hf(module), speculative="none", lora="one")


def test_acceptance_and_stores_are_told_apart(model: CausalModel) -> None:
    engine = Engine(model, speculative="suffix")
    heats = []
    for name in NAMES:
        submission = submission_of("a", Request([5], SamplingParams(temperature=1.0), lora=name), None)
        heats.append(row_of(0, submission, engine.choice(), model, None).heat)
    assert len({*heats}) == 3
    assert max(SamplingParams(temperature=9.0).heat, heats[0]) < HEATS
    rates = Acceptance(4)
    for _ in range(40):
        rates.observe("r", "suffix", 3, 3, 3, heat=heats[1])
    assert rates.seen("suffix", heats[1]) > 0 == rates.seen("suffix", heats[0])
    tenants = Tenants("all")
    stores = [tenants.choice(engine.choice(), None, name).method for name in NAMES]
    assert len({*map(id, stores)}) == 3
    assert tenants.choice(engine.choice(), None, "one").method is stores[1]
    assert ServiceOptions().shared_drafts == "off"


def test_loading_by_directory(
    module: PreTrainedModel, loras: dict[str, Lora], model: CausalModel, tmp_path: Path
) -> None:
    module.save_pretrained(tmp_path)
    prompt, params = prompts(3)[2], SamplingParams(temperature=0.0, max_new_tokens=12)
    expected = Engine(model, speculative="none").generate(prompt, params, lora="one").token_ids
    tokenizer = ToyTokenizer([b"x"] * VOCAB, special=())
    for given, name in (({"a": loras["one"].path}, "a"), (loras["one"].path, None)):
        for target in (str(tmp_path), NativeModel.from_hf(module)):
            engine = Engine.load(target, tokenizer=tokenizer, speculative="none", lora=given)
            assert engine.generate(prompt, params, lora=name).token_ids == expected
