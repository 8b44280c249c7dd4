"""An agent's session against running servers: what of each turn's prompt is read again, and how long a turn takes to begin.

    python -m benchmarks.agent --server ours=http://127.0.0.1:8000 --server llama.cpp=http://127.0.0.1:8080
                               [--turns 20] [--tokens 16000] [--agents 1] [--out FILE]

A coding agent's conversation over OpenAI's /v1/chat/completions: a system text and a list of tools, a task, and then turns
in which the model must call a tool and gets a file's text as its result, until the prompt has about ``--tokens`` tokens.
The model's own calls go back as the client would send them, so each server has the session that its model makes; a tool's
parameters keep calls short. ``--agents`` sessions run at once, with one system text and tasks of their own.

Of each turn: tokens of the prompt, tokens that the server says it did not read (OpenAI's ``cached_tokens``, llama.cpp's
``cache_n``), seconds to the first piece of the answer. Counts do not depend on how busy the machine is. Servers take turns,
turn by turn. ``same`` is how many of a server's calls are those of the first server: of two with the same arithmetic, such
as one with and one without reuse, all. Every answer is a call from its first token to its last: ``tokens in calls`` are all
that were written, and ``passes`` those less the guesses that were kept.
"""

import argparse
import inspect
import json
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks.servers import model_of

SOURCES = (
    "argparse",
    "tarfile",
    "inspect",
    "logging",
    "typing",
    "pathlib",
    "subprocess",
    "threading",
    "zipfile",
    "shutil",
)
VERBS = ("read", "search", "list", "write", "replace", "run", "test", "format", "fetch", "plan", "diff", "review")
CHARACTERS = 4  # of a token of source code, about


@dataclass
class Turn:
    """What one request took."""

    prompt: int = 0
    cached: int = 0
    first_s: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    accepted: int = 0
    call: str = ""


@dataclass
class Session:
    """One conversation with one server."""

    url: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)

    def turn(self, result: str) -> None:
        """One request; its call and the result that follows join the conversation."""
        done, calls, text = Turn(), dict[int, dict[str, str]](), ""
        choice = {"type": "function", "function": {"name": "read_file"}}
        body = {
            "model": self.model, "messages": self.messages, "tools": self.tools, "tool_choice": choice, "stream": True,
            "temperature": 0, "max_tokens": 128, "stream_options": {"include_usage": True}, "seed": 1,
            "include_metrics": True,
        }  # fmt: skip
        place, begun = urlsplit(self.url), perf_counter()
        connection = HTTPConnection(place.hostname or "", place.port, timeout=1200)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{self.url}: HTTP {answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for one in event.get("choices", ()):
                text += one["delta"].get("content") or ""
                for call in one["delta"].get("tool_calls") or ():
                    known = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                    known["id"] += call.get("id") or ""
                    known["name"] += call["function"].get("name") or ""
                    known["arguments"] += call["function"].get("arguments") or ""
                if (text or calls) and not done.first_s:
                    done.first_s = perf_counter() - begun
            if usage := event.get("usage"):
                done.prompt = usage["prompt_tokens"]
                done.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                done.tokens = usage["completion_tokens"]
            if figures := event.get("metrics"):
                done.accepted = figures["speculative_decoding"]["num_accepted_draft_tokens"]
            if timings := event.get("timings"):
                done.cached = timings.get("cache_n", done.cached)
                done.accepted = timings.get("draft_n_accepted", 0)
        connection.close()
        done.seconds = perf_counter() - begun
        done.call = json.dumps([[one["name"], one["arguments"]] for one in calls.values()])
        self.turns.append(done)
        made = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in calls.values()
        ]
        self.messages.append({"role": "assistant", "content": text or None, **({"tool_calls": made} if made else {})})
        if made:
            self.messages += [{"role": "tool", "tool_call_id": one["id"], "content": result} for one in made]
        else:
            self.messages.append({"role": "user", "content": result})


