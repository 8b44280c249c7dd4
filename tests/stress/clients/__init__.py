"""Clients as users have them, in a conversation of several turns with a tool, against a server.

``python -m tests.stress.clients --python VENV/bin/python --node DIRECTORY``: the Python clients (openai, litellm,
langchain-openai) are those of that Python, the JavaScript ones (openai, ai, @ai-sdk/openai, @ai-sdk/openai-compatible) are
in the directory's node_modules. Each makes a call, sends its own reply and the tool's result back, gets a text, sends that
back too and asks again; all of it once whole and once streamed. A client that is not installed is skipped, with the reason.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.stress.clients.talk import CLIENTS
from tests.stress.served import Check, add_options, report, served

HERE = Path(__file__).parent
TIMEOUT_S = 180.0
PYTHON = {name: [name.partition(" ")[0].replace("-", "_")] for name in CLIENTS}
"""By client: the modules it needs."""
NODE = {
    "openai-node": ["openai"],
    "AI SDK, openai-compatible": ["ai", "@ai-sdk/openai-compatible"],
    "AI SDK, openai": ["ai", "@ai-sdk/openai"],
}


def missing(name: str, python: str, node: str | None) -> str | None:
    """Why a client cannot be tried; None where it can."""
    if name in PYTHON:
        (module,) = PYTHON[name]
        look = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({module!r}) is None)"
        found = subprocess.run([python, "-c", look], capture_output=True, timeout=TIMEOUT_S)
        return None if found.returncode == 0 else f"{python} has no {module}: pip install it, or give --python"
    if node is None:
        return "no --node DIRECTORY is given, with " + ", ".join(NODE[name]) + " in its node_modules"
    absent = [module for module in NODE[name] if not (Path(node) / "node_modules" / module).is_dir()]
    return f"{node}/node_modules has no {', '.join(absent)}: npm install it there" if absent else None


def talk(name: str, url: str, model: str, python: str, node: str | None) -> Check:
    """One client in its conversation, as a process of its own."""
    script = [python, str(HERE / "talk.py")] if name in PYTHON else ["node", str(HERE / "talk.mjs")]
    command = [*script, name, url, model, *([str(node)] if name in NODE else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    said = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or [done.stderr[-300:]]
    return Check(name, done.returncode == 0, "whole and streamed" if done.returncode == 0 else said[-1][:600])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--python", default=sys.executable, help="a Python that has the clients (default: this one)")
    parser.add_argument("--node", metavar="DIRECTORY", help="a directory whose node_modules has the clients")
    parser.add_argument("--only", nargs="+", choices=[*PYTHON, *NODE], default=[*PYTHON, *NODE])
    args = parser.parse_args(argv)
    with served(args) as server:
        model, checks = server.model(), []
        for name in args.only:
            why = missing(name, args.python, args.node)
            if why is None:
                checks.append(talk(name, server.url, model, args.python, args.node))
            else:
                checks.append(Check(name, True, f"skipped: {why}"))
    return report(checks)
