"""``foretell certify --url``: the table, the reports, the exit status, local weights as the reference, the mistakes."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.certify.faulty import faulty
from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line

FAST = ("--limit", 3, "--max-new-tokens", 16, "--skip", "law,calibration", "--skip", "load")
PLAIN = '{"speculative": false}'
UNSEEN = "not certified: neither law nor calibration was looked at"  # as FAST skips both


@pytest.fixture(scope="module")
def right() -> Iterator[str]:
    with faulty() as url:
        yield url


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\nfour\nfive\n")
    return file


def test_a_right_server(invoke: Invoke, right: str, prompts: Path) -> None:
    result = invoke("certify", "--url", right, "--plain", PLAIN, "--prompts", prompts, *FAST)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.strip().splitlines()[-1].startswith(UNSEEN)
    for part in ("greedy", "penalties", "Reference", "3, up to 16 tokens", "with {'speculative': False}"):
        assert part in result.stdout


def test_a_fault_is_status_1_and_named_in_every_report(invoke: Invoke, prompts: Path, tmp_path: Path) -> None:
    made = tmp_path / "a.json"
    with faulty("guesses_unchecked") as url:
        args = ("certify", "--url", url + "/v1", "--plain", PLAIN, "--prompts", prompts, *FAST)
        result = invoke(*args, "--json", "-o", made)
        shown = invoke(*args)
    assert (result.exit_code, shown.exit_code) == (1, 1)
    found = json.loads(result.stdout)
    assert json.loads(made.read_text()) == found
    assert [fault["name"] for fault in found["faults"]] == ["unverified tokens"]
    assert found["verdict"] == shown.stdout.strip().splitlines()[-1] == "DEFECT: unverified tokens"
    assert "DEFECT: greedy: prompt 0" in shown.stdout


def test_against_another_server_or_none(invoke: Invoke, right: str, prompts: Path) -> None:
    with faulty("other_weights") as url:
        result = invoke("certify", "--url", url, "--reference-url", right, "--prompts", prompts, *FAST)
    assert result.stdout.strip().splitlines()[-1] == "DEFECT: another model"
    alone = invoke("certify", "--url", right, "--prompts", prompts, *FAST)
    assert alone.exit_code == 1
    assert alone.stdout.strip().splitlines()[-1].startswith(UNSEEN)


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="without the extra 'serve'")
def test_our_own_server_against_itself_and_against_weights(
    invoke: Invoke, models: dict[str, Path], prompts: Path
) -> None:
    from foretell import Engine
    from foretell.server.run import bind, in_thread, url_of
    from foretell.service.service import Service, ServiceOptions

    engine = Engine.load(
        str(models["target"]), implementation="lean",
        speculative={"method": "draft_model", "model": str(models["draft"])},
    )  # fmt: skip
    service = Service(engine, ServiceOptions(speculation="on", kv_memory_gib=0.1))
    args = ("--prompts", prompts, *FAST, "--temperature", "0")
    with bind("127.0.0.1", 0) as made, in_thread(service, made):
        url = url_of(made)
        own = invoke("certify", "--url", url, *args)
        weights = invoke("certify", "--url", url, "--target", models["target"], "--implementation", "lean", *args)
        stranger = invoke("certify", "--url", url, "--target", models["stranger"], "--implementation", "lean", *args)
    assert all(one.stdout.strip().splitlines()[-1].startswith(UNSEEN) for one in (own, weights))
    assert "with {'speculative': False}" in own.stdout
    assert (own.exit_code, weights.exit_code, stranger.exit_code) == (1, 1, 1)
    assert stranger.stdout.strip().splitlines()[-1].startswith("DEFECT: another model")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--plain", PLAIN], "--plain is for --url URL"),
        (["--samples", "100"], "--samples is for --url URL"),
        (["--url", "here"], "'here' is not a URL of a server"),
        (["--url", "http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9/v1"),
        (["--url", "http://127.0.0.1:9", "--verify", "coupled"], "--verify is of models that run here"),
        (["--url", "http://127.0.0.1:9", "--dtype", "bfloat16"], "--dtype is of --target"),
        (["--url", "http://127.0.0.1:9", "--plain", PLAIN, "--reference-url", "http://127.0.0.1:9"], "keep one"),
        (
            ["--url", "http://127.0.0.1:9", "--reference-model", "x"],
            "--reference-model is the model of --reference-url",
        ),
        (["--url", "http://127.0.0.1:9", "--samples", "3"], "--samples 3 must be at least 20"),
        (["--url", "http://127.0.0.1:9", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--url", "http://127.0.0.1:9", "--false-alarms", "2"], "--false-alarms 2.0 must lie between 0 and 1"),
        (["--url", "http://127.0.0.1:9", "--timeout", "0"], "--timeout 0.0 must be positive"),
        (["--url", "http://127.0.0.1:9", "--tolerance", "-1"], "--tolerance -1.0 must not be negative"),
        (["--url", "http://127.0.0.1:9", "--max-new-tokens", "4"], "--max-new-tokens 4 must be at least 8"),
        (["--url", "http://127.0.0.1:9", "--skip", "gready"], "--skip gready is not a check; known: greedy"),
        (["--url", "http://127.0.0.1:9", "--api", "soap"], "api 'soap' is not known"),
        (["--url", "http://127.0.0.1:9", "--plain", "[]"], "--plain must be a JSON object"),
    ],
)
def test_mistakes(invoke: Invoke, args: list[str], said: str) -> None:
    result = invoke("certify", *args)
    assert said in one_line(result.stderr)
    assert (result.exit_code, result.stdout) == (2, "")