def tools_of() -> list[dict[str, Any]]:
    """A dozen tools, as long as an agent's: the first is the one that is called."""
    files = {"type": "string", "enum": [f"src/{name}.py" for name in SOURCES], "description": "The file's path."}
    why = {"type": "string", "maxLength": 60, "description": "Why, in a few words."}
    first = {"path": files, "lines": {"type": "string", "enum": ["all", "first", "last"]}, "why": why}
    made = [("read_file", "Read a file of the project.", first)]
    for verb in VERBS:
        told = f"Use it to {verb} what the user asks about. " * 8
        names = {f"{verb}_{index}": {"type": "string", "description": told[:160]} for index in range(4)}
        made.append((f"{verb}_project", told, names))
    return [
        {"type": "function", "function": {"name": name, "description": told, "parameters": {
            "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        }}}
        for name, told, properties in made
    ]  # fmt: skip


def results(agent: int, turns: int, tokens: int) -> list[str]:
    """What tools give back: pieces of source code, new in each turn."""
    text = "\n".join(inspect.getsource(__import__(name)) for name in SOURCES)
    rng, size = random.Random(agent), max(200, tokens // turns * CHARACTERS)
    return [text[at : at + size] for at in (rng.randrange(len(text) - size) for _ in range(turns))]


def begin(url: str, model: str, agent: int) -> Session:
    """A new session."""
    rules = "\n".join(f"{index}. {verb.capitalize()} only what the task needs, and say what you found." for index, verb in
                      enumerate(VERBS * 6, 1))  # fmt: skip
    system = f"You are a coding agent in a terminal. You call one tool in each turn.\n{rules}"
    task = f"Task {agent}: find out how errors are told to users in this project, file by file."
    return Session(url, model, [{"role": "system", "content": system}, {"role": "user", "content": task}], tools_of())


def report(name: str, sessions: Sequence[Session], first: Sequence[Session]) -> dict[str, Any]:
    """A server's line, and its turns."""
    later = [turn for session in sessions for turn in session.turns[1:]]
    calls = [[turn.call for turn in session.turns] for session in sessions]
    theirs = [[turn.call for turn in session.turns] for session in first]
    before = [turn for session in sessions for turn in session.turns[:-1]]
    tokens = sum(turn.tokens for session in sessions for turn in session.turns)
    passes = tokens - sum(turn.accepted for session in sessions for turn in session.turns)
    return {
        "server": name,
        "prompt tokens at the end": max(turn.prompt for turn in later),
        "read": sum(turn.prompt - turn.cached for session in sessions for turn in session.turns),
        "reused of the prompt before": round(min(b.cached / a.prompt for a, b in zip(before, later, strict=True)), 4),
        "reused of each prompt": [round(min(r), 3) for r in zip(*[
            [turn.cached / max(turn.prompt, 1) for turn in session.turns[1:]] for session in sessions], strict=True)],
        "tokens in calls": tokens,
        "passes": passes,
        "tokens a pass": round(tokens / max(passes, 1), 2),
        "first piece, s, median": round(statistics.median(turn.first_s for turn in later), 3),
        "first piece, s, most": round(max(turn.first_s for turn in later), 3),
        "whole session, s": round(max(sum(turn.seconds for turn in session.turns) for session in sessions), 1),
        "same": f"{sum(a == b for x, y in zip(calls, theirs, strict=True) for a, b in zip(x, y, strict=True))} of "
                f"{sum(map(len, calls))}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, help="NAME=URL")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the turns, as JSON")
    args = parser.parse_args()
    servers = dict(text.split("=", 1) for text in args.server)
    sessions = {
        name: [begin(url, model_of(url), agent) for agent in range(args.agents)] for name, url in servers.items()
    }
    front = sum(len(json.dumps(one)) for one in (begin("", "", 0).messages, tools_of())) // CHARACTERS
    given = [results(agent, args.turns, args.tokens - front) for agent in range(args.agents)]
    for turn in range(args.turns):
        for name in servers:
            with ThreadPoolExecutor(args.agents) as pool:
                list(
                    pool.map(
                        lambda pair, turn=turn: pair[0].turn(pair[1][turn]), zip(sessions[name], given, strict=True)
                    )
                )
    first = next(iter(sessions.values()))
    for name, own in sessions.items():
        print(json.dumps(report(name, own, first), indent=1))
    if args.out is not None:
        turns = {name: [[vars(turn) for turn in one.turns] for one in own] for name, own in sessions.items()}
        args.out.write_text(json.dumps(turns, indent=1))


if __name__ == "__main__":
    main()
