"""A head of a package: trained, resumed, written, recognised and used by name; what is wrong in it is one clear message."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from foretell import HEADS, ConfigError, Engine, ForetellError
from foretell.doctor.candidates import drafter_method
from foretell.heads import formats
from foretell.heads.teacher import Teacher
from foretell.train import methods
from foretell.train.trainer import train
from tests.extend.packages import THIRD_PARTY, lay, lay_third_party
from tests.train.harness import teacher, texts

SOURCE = (THIRD_PARTY / "foretell_echo" / "head.py").read_text(encoding="utf-8")


def run(*words: object) -> Result:
    from foretell.cli.app import app

    return CliRunner().invoke(app, list(map(str, words)))


@pytest.mark.usefixtures("mute")
def test_trained_resumed_exported_recognised_and_used(site: Path) -> None:
    lay_third_party(site)
    data, out, copy = site / "prompts.jsonl", site / "out", site / "copy"
    data.write_text("".join(json.dumps({"prompt": f"def f{n}(x):"}) + "\n" for n in range(8)))
    config = site / "config.json"
    config.write_text(json.dumps({"num_guesses": 2, "save_dtype": "float32"}))
    words = ["train", "linear", "--target", "bundled", "--data", data, "--out", out, "--raw", "--max-new-tokens", 16]
    words += [
        "--temperature",
        0,
        "--lr",
        0.01,
        "--steps",
        60,
        "--batch-tokens",
        256,
        "--config",
        config,
        "--threads",
        1,
    ]
    words += ["--eval-every", 0, "--max-short-share", 1]
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "linear for bundled" in first.stdout
    again = run(*words, "--resume")
    assert (again.exit_code, "all 60 steps were done" in again.output) == (0, True), again.output
    refused = run(*words, "--resume", "--init", out)
    assert (refused.exit_code, "a resumed run keeps all its arguments" in refused.output) == (2, True), refused.output
    assert "linear" in json.loads(run("export", out, "--json").stdout)["layouts"]
    written = run("export", out, "--to", "linear", "--out", copy)
    assert written.exit_code == 0, written.output
    assert run("export", out, "--to", "eagle3", "--out", site / "x").exit_code == 2
    one, other = (load_file(folder / "model.safetensors") for folder in (out, copy))
    assert all(bool((one[name] == other[name]).all()) for name in [*one, *other])
    assert (drafter_method(str(copy)), formats.describe_target(copy).name) == ("linear", "bundled")
    plain = Engine.load("bundled").generate("def f3(x):", max_new_tokens=16, temperature=0.0)
    made = Engine.load("bundled", speculative={"method": "linear", "model": str(copy)}, drafter_errors="raise")
    found = made.generate("def f3(x):", max_new_tokens=16, temperature=0.0)
    assert found.token_ids == plain.token_ids
    assert found.num_accepted_tokens > 0
    both = Engine.load("bundled", speculative={"method": "hybrid", "second": f"eagle3+echo+linear={copy}"})
    assert both.generate("def f3(x):", max_new_tokens=16, temperature=0.0).token_ids == plain.token_ids


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of transformers, which a process of its own is told to leave out."""
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", False)


def small(site: Path, source: str = SOURCE, **given: Any) -> methods.Prepared:
    """The head of a changed package, before its training on a tiny target."""
    points = {"foretell.heads": {"linear": "changed_head:LinearLayout"}}
    if not (site / "changed_head.py").exists():
        lay(site, "changed", points, {"changed_head.py": source})
    return methods.prepare("linear", teacher().model, texts(), {"steps": 2, **given})


def test_its_options_are_settings_of_training(site: Path) -> None:
    prepared = small(site, num_guesses=2)
    assert prepared.options == {"num_guesses": 2, "save_dtype": "float32"}
    head: Any = prepared.objective.head
    assert head.config.num_guesses == 2
    with pytest.raises(ConfigError, match="unknown key 'num_guess' for training 'linear'; did you mean 'num_guesses'"):
        small(site, num_guess=3)
    with pytest.raises(ConfigError, match="num_guesses = 'x' must be a whole number"):
        small(site, num_guesses="x")
    target = teacher()
    train(prepared.objective, target, texts(), site / "out", prepared.config, save=prepared.save)
    on = methods.prepare("linear", target.model, texts(), {"steps": 2, "num_guesses": 2}, init=str(site / "out"))
    assert all(bool((on.objective.head.state_dict()[name] == each).all()) for name, each in head.state_dict().items())
    with pytest.raises(ConfigError, match="num_guesses = 4, but the head of --init"):
        methods.prepare("linear", target.model, texts(), {"steps": 2, "num_guesses": 4}, init=str(site / "out"))
    with pytest.raises(ConfigError, match="method 'linar' cannot be trained; did you mean 'linear'"):
        methods.check("linar", {})


