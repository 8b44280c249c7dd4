"""Loading by name: what is accepted, which implementation is chosen, and that every refusal is one clear error."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from foretell.checkpoints.directories import check_files, check_layers
from foretell.core.errors import ConfigError, ModelError
from foretell.kernels import build
from foretell.model.hf.adapter import TransformersModel
from foretell.model.load import from_module, load_model, load_tokenizer
from tests.model.tiny import BUSHY, Rows, largest_error, tiny_config, tiny_module


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint in bfloat16. Never written to: tests change copies."""
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny_module("llama", dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "damaged"))


def load_transformers(path: Path | str, **options: Any) -> TransformersModel:
    """Load with the implementation that these tests are about."""
    model = load_model(str(path), implementation="transformers", **options)
    assert isinstance(model, TransformersModel)
    return model


def assert_decodes(model: TransformersModel) -> None:
    """One bushy tree equals plain runs."""
    rows = Rows(model, model.module)
    rows.prefill()
    tokens, parent = rows.tree(BUSHY)
    assert largest_error(rows.target.forward(tokens, rows.plan(parent)), rows.expected(tokens, parent)) < 1e-4


# What is accepted


def test_load_directory(saved: Path) -> None:
    """A directory loads with its own weights, in float32 on the CPU unless asked otherwise."""
    model = load_transformers(saved)
    assert model.spec.dtype == torch.float32
    assert model.spec.name == str(saved)
    own = load_file(saved / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.module.get_output_embeddings().weight, own.float())
    assert_decodes(model)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.bfloat16), ("bf16", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)],
)
def test_dtype(saved: Path, dtype: Any, expected: torch.dtype) -> None:
    """Names, torch dtypes and the checkpoint's own."""
    assert load_transformers(saved, dtype=dtype).spec.dtype == expected


def test_dtype_auto_without_a_word_in_the_config(copy: Path) -> None:
    """Old checkpoints state no dtype: then that of the weights counts."""
    edit_config(copy, dtype=None)
    assert load_transformers(copy, dtype="auto").spec.dtype == torch.bfloat16


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"])
def test_device_map(saved: Path, device_map: Any) -> None:
    """Accelerate's placement, as far as one device shows it."""
    model = load_transformers(saved, device_map=device_map, dtype="float32")
    assert_decodes(model)
    assert model.spec.device == torch.device("cpu")


