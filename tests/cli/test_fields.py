"""Options made from a dataclass: one for each field, and what was given reaches the command under the field's name."""

import ast
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from foretell.cli import options
from foretell.cli.fields import option_name, with_fields, with_group
from foretell.core.params import SamplingParams
from foretell.core.settings import setting
from foretell.server.options import ServerOptions
from foretell.service.options import ServiceOptions
from foretell.train.config import TrainConfig
from tests.cli.conftest import Invoke


@dataclass
class Settings:
    size: int = field(default=3, metadata={"help": "How large."})
    kind: str | None = field(
        default=None, metadata={"help": "Which.", "default_text": "by size", "option": "--of-kind"}
    )
    rate: float = field(default=0.5, metadata={"help": "How fast.", "envvar": "FORETELL_TEST_RATE", "metavar": "R"})
    quick: bool = setting(False, "Hurry.")
    careful: bool = setting(True, "Take risks.", option="--no-careful")
    names: tuple[str, ...] = setting((), "Who.", option="--called")
    weights: Mapping[int, float] = setting(dict, "How heavy.", metavar="JSON")
    least: float | None = setting(None, "At least.", min=0)
    inner: list[int] = field(default_factory=list)  # without help: no option


def command() -> tuple[typer.Typer, list[tuple[Any, ...]]]:
    seen: list[tuple[Any, ...]] = []
    app = typer.Typer()

    @app.command()
    @with_fields(Settings, into="given", panel="Settings")
    def run(name: str, given: dict[str, Any], loud: bool = False) -> None:
        """Run it."""
        seen.append((name, given, loud))

    return app, seen


@pytest.mark.parametrize(
    ("args", "given"),
    [
        ([], {}),
        (["--size", "7", "--of-kind", "a"], {"size": 7, "kind": "a"}),
        (["--rate", "1"], {"rate": 1.0}),
        (["--size", "3"], {"size": 3}),  # given, though it is the default
        (["--quick", "--no-careful"], {"quick": True, "careful": False}),
        (["--called", "a", "--called", "b"], {"names": ("a", "b")}),
        (["--weights", '{"1": 2}'], {"weights": '{"1": 2}'}),
        (["--least", "0"], {"least": 0.0}),
    ],
)
def test_what_was_given_is_told_by_field(args: list[str], given: dict[str, Any]) -> None:
    app, seen = command()
    result = CliRunner().invoke(app, ["x", "--loud", *args])
    assert result.exit_code == 0, result.output
    assert seen == [("x", given, True)]


def test_environment_and_mistakes() -> None:
    app, seen = command()
    assert CliRunner().invoke(app, ["x"], env={"FORETELL_TEST_RATE": "0.25"}).exit_code == 0
    assert seen == [("x", {"rate": 0.25}, False)]
    for wrong in (["--size", "many"], ["--least", "-1"], ["--inner", "1"]):
        assert CliRunner().invoke(app, ["x", *wrong]).exit_code == 2


