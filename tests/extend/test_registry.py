"""Names from packages: found, imported late, and a package that cannot be used harms nobody else."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretell import METHODS, SHAPES, VERIFIERS, ConfigError, speculative_config
from foretell.core import builtin
from foretell.core.registry import Registry, load_reference
from foretell.verify import parse_verifier
from tests.extend.packages import lay, lay_third_party

CONFIG = """
from dataclasses import dataclass
import foretell
from foretell.draft.none import NoMethod

@dataclass(frozen=True)
class Config(foretell.MethodConfig):
    method = "{name}"
    capabilities = foretell.Capabilities("nothing", draws=False)
{keys}
    def load(self, loader):
        return NoMethod()
"""


def config(name: str, keys: str = "") -> str:
    return CONFIG.format(name=name, keys=keys)


# -- what is built in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin.METHODS)
def test_every_part_of_every_method_is_there(name: str) -> None:
    parts = builtin.METHODS[name]
    references = [parts.config, *parts.layouts, parts.training]
    assert any(references)
    for reference in references:
        if reference is not None:
            assert load_reference(reference) is not None
    if parts.config is not None:
        assert METHODS[name].method == name
        assert METHODS.origin(name) is None


def test_built_in_names_in_their_order_and_nothing_else() -> None:
    assert METHODS.builtin == tuple(builtin.CONFIGS)
    assert tuple(VERIFIERS.builtin) == tuple(builtin.VERIFIERS)
    assert [VERIFIERS[name].name for name in builtin.VERIFIERS] == list(builtin.VERIFIERS)
    assert [SHAPES[name].name for name in SHAPES.builtin] == list(SHAPES.builtin)


# -- packages ------------------------------------------------------------------------------------------------------------


def test_a_package_brings_a_method_and_a_verifier(site: Path) -> None:
    lay_third_party(site)
    assert "echo" in METHODS
    assert "foretell_echo" not in sys.modules, "nothing is imported before it is asked for"
    assert speculative_config("ngram").method == "ngram"
    assert "foretell_echo" not in sys.modules
    found = speculative_config({"method": "echo", "echo_window": 9, "verify": "direct"})
    assert found.resolved()["echo_window"] == 9
    assert found.verifier.name == "direct"
    assert str(METHODS.origin("echo")) == str(VERIFIERS.origin("direct")) == "foretell-echo 1.2.0"
    assert list(METHODS) == [*builtin.CONFIGS, "echo", "linear"]
    with pytest.raises(ConfigError, match=r"unknown key 'echo_windw' .* 'echo_window'"):
        speculative_config({"method": "echo", "echo_windw": 9})
    with pytest.raises(ConfigError, match="echo_window = 'x' must be a whole number"):
        speculative_config({"method": "echo", "echo_window": "x"})
    with pytest.raises(ConfigError, match="cannot grow the shape 'static'"):
        speculative_config({"method": "echo", "shape": "static"})


def test_without_the_package_the_name_is_unknown(site: Path) -> None:
    assert "echo" not in METHODS
    assert METHODS.get("echo") is None
    with pytest.raises(ConfigError, match="'echo' is not a method"):
        speculative_config("echo")


BROKEN: dict[str, tuple[str, str]] = {
    "raises": ("raise RuntimeError('out of order')", r"cannot be imported \(RuntimeError: out of order\)"),
    "imports": ("import a_package_that_is_not_there", "ModuleNotFoundError"),
    "lacks": ("", "AttributeError"),
    "no_config": ("Config = 3", r"expected a subclass of foretell\.MethodConfig"),
    "other_name": (config("another"), "its attribute 'method' is 'another'"),
    "no_load": (config("no_load").split("    def load")[0], "does not define load"),
    "bad_key": (config("bad_key", "    sizes: list = None"), "the type of its key 'sizes' must be bool"),
    "no_field": (config("no_field", "    size: int = 3").replace("@dataclass(frozen=True)", ""), "is not a field"),
    "no_default": (
        config("no_default", "    num_speculative_tokens: int = 99"),
        "defaults do not make a configuration",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_named_and_harms_no_other(site: Path, name: str) -> None:
    source, reason = BROKEN[name]
    lay_third_party(site)
    lay(site, "ill-made", {"foretell.methods": {name: f"ill_{name}:Config"}}, {f"ill_{name}.py": source})
    with pytest.raises(ConfigError, match=rf"method '{name}' of the package ill-made 1\.2\.0 .*{reason}"):
        speculative_config(name)
    with pytest.warns(RuntimeWarning, match=rf"ill-made 1\.2\.0 .*{reason}") as said:
        assert [list(METHODS), list(METHODS)] == [[*builtin.CONFIGS, "echo", "linear"]] * 2
    assert len(said) == 1
    assert METHODS.refused.keys() == {name}
    assert speculative_config("echo").method == "echo"


def test_annotations_may_be_texts(site: Path) -> None:
    source = "from __future__ import annotations\n" + config("late", "    size: int = 3\n    path: str | None = None")
    lay(site, "late", {"foretell.methods": {"late": "late_one:Config"}}, {"late_one.py": source})
    assert speculative_config({"method": "late", "size": 4, "path": "x"}).resolved()["size"] == 4


def test_a_built_in_name_cannot_be_taken(site: Path) -> None:
    lay(site, "grabber", {"foretell.methods": {"ngram": "grabbed:Config"}}, {"grabbed.py": config("ngram")})
    with pytest.warns(RuntimeWarning, match=r"method 'ngram' of the package grabber 1\.2\.0 .*foretell's own"):
        assert list(METHODS) == list(builtin.CONFIGS)
    assert speculative_config("ngram").resolved()["prompt_lookup_max"] == 5
    assert METHODS.origin("ngram") is None
    assert "grabbed" not in sys.modules


def test_of_two_packages_with_one_name_the_second_is_refused_by_name(site: Path) -> None:
    for package in ("first", "second"):
        lay(
            site,
            package,
            {"foretell.methods": {"same": f"{package}_mod:Config"}},
            {f"{package}_mod.py": config("same")},
        )
    with pytest.warns(RuntimeWarning, match=r"of the package second 1\.2\.0 .*first 1\.2\.0 declares the same"):
        assert "same" in list(METHODS)
    assert str(METHODS.origin("same")) == "first 1.2.0"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Rule = 3", "expected a frozen dataclass that is a foretell.Verifier"),
        ("from foretell.verify import Coupled as Rule", "its attribute 'name' is 'coupled'"),
        ("import foretell\nclass Rule(foretell.Verifier):\n    pass", "expected a frozen dataclass"),
        (
            "import dataclasses, foretell\n@dataclasses.dataclass(frozen=True)\nclass Rule(foretell.Verifier):\n    pass",
            "cannot be made without options",
        ),
        (
            "import dataclasses, foretell\n@dataclasses.dataclass(frozen=True)\nclass Rule(foretell.Verifier):\n"
            "    name = 'rule'\n    def stops(self, evidence): ...\n    def residual(self, evidence, walk, at): ...",
            "does not declare exact, draws, summary",
        ),
    ],
)
def test_a_broken_verifier_is_named(site: Path, source: str, reason: str) -> None:
    lay(site, "ill-made", {"foretell.verifiers": {"rule": "ill_rule:Rule"}}, {"ill_rule.py": source})
    with pytest.raises(ConfigError, match=rf"verifier 'rule' of the package ill-made 1\.2\.0 .*{reason}"):
        parse_verifier("rule")
    with pytest.warns(RuntimeWarning, match=reason):
        assert list(VERIFIERS) == list(builtin.VERIFIERS)
    assert parse_verifier("coupled").name == "coupled"


def test_a_shape_of_a_package_is_refused_to_methods_that_do_not_name_it(site: Path) -> None:
    source = (
        "import dataclasses, foretell\n@dataclasses.dataclass(frozen=True)\nclass Twig(foretell.Shape):\n"
        "    name = 'twig'\n    summary = 'a short line'\n    is_chain = True\n"
    )
    keys = '    shape: str = "twig"\n'
    method = config("twigs", keys).replace("draws=False", 'draws=False, shapes=("twig",)')
    lay(
        site,
        "twigs",
        {"foretell.shapes": {"twig": "twigs:Twig"}, "foretell.methods": {"twigs": "twigs:Config"}},
        {"twigs.py": source + method},
    )
    assert speculative_config("twigs").proposal_shape == SHAPES["twig"].__class__(depth=5)
    with pytest.raises(ConfigError, match="method 'draft_model' cannot grow the shape 'twig'"):
        speculative_config({"method": "draft_model", "shape": "twig"})


def test_foretell_methods_lists_packages_and_what_is_not_used(site: Path) -> None:
    lay_third_party(site)
    lay(site, "ill-made", {"foretell.methods": {"ill": "ill_listed:Config"}}, {"ill_listed.py": "raise OSError('no')"})
    mute = (
        "import dataclasses, foretell\n@dataclasses.dataclass(frozen=True)\nclass Mute(foretell.Shape):\n"
        "    name = 'mute'\n"
    )
    lay(site, "mute-shape", {"foretell.shapes": {"mute": "mute_shape:Mute"}}, {"mute_shape.py": mute})
    from foretell.cli.app import app

    found = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert found["methods"]["echo"]["package"] == found["verifiers"]["direct"]["package"] == "foretell-echo 1.2.0"
    assert found["methods"]["ngram"]["package"].startswith("foretell 0.")
    pair = found["pairs"]["echo"]["direct"]
    assert (pair["draws"], pair["exact"], "chain" in pair["refused"]) == ("fixed", True, False)
    assert len(found["not_used"]) == 2
    assert "ill-made 1.2.0" in found["not_used"][0]
    assert "mute-shape 1.2.0 (mute_shape:Mute) is not used: it does not declare summary" in found["not_used"][1]
    shown = CliRunner().invoke(app, ["methods"]).stdout
    assert "foretell-echo" in shown
    assert "ill-made 1.2.0" in shown


# -- values set by hand --------------------------------------------------------------------------------------------------


def test_values_can_be_set_and_deleted() -> None:
    names: Registry[int] = Registry("number", {"one": 1}, "foretell.no_such_group")
    names["two"] = 2
    assert dict(names) == {"one": 1, "two": 2}
    assert len(names) == 2
    names["one"] = 11
    del names["one"], names["two"]
    assert dict(names) == {"one": 1}
    with pytest.raises(KeyError):
        names["two"]


def test_a_head_made_from_another_kind_is_not_written_as_that_kind() -> None:
    """Its method is another one, and that method's drafter must not be given it."""
    from foretell.heads import formats
    from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig

    class Twin(MedusaHead):
        method = "twin"

    head = Twin(MedusaHeadConfig(8, 16, 1, 1, 0, 16, True))
    with pytest.raises(ConfigError, match="no checkpoint layout"):
        formats.default_layout(head)
    assert formats.HEADS["medusa"].suits(head) == "it holds medusa heads, and this is a twin head"