def test_offloaded_layers(saved: Path, tmp_path: Path) -> None:
    """Layers kept on disk and fetched by accelerate's hooks: the cache lies where each layer computes."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(4)}
    model = load_transformers(saved, device_map=places, dtype="float32")
    whole = load_transformers(saved)
    rows, twin = Rows(model, whole.module), Rows(whole, whole.module)
    rows.prefill()
    twin.prefill()
    tokens, parent = rows.tree()
    plan = rows.plan(parent)
    assert largest_error(rows.target.forward(tokens, plan), rows.expected(tokens, parent)) < 1e-4
    hidden = rows.target.forward(tokens, plan, layers=(0, 3)).hidden
    upper = rows.target.forward(tokens, plan, layers=(3, 4), hidden=hidden)
    assert largest_error(upper, rows.expected(tokens, parent)) < 1e-4


def test_sharded_checkpoint(tmp_path: Path) -> None:
    """Shards with an index are one checkpoint."""
    module = tiny_module("llama")
    module.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_decodes(load_transformers(tmp_path))


def test_from_module() -> None:
    """A model in memory is wrapped as it is."""
    module = tiny_module("gpt2")
    model = from_module(module, name="mine")
    assert isinstance(model, TransformersModel)
    assert model.module is module
    assert model.spec.name == "mine"
    assert_decodes(model)


def test_bundled_names_lead_into_the_package(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """The three bundled names resolve through ``foretell.bundled.path``, and nothing else does."""
    asked: list[str] = []
    bundled = ModuleType("foretell.bundled")
    bundled.path = lambda name: asked.append(name) or saved  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "foretell.bundled", bundled)
    monkeypatch.setattr("foretell.bundled", bundled, raising=False)
    for name in ("bundled", "bundled/target", "bundled/draft"):
        assert load_transformers(name).spec.name == name
    assert asked == ["target", "target", "draft"]


def test_tokenizer(tmp_path: Path) -> None:
    """A tokenizer loads by the same name as its model; without files it is a ModelError that names the directory."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")))
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).decode([1]) == "b"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: no tokenizer .* \(it holds none; expected the directory of"):
        load_tokenizer(str(tmp_path / "empty"))


# Which implementation


class FakeTwin:
    """Stands in for a fast implementation: says what it supports, and returns itself."""

    def __init__(self, reason: str | None, failure: Exception | None = None) -> None:
        self.reason, self.failure = reason, failure
        self.options: dict[str, Any] = {}

    def supports(self, config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
        return self.reason

    def load(self, path: Path, **options: Any) -> "FakeTwin":
        if self.failure:
            raise self.failure
        self.options = {"path": path, **options}
        return self

    @property
    def NativeModel(self) -> "FakeTwin":
        return self

    LeanModel = NativeModel


def install(monkeypatch: pytest.MonkeyPatch, **twins: FakeTwin) -> None:
    """Put fakes in the place of the fast modules."""
    for kind in ("native", "lean"):
        monkeypatch.setitem(
            sys.modules, f"foretell.model.llama.run.{kind}", twins.get(kind, FakeTwin("is not tested here"))
        )


def test_auto_takes_the_fastest_that_supports_the_model(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """Native before lean before transformers; what each is given is what was asked for."""
    native, lean = FakeTwin(None), FakeTwin(None)
    install(monkeypatch, native=native, lean=lean)
    assert load_model(str(saved), dtype="auto") is native
    assert native.options == {
        "path": saved,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "name": str(saved),
        "weights": "auto",
        "kv": "auto",
    }
    native.reason = "needs AVX-512"
    assert load_model(str(saved)) is lean
    lean.reason = "too exotic"
    assert isinstance(load_model(str(saved)), TransformersModel)
    lean.reason = None
    assert isinstance(load_model(str(saved), device_map={"": "cpu"}), TransformersModel)


CHOSEN = ("disabled by FORETELL_NATIVE=0", "it has no variant baseline", "the CPU lacks avx2")
NO_MEMORY = RuntimeError("no memory\nand more")


@pytest.mark.parametrize(
    ("native", "lean", "said"),
    [
        (FakeTwin("no compiler"), FakeTwin(None), "runs as 'lean', which is slower than 'native': no compiler"),
        (FakeTwin("a; b"), FakeTwin("c"), "runs as 'transformers', which is slower than 'native': a; b"),
        (
            FakeTwin(None, NO_MEMORY),
            FakeTwin(None),
            "runs as 'lean', which is slower than 'native': RuntimeError: no memory",
        ),
        (FakeTwin(CHOSEN[0]), FakeTwin("c"), "runs as 'transformers', which is slower than 'lean': c"),
        *((FakeTwin(reason), FakeTwin(None), None) for reason in CHOSEN),
        (FakeTwin(None), FakeTwin("c"), None),
    ],
)
def test_a_slower_implementation_is_said_once_with_its_reason(
    native: FakeTwin, lean: FakeTwin, said: str | None, monkeypatch: pytest.MonkeyPatch, saved: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    install(monkeypatch, native=native, lean=lean)
    monkeypatch.setattr(build, "_warned", [])
    for _ in range(2):  # a draft after its target
        load_model(str(saved))
    assert caplog.messages == ([] if said is None else [f"{saved} {said}"])
    assert not caplog.messages or caplog.records[0].name.startswith("foretell.")
    caplog.clear()
    monkeypatch.setattr(build, "_warned", [])
    for options in ({"implementation": "transformers"}, {"device_map": {"": "cpu"}}):  # the user's own choice
        load_model(str(saved), **options)
    assert caplog.messages == []


def test_a_checkpoint_that_runs_in_more_bytes_than_it_has_is_said(
    monkeypatch: pytest.MonkeyPatch, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, of a large one, where native kernels would run it as it is stored, and nobody chose."""
    native = FakeTwin(None)
    install(monkeypatch, native=native, lean=FakeTwin("c"))
    tiny_module("llama", dtype=torch.float32).save_pretrained(tmp_path)

    def said(path: Path, large: int = 1, **options: Any) -> list[str]:
        monkeypatch.setattr(build, "_warned", [])
        monkeypatch.setattr("foretell.model.load.LARGE", large)
        caplog.clear()
        for _ in range(2):
            load_model(str(path), **options)
        return caplog.messages

    told = "is stored in bfloat16 and runs in float32, which reads twice the bytes for each token"
    assert said(saved) == [f"{saved} {told}: dtype 'auto' runs it as it is stored"]
    for options in ({"large": 10**8}, {"dtype": "auto"}, {"dtype": "float32"}, {"implementation": "transformers"}):
        assert said(saved, **options) == []
    assert said(tmp_path) == []
    native.reason = CHOSEN[0]
    assert not [line for line in said(saved) if told in line]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_are_run_natively_or_refused(
    monkeypatch: pytest.MonkeyPatch, saved: Path, weights: str
) -> None:
    """Keys and values in bfloat16 by default; no other implementation stands in, for it would be another model."""
    native, lean = FakeTwin(None), FakeTwin(None)
    install(monkeypatch, native=native, lean=lean)
    assert load_model(str(saved), weights=weights) is native
    assert (native.options["weights"], native.options["dtype"]) == (weights, torch.bfloat16)
    assert load_model(str(saved), weights=weights, dtype="float32", implementation="native") is native
    assert native.options["dtype"] == torch.float32
    native.reason = "needs AVX2"
    with pytest.raises(ConfigError, match=f"weights='{weights}' needs the native implementation.*needs AVX2"):
        load_model(str(saved), weights=weights)
    for options in ({"implementation": "lean"}, {"implementation": "transformers"}, {"device_map": "auto"}):
        with pytest.raises(ConfigError, match=f"weights='{weights}' needs the native implementation"):
            load_model(str(saved), weights=weights, **options)


def test_rounded_keys_and_values_are_read_natively_or_refused(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """By no other implementation, on no accelerator; and never in silence as something else."""
    native, lean = FakeTwin(None), FakeTwin(None)
    install(monkeypatch, native=native, lean=lean)
    assert load_model(str(saved), kv="int8", weights="int4") is native
    assert (native.options["kv"], native.options["weights"]) == ("int8", "int4")
    assert load_model(str(saved)) is native
    assert native.options["kv"] == "auto"
    native.reason = "needs AVX2"
    with pytest.raises(ConfigError, match=r"kv='int8' needs the native implementation.*needs AVX2"):
        load_model(str(saved), kv="int8")
    for options in ({"implementation": "lean"}, {"implementation": "transformers"}, {"device_map": "auto"}):
        with pytest.raises(ConfigError, match="kv='int8' needs the native implementation"):
            load_model(str(saved), kv="int8", **options)
    with pytest.raises(ConfigError, match="kv 'int4' is unknown"):
        load_model(str(saved), kv="int4")


def test_plain_weights_are_a_dtype(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """fp32 and bf16 are served by every implementation."""
    native = FakeTwin(None)
    install(monkeypatch, native=native)
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert load_model(str(saved), weights=weights) is native
        assert (native.options["weights"], native.options["dtype"]) == (weights, dtype)
    with pytest.raises(ConfigError, match="weights='bf16' contradicts dtype 'float32'"):
        load_model(str(saved), weights="bf16", dtype="float32")
    with pytest.raises(ConfigError, match="weights 'int9' is unknown; did you mean 'int8'"):
        load_model(str(saved), weights="int9")


def test_auto_survives_a_twin_that_fails(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """A compiler that is missing must never stop what transformers can run."""
    install(monkeypatch, native=FakeTwin(None, RuntimeError("no compiler")))
    assert isinstance(load_model(str(saved)), TransformersModel)
    monkeypatch.setitem(sys.modules, "foretell.model.llama.run.native", None)  # cannot even be imported
    assert isinstance(load_model(str(saved)), TransformersModel)


def test_forced_implementation_says_why_not(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """A forced implementation that does not support the model is a ConfigError with the reason."""
    install(monkeypatch, native=FakeTwin("float16 is not for CPUs"))
    with pytest.raises(ConfigError, match=r"'native' does not support .*llama: float16 is not for CPUs"):
        load_model(str(saved), implementation="native")
    monkeypatch.setitem(sys.modules, "foretell.model.llama.run.lean", None)
    with pytest.raises(ConfigError, match="'lean' does not support"):
        load_model(str(saved), implementation="lean")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"implementation": "naitve"}, "'naitve' is unknown; did you mean 'native'"),
        (
            {"implementation": "lean", "device_map": "auto"},
            "device_map needs implementation='transformers', not 'lean'",
        ),
        ({"dtype": "float23"}, "'float23' is unknown; did you mean 'float32'"),
        ({"dtype": torch.int8}, "torch.int8 is unknown"),
        ({"device": "gpu"}, "device 'gpu' cannot be used here"),
    ],
)
def test_options_that_cannot_be(saved: Path, options: dict[str, Any], complaint: str) -> None:
    """Each names what was given, and the nearest right thing."""
    with pytest.raises(ConfigError, match=complaint):
        load_model(str(saved), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_absent_accelerator(saved: Path) -> None:
    """A device that this machine has not is a ConfigError, not torch's assertion."""
    with pytest.raises(ConfigError, match="device 'cuda' cannot be used here"):
        load_model(str(saved), device="cuda")


# Damaged checkpoints


def edit_config(path: Path, **changes: Any) -> None:
    """Rewrite keys of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_nonexistent_directory(tmp_path: Path) -> None:
    """A path that is none."""
    with pytest.raises(ModelError, match=r"no/such/place does not exist"):
        load_model(str(tmp_path / "no/such/place"))


def test_file_instead_of_directory(saved: Path) -> None:
    """The weights' file is not the model's directory."""
    with pytest.raises(ModelError, match=r"model\.safetensors is a file; expected a GGUF file, or the directory"):
        load_model(str(saved / "model.safetensors"))


def test_unknown_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that it is neither here, nor cached, nor reachable."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing-at-all.*hub cannot be reached.*network"):
        load_model("nobody/nothing-at-all")


def test_malformed_hub_id() -> None:
    """A name that can be neither."""
    with pytest.raises(ModelError, match=r"'--what is this' is neither a directory nor a Hugging Face id"):
        load_model("--what is this")


def test_no_config(copy: Path) -> None:
    """Weights alone are no model."""
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"damaged: no config\.json"):
        load_model(str(copy))


def test_broken_config(copy: Path) -> None:
    """A config.json that is not JSON, or of a type that transformers does not know."""
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"damaged: config\.json cannot be used"):
        load_model(str(copy))
    (copy / "config.json").write_text('{"model_type": "brandnew"}')
    with pytest.raises(ModelError, match=r"damaged: config\.json cannot be used.*brandnew"):
        load_model(str(copy))


def test_no_weights(copy: Path) -> None:
    """A configuration alone is no model."""
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights in .*damaged; expected model\.safetensors"):
        load_model(str(copy))


def test_absent_shard(tmp_path: Path) -> None:
    """A shard that the index names and that is not there is named."""
    tiny_module("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"1 of \d+ weight files are missing .*{shard.name}"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("size", [4, 60, 5000])
def test_truncated_weights(copy: Path, size: int) -> None:
    """Cut inside the length, the header, or the data: always one ModelError that says to fetch it again."""
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors.*download it again"):
        load_model(str(copy))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_offsets": [8, 4]}, "takes .* bytes, not -4"),
        ({"data_offsets": [None, 4]}, r"data_offsets are \[None, 4\]"),
        ({"data_offsets": [0, 10**20]}, "data_offsets are"),
        ({"dtype": "F64"}, r"shape \(32,\) in F64 takes 256 bytes, not 64"),
        ({"dtype": None}, "without a dtype"),
        ({"shape": [-1, 4]}, r"shape is \[-1, 4\]"),
        ({"shape": [31]}, r"shape \(31,\) in BF16 takes 62 bytes, not 64"),
        ("other data", r"begin at byte \d+, where \d+ is expected"),
        (None, "'None', without a dtype"),
    ],
)
def test_a_header_that_is_damaged(copy: Path, change: Any, said: str) -> None:
    """What would be read from another place, or past the end, is said in one line."""
    file = copy / "model.safetensors"
    header, data = header_of(file)
    entry = header["model.norm.weight"]
    if change == "other data":
        entry["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    else:
        header["model.norm.weight"] = entry | change if change else change
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    with pytest.raises(ModelError, match=said) as raised:
        load_model(str(copy))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["[]", "3", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{}", "[" * 9999])
def test_an_index_that_is_none(copy: Path, content: str) -> None:
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load_model(str(copy))


def test_git_lfs_pointer(copy: Path) -> None:
    """The commonest damage of all: a clone without git-lfs."""
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"model\.safetensors is a Git LFS pointer.*git lfs pull"):
        load_model(str(copy))


def test_weights_that_are_missing_are_not_made_up(copy: Path) -> None:
    """Transformers fills missing weights with random numbers; here they are named."""
    file = copy / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"do not match config\.json: 1 missing.*layers\.1\.mlp\.up_proj"):
        load_transformers(copy)


@pytest.mark.parametrize("num_layers", [2, 6])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_config_with_another_number_of_layers(copy: Path, num_layers: int, implementation: str) -> None:
    """Half a model still writes something, so superfluous layers are refused as missing ones are."""
    edit_config(copy, num_hidden_layers=num_layers)
    with pytest.raises(ModelError, match=rf"num_hidden_layers is {num_layers}, but they hold 4 layers"):
        load_model(str(copy), implementation=implementation)


def test_layers_of_multi_token_prediction_are_allowed(tmp_path: Path) -> None:
    """DeepSeek's checkpoints hold a layer more than the model: what the configuration says is not refused."""
    tiny_module("deepseek_v3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    config = tiny_config("deepseek_v3", num_nextn_predict_layers=1)
    check_layers(check_files(tmp_path, name="x"), config, name="x")
    config.num_nextn_predict_layers = 0
    with pytest.raises(ModelError, match=r"num_hidden_layers is 4, but they hold .*5 layers"):
        check_layers(check_files(tmp_path, name="x"), config, name="x")


def test_config_of_another_size(copy: Path) -> None:
    """Shapes that differ are refused too."""
    edit_config(copy, intermediate_size=64)
    with pytest.raises(ModelError, match=r"damaged: "):
        load_transformers(copy)