def test_help_is_the_fields_own() -> None:
    told = CliRunner().invoke(command()[0], ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for part in ("Run it.", "--size", "How large. Default: 3.", "--of-kind", "Which. Default: by size.", "Settings"):
        assert part in told
    assert option_name(Settings, "kind") == "--of-kind"


def test_a_field_that_cannot_be_an_option_is_refused() -> None:
    @dataclass
    class Odd:
        parts: list[int] = field(default_factory=list, metadata={"help": "Which."})

    with pytest.raises(TypeError, match="no option can be made"):
        with_fields(Odd, into="given", panel="x")


@pytest.mark.parametrize(
    ("command", "kind", "without"),
    [
        ("train", TrainConfig, set()),
        ("generate", SamplingParams, {"banned_token_ids", "stop_token_ids", "logits_processor"}),
        ("serve", ServiceOptions, {"cost_time_limit_s", "models_at_once"}),
        (
            "serve",
            ServerOptions,
            {
                "max_choices",
                "header_timeout_s",
                "body_timeout_s",
                "write_timeout_s",
                "keepalive_s",
                "include_metrics",
            },
        ),
    ],
)
def test_commands_have_an_option_for_every_setting(invoke: Invoke, command: str, kind: Any, without: set[str]) -> None:
    told = invoke(command, "--help", env={"COLUMNS": "300", "TERM": "dumb"}).stdout
    for item in dataclasses.fields(kind):
        assert (f"{option_name(kind, item.name)} " in told) == (item.name not in without), item.name
        assert item.name in without or item.metadata["help"].split(".")[0] in told


def test_what_fields_say_of_their_options_is_read() -> None:
    """A misspelt key of a field's metadata would be ignored, and its help would lose what it says."""
    known = {"help", "option", "metavar", "envvar", "panel", "min", "default_text"}
    for kind in (ServiceOptions, ServerOptions, SamplingParams, TrainConfig):
        for item in dataclasses.fields(kind):
            assert set(item.metadata) <= known, f"{kind.__name__}.{item.name}: {set(item.metadata) - known}"


@dataclass(frozen=True)
class Group:
    place: Annotated[str, typer.Option("--place", envvar="FORETELL_TEST_PLACE", help="Where.")] = "here"
    depth: Annotated[int, typer.Option("--depth", min=1, help="How deep.")] = 2
    wide: Annotated[bool, typer.Option("--wide", help="Wide.")] = False


def grouped(without: tuple[str, ...] = (), **defaults: Any) -> tuple[typer.Typer, list[tuple[Any, ...]]]:
    seen: list[tuple[Any, ...]] = []
    app = typer.Typer()

    @app.command()
    @with_group(Group, into="group", without=without, **defaults)
    @with_fields(Settings, into="given", panel="Settings")
    def run(ctx: typer.Context, *, name: str, group: Group, given: dict[str, Any], loud: bool = False) -> None:
        """Run it."""
        seen.append((name, group, given, loud, ctx.params.get("depth")))

    return app, seen


def test_a_group_reaches_the_command_whole() -> None:
    app, seen = grouped()
    assert CliRunner().invoke(app, ["x"]).exit_code == 0
    assert CliRunner().invoke(app, ["x", "--depth", "5", "--wide", "--size", "7", "--loud"]).exit_code == 0
    assert CliRunner().invoke(app, ["x"], env={"FORETELL_TEST_PLACE": "there"}).exit_code == 0
    assert seen == [
        ("x", Group(), {}, False, 2),
        ("x", Group("here", 5, True), {"size": 7}, True, 5),
        ("x", Group("there"), {}, False, 2),
    ]
    for wrong in (["--depth", "0"], ["--depth", "many"], ["--deep", "1"]):
        assert CliRunner().invoke(app, ["x", *wrong]).exit_code == 2


def test_a_command_may_leave_options_out_and_have_its_own_defaults() -> None:
    app, seen = grouped(without=("wide",), place="there")
    assert CliRunner().invoke(app, ["x"]).exit_code == 0
    assert seen == [("x", Group("there"), {}, False, 2)]
    assert CliRunner().invoke(app, ["x", "--wide"]).exit_code == 2
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert "[default: there]" in told
    assert "--wide" not in told


def test_a_group_keeps_the_place_of_its_parameter() -> None:
    told = CliRunner().invoke(grouped()[0], ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    places = [told.index(word) for word in ("--place", "--depth", "--wide", "--loud")]
    assert places == sorted(places)


def test_a_group_with_a_wrong_name_is_refused() -> None:
    with pytest.raises(TypeError, match="Group has no field 'deep'; it has place, depth, wide"):
        grouped(deep=3)
    with pytest.raises(TypeError, match="Group has no field 'large'"):
        grouped(without=("large",))
    with pytest.raises(TypeError, match="f has no parameter 'group'; it has name"):

        @with_group(Group, into="group")
        def f(name: str) -> None:
            pass


def test_every_command_has_the_same_default_target() -> None:
    """train and certify took the bundled model where generate took the one that was pulled."""
    from foretell.cli.app import app
    from foretell.cli.commands.serve import _named
    from foretell.cli.options import AUTO, chosen_target, default_target

    found = {}
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for parameter in command.params:
            if parameter.name == "target" and name != "export":  # a head's own
                found[name] = (parameter.default, parameter.callback is not None)
    assert {*found} >= {
        "generate",
        "chat",
        "serve",
        "bench",
        "doctor",
        "train",
        "certify",
        "explain",
        "learn",
    }
    # serve has a list, which is empty where a folder of models is given.
    assert found.pop("serve") == (None, True)
    assert [*_named([chosen_target(AUTO)]).values()] == [default_target()]
    assert set(found.values()) == {(AUTO, True)}, found
    assert chosen_target("x") == "x"


def test_each_shared_option_is_declared_once() -> None:
    """By its help: where a command declares an option of a group anew, it is another option or a copy that drifts."""
    told: dict[str, set[str]] = {}
    for path in sorted(Path(options.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option":
                (text,) = [word.value for word in node.keywords if word.arg == "help"] or [None]
                if text is not None:
                    told.setdefault(ast.unparse(node.args[0]) + ast.unparse(text), set()).add(
                        f"{path.name}:{node.lineno}"
                    )
    assert len(told) > 50
    assert [places for places in told.values() if len(places) > 1] == []
