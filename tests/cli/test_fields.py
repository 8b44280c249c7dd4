"""Options made from a dataclass: one for each field, and what was given reaches the command under the field's name."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from foretoken.cli.fields import option_name, with_fields
from foretoken.train.config import TrainConfig
from tests.cli.conftest import Invoke


@dataclass
class Settings:
    size: int = field(default=3, metadata={"help": "How large."})
    kind: str | None = field(default=None, metadata={"help": "Which.", "told": "by size", "option": "--of-kind"})
    rate: float = field(default=0.5, metadata={"help": "How fast.", "envvar": "FORETOKEN_TEST_RATE", "metavar": "R"})


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
    ],
)
def test_what_was_given_is_told_by_field(args: list[str], given: dict[str, Any]) -> None:
    app, seen = command()
    result = CliRunner().invoke(app, ["x", "--loud", *args])
    assert result.exit_code == 0, result.output
    assert seen == [("x", given, True)]


def test_environment_and_mistakes() -> None:
    app, seen = command()
    assert CliRunner().invoke(app, ["x"], env={"FORETOKEN_TEST_RATE": "0.25"}).exit_code == 0
    assert seen == [("x", {"rate": 0.25}, False)]
    assert CliRunner().invoke(app, ["x", "--size", "many"]).exit_code == 2


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


def test_train_has_an_option_for_every_setting(invoke: Invoke) -> None:
    told = invoke("train", "--help", env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    for item in dataclasses.fields(TrainConfig):
        assert f"{option_name(TrainConfig, item.name)} " in told
        assert item.metadata["help"].split(".")[0] in told
