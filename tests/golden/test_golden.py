"""The same seeds give the same tokens as when ``requests.json`` was made: 194 requests over methods, shapes and rules."""

import json
from collections import Counter
from typing import Any

import pytest

from foretell import METHODS, SHAPES, VERIFIERS, speculative_config
from tests.golden import make
from tests.golden.make import NUM_REQUESTS, PATH
from tests.golden.replay import Group, alone, replay

GROUPS: list[Group] = json.loads(PATH.read_text())
SAMPLE = [
    group
    for index, group in enumerate(GROUPS)
    if index % 4 == 0
    or group["door"] in ("batch:8", "stream")
    or (group["door"], group["world"]) == ("service", "table")
]
"""What the default run replays: every fourth group, and the doors that few groups go through."""


def differences(group: Group, found: list[list[int]]) -> list[str]:
    """One line for each request whose tokens are others, with the first position that differs."""
    lines = []
    for number, (request, tokens) in enumerate(zip(group["requests"], found, strict=True)):
        wanted = request["tokens"]
        if tokens != wanted:
            pairs = enumerate(zip(tokens, wanted, strict=False))
            first = next((at for at, (one, two) in pairs if one != two), min(len(tokens), len(wanted)))
            lines.append(
                f"{group['id']}: request {number}, {request['params']}: token {first} is {tokens[first : first + 1]}, "
                f"was {wanted[first : first + 1]} ({len(tokens)} tokens, were {len(wanted)})"
            )
    return lines


@pytest.mark.parametrize("group", SAMPLE, ids=lambda group: group["id"])
def test_a_sample_gives_the_same_tokens(group: Group) -> None:
    assert differences(group, replay(group)) == []


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["id"])
def test_every_request_gives_the_same_tokens_in_company_and_alone(group: Group) -> None:
    if group not in SAMPLE:  # in company those are replayed by the default run
        assert differences(group, replay(group)) == []
    assert differences(group, alone(group)) == []


def test_a_difference_is_told_with_its_position() -> None:
    group: Group = {"id": "g", "requests": [{"params": {}, "tokens": [1, 2, 3]}, {"params": {}, "tokens": [4]}]}
    assert differences(group, [[1, 2, 3], [4]]) == []
    assert "token 1 is [9], was [2]" in differences(group, [[1, 9, 3], [4]])[0]
    assert "token 2 is [], was [3]" in differences(group, [[1, 2], [4]])[0]


def test_making_it_anew_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make"])
    monkeypatch.setattr(make, "decide", lambda maker, group: pytest.fail("nothing is replayed"))
    before = PATH.read_bytes()
    with pytest.raises(SystemExit, match="--overwrite"):
        make.main()
    assert PATH.read_bytes() == before


def test_the_file_covers_what_can_be_asked_for() -> None:
    requests = [request for group in GROUPS for request in group["requests"]]
    assert 150 < len(requests) <= NUM_REQUESTS  # those of rules that are gone went with them
    ways = [
        speculative_config(one.get("speculative", group["speculative"]))
        for group in GROUPS
        for one in group["requests"]
    ]
    # An MTP module is none of the bundled heads, and hybrid's guesses are those of the two methods in it.
    assert {way.method for way in ways} == set(METHODS) - {"mtp", "hybrid"}
    assert {way.verifier.name for way in ways} == set(VERIFIERS)
    assert {way.proposal_shape.name for way in ways} == set(SHAPES)
    temperatures = Counter(request["params"].get("temperature", 1.0) for request in requests)
    assert min(temperatures[value] for value in (0.0, 0.7, 1.0)) >= 35
    doors: Counter[Any] = Counter()
    for group in GROUPS:
        doors[group["door"].partition(":")[0]] += len(group["requests"])
    assert min(doors[door] for door in ("generate", "batch")) >= 20
    assert doors["service"] >= 35
    assert sum(len(request["tokens"]) for request in requests) > 10 * NUM_REQUESTS
