"""``examples/clients.py``: every client that is installed gets the same text under the same seed."""

import importlib.util
from pathlib import Path

import pytest

from tests.server.fake import EOS, FakeService
from tests.server.live import live

FILE = Path(__file__).resolve().parents[2] / "examples" / "clients.py"


@pytest.mark.parametrize("same", [True, False])
def test_all_say_the_same(same: bool, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    from foretell.server.app import build_app

    spec = importlib.util.spec_from_file_location("clients", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    service = FakeService(lambda sent: [*f"Red {sent.params.seed if same else 'of ' + sent.request_id}".encode(), EOS])
    with live(build_app(service)) as url:
        status = module.main(url)
    assert (status == 0) is same
    told = capsys.readouterr().out
    assert len(told.splitlines()) == len(module.CLIENTS)
    assert ("Red 1" in told) is same
