"""``foretell report``: options that would be ignored beside each other are refused, before any file is read."""

import pytest

from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line


@pytest.mark.parametrize("more", [["--json"], ["--html", "page.html"], ["--csv", "-"]])
def test_the_command_is_printed_alone(invoke: Invoke, more: list[str]) -> None:
    result = invoke("report", "absent.json", "--command", *more)
    assert result.exit_code == 2
    assert "--command prints the command alone" in one_line(result.stderr)


def test_two_reports_are_compared_and_nothing_else(invoke: Invoke) -> None:
    result = invoke("report", "a.json", "b.json", "--command")
    assert result.exit_code == 2
    assert "two reports are compared" in one_line(result.stderr)