def test_names_of_options_mean_what_the_package_says(site: Path) -> None:
    """Ranges of foretell's own settings do not hold for them."""
    assert (
        small(site, SOURCE.replace('"num_guesses": 3', '"num_guesses": 3, "noise": "pink"')).options["noise"] == "pink"
    )


LAYOUT = "class LinearLayout(foretell.FlatLayout):\n"
WRONG: dict[str, tuple[str, str, str]] = {
    "no import": ("import torch\n", "import torch, absent_module\n", r"cannot be imported \(ModuleNotFoundError"),
    "no layout": (LAYOUT, "class LinearLayout:\n", r"expected a class that is a foretell\.Layout"),
    "no summary": ("    summary = ", "    told = ", "it does not declare summary"),
    "another name": ('method = "linear"\n\n    def', 'method = "liner"\n\n    def', "its attribute 'name' is 'liner'"),
    "abstract": (LAYOUT, "class LinearLayout(foretell.Layout):\n    name = 'linear'\n", "abstract method"),
    "option": ('"num_guesses": 3', '"num_guesses": [3]', "option 'num_guesses' must be of type bool, int, float or str"),
    "taken": ('"num_guesses": 3', '"num_guesses": 3, "lr": 1.0', "its option 'lr' is a setting of all training"),
    "objective": ("        spec = making.model.spec\n", "        spec = making.spec\n", r"cannot be used \(AttributeError"),
    "no objective": ("return LinearObjective(", "return dict(a=1) or (", "expected an Objective of a LinearHead"),
    "not trained": ("    def objective(", "    def other(", "method 'linear' cannot be trained"),
    "describe": (LAYOUT, f"{LAYOUT}    def describe(self, head, target):\n        return {{'x': head}}\n", "not JSON"),
    "taken for": (
        LAYOUT,
        f"{LAYOUT}    def describe(self, head, target):\n        return {{'architectures': ['ForetellKangaroo']}}\n",
        "taken for one of another layout",
    ),
    "parse": (LAYOUT, f"{LAYOUT}    def parse(self, found):\n        return LinearConfig(1)\n", "TypeError"),
    "claims": (LAYOUT, f"{LAYOUT}    def claims(self, config, tensors):\n        return 1 / 0\n", "ZeroDivisionError"),
    "unclaimed": (LAYOUT, f"{LAYOUT}    def claims(self, config, tensors):\n        return False\n", "no head known here"),
    "forgets": (LAYOUT, f"{LAYOUT}    def inward(self, name):\n        return 'x' + name\n", "the weights are not those"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_the_first_step(site: Path, name: str) -> None:
    old, new, said = WRONG[name]
    assert SOURCE.count(old) == 1
    with pytest.raises(ForetellError, match=said) as raised:
        small(site, SOURCE.replace(old, new))
    if name not in ("not trained", "unclaimed", "forgets"):
        assert "head 'linear' of the package changed 1.2.0" in str(raised.value)


@pytest.mark.parametrize(
    ("new", "said"), [("return slots", "outcome returned"), ("return 1 / 0", r"cannot be used \(ZeroDivisionError")]
)
def test_what_fails_in_a_step_names_the_package(site: Path, new: str, said: str) -> None:
    prepared = small(site, SOURCE.replace("return foretell.Outcome(slots)", new))
    with pytest.raises(ForetellError, match=rf"head 'linear' of the package changed 1\.2\.0 \(changed_head\) .*{said}"):
        train(prepared.objective, Teacher(teacher().model), texts(), site / "out", prepared.config)


def test_directories_of_heads_whose_package_is_absent_or_broken(site: Path) -> None:
    small(site).save(site / "head")
    assert formats.detect(site / "head") is HEADS["linear"]
    (site / "changed_head.py").write_text("raise RuntimeError('out of order')")
    del sys.modules["changed_head"]
    HEADS.forget()
    with (
        pytest.warns(RuntimeWarning, match="out of order"),
        pytest.raises(ForetellError, match=r"changed 1\.2\.0 .*order"),
    ):
        formats.detect(site / "head")
    (site / "changed-1.2.0.dist-info" / "entry_points.txt").unlink()
    HEADS.forget()
    with pytest.raises(ForetellError, match="of layout 'linear', of a package that is not installed here"):
        drafter_method(str(site / "head"))


def test_no_package_is_imported_for_a_head_of_foretell(site: Path) -> None:
    lay_third_party(site)
    assert drafter_method("bundled/eagle3") == "eagle3"
    assert "foretell_echo" not in sys.modules
    HEADS["linear"] = HEADS["kangaroo"]
    del HEADS["linear"]
    assert "linear" in HEADS
