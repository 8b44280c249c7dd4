"""BitNet: transformers' packed weights, norms in front of the output matrices, and GGUF files of them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell.checkpoints.directories import check_files
from foretell.checkpoints.weights import SafetensorsWeights
from foretell.core.errors import ConfigError
from foretell.model.llama.read.ternary import TernaryWeights
from foretell.model.llama.run import native
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import read_local
from foretell.model.load import load_model
from tests.checkpoints.gguf.make import random_model, write
from tests.model.llama.family import make_model, tokens_of
from tests.model.llama.test_gptoss import logits_of

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
REASON = native.supports(make_model("bitnet").config, torch.float32, CPU)
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FORMS = {
    "times": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "over": {"linear_class": "bitlinear"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}


def by_four(ones: Tensor) -> Tensor:
    """As transformers packs them (``integrations/bitnet.py``): row r + i * rows / 4 in the bits 2 i of row r."""
    parts = (ones + 1).to(torch.uint8).chunk(4)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def to_ternary(weight: Tensor) -> Tensor:
    """As transformers rounds plain weights in each pass (``WeightQuant``)."""
    inverse = 1.0 / weight.abs().mean()
    return (weight * inverse).round().clamp(-1, 1) / inverse


def saved(folder: Path, form: str, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint in a folder, and the module of its values with each linear's ternary weights."""
    module, random = make_model("bitnet", **SIZES), torch.Generator().manual_seed(1)
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    ones: dict[str, Tensor] = {}
    for index, name in enumerate(sorted(name for name in tensors if "_proj." in name)):
        if form == "online":
            module.get_parameter(name).data.copy_(to_ternary(tensors[name]) if index else tensors[name])
            continue
        ones[name] = torch.randint(-1, 2, tensors[name].shape, generator=random).float()
        scale = torch.tensor([0.125 * (1 + index % 5 / 8)])  # exact in bfloat16, whose inverse is not
        tensors |= {name: by_four(ones[name]), f"{name}_scale": scale if form == "times" else 1 / scale}
        module.get_parameter(name).data.copy_(ones[name] * scale)
    save_file(tensors, folder / "model.safetensors")
    stored = {"quant_method": "bitnet", **FORMS[form], **settings}
    (folder / "config.json").write_text(json.dumps(module.config.to_dict() | {"quantization_config": stored}))
    return module, ones


@pytest.mark.parametrize("form", ["times", "over"])
def test_packed_weights_are_read_as_transformers_packs_them(form: str, tmp_path: Path) -> None:
    """Values of every linear, whole and by rows across its quarters; blocks that stay packed; logits of the dequantised."""
    module, ones = saved(tmp_path, form)
    assert check_files(tmp_path, name="x").is_quantised
    assert read_local(tmp_path, name="x").traits.ternary == form
    stored = TernaryWeights(SafetensorsWeights(tmp_path), form)
    assert stored.names == set(module.state_dict())
    for name in ones:
        values = module.get_parameter(name)
        assert stored.shape(name) == values.shape
        torch.testing.assert_close(stored.read(name, torch.float32, CPU), values.detach(), atol=0, rtol=1e-6)
        quarter = len(values) // 4
        for start, stop in ((0, 3), (quarter - 1, quarter + 2), (3, 3 * quarter + 1)):
            part = stored.reader(name)(start, stop)
            torch.testing.assert_close(part, values[start:stop].detach(), atol=0, rtol=1e-6)
        whole, part = stored.packed(name), stored.packed(name, (5, 11))
        assert whole is not None
        assert part is not None
        assert (whole.kind, whole.shape) == ("TQ2_0", tuple(values.shape))
        assert torch.equal(part.rows(1, 4), whole.rows(6, 9))
    tokens = tokens_of(2, 19, seed=3)
    with torch.no_grad():
        expected = module(tokens, use_cache=False).logits
    plain = load_model(str(tmp_path), implementation="lean", dtype=torch.float32)
    torch.testing.assert_close(logits_of(plain, tokens), expected, atol=2e-4, rtol=2e-4)
    if REASON is not None:
        return
    model = load_model(str(tmp_path), dtype="float32")
    assert isinstance(model, NativeModel)
    assert set(model.spec.weights.split("+")) == {"float32", "TQ2_0"}
    found = logits_of(model, tokens)
    assert torch.equal(found, logits_of(model, tokens, 1))
    assert (found - expected).abs().mean() < 0.06 * expected.abs().mean()


def test_plain_weights_that_are_rounded_in_every_pass(tmp_path: Path) -> None:
    """ "online": the first linear alone is left as it is in the module, and there they differ."""
    module, _ = saved(tmp_path, "online")
    stored = TernaryWeights(SafetensorsWeights(tmp_path), "online")
    names = sorted(name for name in module.state_dict() if "_proj." in name)
    for name in names[1:]:
        found = stored.read(name, torch.float32, CPU)
        assert found.unique().numel() == 3
        torch.testing.assert_close(found, module.get_parameter(name).detach(), atol=0, rtol=1e-6)
    assert not torch.equal(stored.read(names[0], torch.float32, CPU), module.get_parameter(names[0]))
    packed = stored.packed(names[1], (1, 3))
    assert packed is not None
    assert packed.kind == "TQ2_0"


def test_norms_of_each_linear_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "over", use_rms_norm=True)
    with pytest.raises(ConfigError, match="norms of their own in front of linears"):
        load_model(str(tmp_path), implementation="lean")


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["bitnet", "bitnet-b1.58"])
def test_gguf_files(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of either activation: plain weights as transformers computes them, and TQ1_0 at any width."""
    act = "silu" if arch == "bitnet" else "relu2"
    module = random_model(make_model("bitnet", **SIZES, hidden_act=act, tie_word_embeddings=True))
    tokens = tokens_of(2, 19, seed=3)
    with torch.no_grad():
        expected = module(tokens, use_cache=False).logits
    whole = write(tmp_path / "plain.gguf", module, arch=arch)
    plain = load_model(str(whole), dtype=dtype, implementation="native")
    with torch.no_grad():
        theirs = copy.deepcopy(module).to(dtype)(tokens, use_cache=False).logits.float()
    near = logits_of(plain, tokens)
    bound = max(1.5 * float((theirs - expected).abs().mean()), 1e-5 * float(expected.abs().mean()))
    assert (near - expected).abs().mean() < bound
    assert torch.equal(near, logits_of(plain, tokens, 1))
    path = write(
        tmp_path / "few.gguf", module, arch=arch, kind=lambda name: "TQ1_0" if name.startswith("blk") else "F32"
    )
    few = load_model(str(path), dtype=dtype, implementation="native")
    assert "TQ1_0" in few.spec.weights
    found = logits_of(few, tokens)
    assert torch.equal(found, logits_of(few, tokens, 1))
    lean = logits_of(load_model(str(path), implementation="lean", dtype=torch.float32), tokens)
    assert (found - lean).abs().mean() < 0.06 * lean.abs().mean()
