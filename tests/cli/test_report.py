"""``foretell report``: options that would be ignored, and files that cannot be written, are refused before any file is
read."""

import pytest

from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line


@pytest.mark.parametrize("more", [["--json"], ["--csv", "-"]])
def test_the_command_is_printed_alone(invoke: Invoke, more: list[str]) -> None:
    result = invoke("report", "absent.json", "--command", *more)
    assert result.exit_code == 2
    assert "--command prints the command alone" in one_line(result.stderr)


def test_standard_output_holds_one_thing(invoke: Invoke) -> None:
    result = invoke("report", "absent.json", "--csv", "-", "--json")
    assert result.exit_code == 2
    assert "--csv - and --json both print to standard output" in one_line(result.stderr)


def test_two_reports_are_compared_and_nothing_else(invoke: Invoke) -> None:
    result = invoke("report", "a.json", "b.json", "--command")
    assert result.exit_code == 2
    assert "two reports are compared" in one_line(result.stderr)


@pytest.mark.parametrize(("option", "file"), [("--csv", "no/such/x.csv")])
def test_a_file_that_cannot_be_written_is_named_with_its_option(invoke: Invoke, option: str, file: str) -> None:
    result = invoke("report", "absent.json", option, file)
    assert result.exit_code == 2
    assert f"{option} {file!r} cannot be written" in one_line(result.stderr)
