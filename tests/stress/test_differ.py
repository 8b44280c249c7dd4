"""Random requests by every method, whole and streamed, against plain decoding of the same server."""

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretell import Engine, Service, ServiceOptions
from foretell.server.app import build_app
from tests.server.live import live
from tests.stress import differ, minutes


@pytest.fixture
def url() -> Iterator[str]:
    """A server in this process, whose code may be a planted bug's."""
    engine = Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 4})
    service = Service(engine, ServiceOptions(speculation="on", max_num_seqs=8, max_model_len=1000))
    service.start()
    with live(build_app(service)) as address:
        yield address
    service.close()


def run(url: str, *arguments: object) -> int:
    return differ.main(["--url", url, *map(str, arguments)])


def test_a_few_requests(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, "--requests", 4, "--seed", 12) == 0
    assert '"seed": 12' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_differ(seed: int) -> None:
    assert differ.main(["--minutes", str(minutes(0.2)), "--seed", str(seed)]) == 0


@pytest.mark.parametrize("spoilt", ["ids", "text", "calls", "end", "values", "likeliest", "usage", "status"])
def test_control_what_differs_is_found_and_the_seed_is_told(
    spoilt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def read(client: Any, path: str, body: dict[str, Any]) -> differ.Seen:
        said = differ.Said("ab", [1, 2], [["f", "{}"]], "stop", ["a", "b"], [-0.5, -1.0], [{"a": -0.5}, {"b": -1.0}])
        seen = differ.Seen(choices={0: said}, usage=(1, 2, 3))
        if body.get("speculative") == {"method": "ngram"}:
            if spoilt in ("usage", "status"):
                setattr(seen, spoilt, (1, 3, 4) if spoilt == "usage" else 500)
            else:
                value = {"text": "ba", "end": "length", "values": [-0.5, -1.1]}.get(spoilt, [])
                setattr(said, spoilt, [{"a": -0.5}, {"c": -0.5}] if spoilt == "likeliest" else value)
        return seen

    monkeypatch.setattr(differ, "read", read)
    tally, client = differ.Tally(), httpx.AsyncClient()
    ask = differ.Ask(differ.TEXT, {"prompt": "a"}, {})
    asyncio.run(differ.compare(client, ask, 3, ["none", "suffix", "ngram"], 7, tally))
    assert [line.partition(": ")[0] for line in tally.wrong] == [
        f"--seed 7 --only 3, /v1/completions, ngram, {how}" for how in ("whole", "streamed")
    ]
    assert differ.judged(tally, argparse.Namespace(seed=7)) == 1
    assert tally.wrong[0] in capsys.readouterr().out


def test_requests_are_a_function_of_the_seed_and_have_every_parameter() -> None:
    asks = [differ.request(1, number, "toy", 8192) for number in range(300)]
    assert asks == [differ.request(1, number, "toy", 8192) for number in range(300)]
    assert asks[:20] != [differ.request(2, number, "toy", 8192) for number in range(20)]
    names = {name for ask in asks for name in ask.body}
    assert names >= {
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens", "max_output_tokens", "n",
        "logprobs", "top_logprobs", "echo", "seed", "stream_options", "response_format", "regex", "grammar", "tools",
        "tool_choice", "continue_final_message", "provenance",
    }  # fmt: skip
