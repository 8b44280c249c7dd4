"""Other clients against our server: those that are installed where FORETELL_CLIENTS_PYTHON and FORETELL_CLIENTS_NODE say.

Without these only OpenAI's own client is tried, which the tests need anyway. What the others send is checked without them
in tests/server/test_lenient.py.
"""

import argparse
import os
import sys
from collections.abc import Iterator

import pytest

from tests.stress import clients
from tests.stress.served import Served, served

WHERE = (os.environ.get("FORETELL_CLIENTS_PYTHON", sys.executable), os.environ.get("FORETELL_CLIENTS_NODE"))


@pytest.fixture(scope="module")
def ours() -> Iterator[Served]:
    with served(argparse.Namespace(url=None, serve_args="--speculation on --kv-memory-gib 0.25")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", [*clients.PYTHON, *clients.NODE])
def test_a_client_keeps_up_a_conversation(ours: Served, name: str) -> None:
    if (why := clients.missing(name, *WHERE)) is not None:
        pytest.skip(why)
    check = clients.talk(name, ours.url, "bundled", *WHERE)
    assert check.ok, check.said


def test_a_client_that_is_absent_is_named() -> None:
    assert "no --node" in str(clients.missing("openai-node", sys.executable, None))
    assert "has no openai: npm install" in str(clients.missing("openai-node", sys.executable, "/nowhere"))
    assert clients.missing("openai", sys.executable, None) is None


def test_control_a_client_that_fails_is_told() -> None:
    check = clients.talk("openai", "http://127.0.0.1:9", "bundled", sys.executable, None)
    assert not check.ok
    assert "Error" in check.said
