"""Answers over HTTP in one form, whether they came whole or in a stream, and where one is not the other.

Log probabilities may differ by what rounding in passes of other widths makes of them (TOLERANCE).
"""

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

RESPONSES = "/v1/responses"
TOLERANCE = 2e-3


@dataclass
class Said:
    """One choice, whole."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)  # [name, arguments] of each
    end: str | None = None
    tokens: list[Any] = field(default_factory=list)  # of log probabilities: the token's text, bytes and offset
    values: list[float | None] = field(default_factory=list)
    likeliest: list[dict[str, float] | None] = field(default_factory=list)


@dataclass
class Seen:
    """One answer, in the same form whether it came whole or in a stream."""

    status: int = 200
    refusal: str = ""
    choices: dict[int, Said] = field(default_factory=dict)
    usage: tuple[int, int, int] | None = None  # of prompt, output, both


def add(seen: Seen, part: dict[str, Any]) -> None:
    """A reply, or a chunk of a stream, of the completion routes."""
    if (usage := part.get("usage")) is not None:
        seen.usage = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    for one in part["choices"]:
        said = seen.choices.setdefault(one["index"], Said())
        given = one.get("message") or one.get("delta") or one
        said.text += given.get("content") or given.get("text") or ""
        for at, call in enumerate(given.get("tool_calls") or ()):
            index = call.get("index", at)
            said.calls += [["", ""] for _ in range(index + 1 - len(said.calls))]
            said.calls[index][0] += call["function"].get("name") or ""
            said.calls[index][1] += call["function"].get("arguments") or ""
        said.end = one.get("finish_reason") or said.end
        said.ids += [told["token_id"] for told in one.get("provenance") or ()]
        _add_logprobs(said, one.get("logprobs") or {})


def _add_logprobs(said: Said, told: dict[str, Any]) -> None:
    for one in told.get("content") or ():
        said.tokens.append((one["token"], tuple(one["bytes"] or ())))
        said.values.append(one["logprob"])
        said.likeliest.append({other["token"]: other["logprob"] for other in one["top_logprobs"]})
    if "tokens" in told:
        said.tokens += list(zip(told["tokens"], told["text_offset"], strict=True))
        said.values += told["token_logprobs"]
        said.likeliest += told["top_logprobs"] or [None] * len(told["tokens"])


def add_response(seen: Seen, reply: dict[str, Any]) -> None:
    """A whole response of ``/v1/responses``."""
    said = seen.choices.setdefault(0, Said())
    for item in reply["output"]:
        if item["type"] == "function_call":
            said.calls.append([item["name"], item["arguments"]])
        for piece in item.get("content") or ():
            said.text += piece.get("text", "")
            _add_logprobs(said, {"content": piece.get("logprobs")})
    said.end = json.dumps([reply["status"], reply["incomplete_details"]])
    usage = reply["usage"]
    seen.usage = (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])


async def read(client: httpx.AsyncClient, path: str, body: dict[str, Any], *, stop_after: int = sys.maxsize) -> Seen:
    """The answer to one request. stop_after: hang up after so many chunks of a stream."""
    seen, streamed, num_chunks = Seen(), "", 0
    if not body.get("stream"):
        done = await client.post(path, json=body)
        if done.status_code != 200:
            return _refused(done.status_code, done.text)
        (add_response if path == RESPONSES else add)(seen, done.json())
        return seen
    async with client.stream("POST", path, json=body) as done:
        if done.status_code != 200:
            return _refused(done.status_code, (await done.aread()).decode(errors="replace"))
        async for line in done.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("error"):
                return Seen(int(chunk["error"].get("status") or 500), line)
            if path != RESPONSES:
                add(seen, chunk)
            elif chunk["type"] == "response.output_text.delta":
                streamed += chunk["delta"]
            elif chunk["type"] in ("response.completed", "response.incomplete"):
                add_response(seen, chunk["response"])
            num_chunks += 1
            if num_chunks >= stop_after:
                return seen
    if path == RESPONSES and streamed != seen.choices[0].text:
        seen.refusal = f"the pieces of the stream make {streamed!r}"
    return seen


def _refused(status: int, body: str) -> Seen:
    try:
        return Seen(status, json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return Seen(status, body)


def near(one: float | None, other: float | None) -> bool:
    """Equal up to rounding."""
    return one == other or (one is not None and other is not None and abs(one - other) <= TOLERANCE)


def likeliest_near(one: dict[str, float] | None, other: dict[str, float] | None) -> bool:
    """Equal up to rounding: of two tokens that are as likely either may be the last one that is told."""
    if one is None or other is None:
        return one == other
    if len(one) != len(other) or not all(map(near, sorted(one.values()), sorted(other.values()))):
        return False
    edge = min(one.values(), default=0.0) + TOLERANCE
    return all(near(value, other[token]) if token in other else value <= edge for token, value in one.items())


def difference(plain: Seen, other: Seen, *, whole: bool = True) -> str | None:
    """Where an answer is not plain decoding's (whole False: not a beginning of it), in words; None where it is."""
    if (plain.status, plain.refusal) != (other.status, other.refusal):
        return f"status {other.status} {other.refusal!r:.300} instead of {plain.status} {plain.refusal!r:.300}"
    if whole and plain.choices.keys() != other.choices.keys():
        return f"choices {sorted(other.choices)} instead of {sorted(plain.choices)}"
    for index, got in other.choices.items():
        wanted = plain.choices.get(index, Said())
        if not whole:
            wanted = _beginning(wanted, got)
        for name in ("ids", "text", "calls", "end", "tokens"):
            mine, right = getattr(got, name), getattr(wanted, name)
            if mine != right:
                at = next(
                    (k for k, (a, b) in enumerate(zip(mine or (), right or (), strict=False)) if a != b), "the end"
                )
                return f"choice {index}, {name} from {at} on: {mine!r:.400} instead of {right!r:.400}"
        if not (len(got.values) == len(wanted.values) and all(map(near, got.values, wanted.values))):
            return f"choice {index}, log probabilities: {got.values} instead of {wanted.values}"
        if not all(map(likeliest_near, got.likeliest, wanted.likeliest)):
            return f"choice {index}, likeliest tokens: {got.likeliest} instead of {wanted.likeliest}"
    if other.usage is not None and plain.usage != other.usage:
        return f"usage {other.usage} instead of {plain.usage}"
    return None


def _beginning(wanted: Said, got: Said) -> Said:
    """As much of a choice as was read of another, calls aside."""
    names = ("text", "ids", "tokens", "values", "likeliest")
    cut = {name: getattr(wanted, name)[: len(getattr(got, name))] for name in names}
    return replace(wanted, **cut, calls=got.calls, end=got.end and wanted.end)
