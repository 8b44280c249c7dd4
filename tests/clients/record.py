"""Record what coding programs send: sessions of three tool calls with the server, whose model a script stands in for.

::

    npm install --prefix build/npm @anthropic-ai/claude-code @openai/codex opencode-ai
    python -m venv build/aider && build/aider/bin/pip install aider-chat
    export PATH=$PWD/build/npm/node_modules/.bin:$PWD/build/aider/bin:$PATH
    python -m tests.clients.record --model MODEL.gguf --out tests/fixtures/clients

Each program is started by ``foretell launch`` for three conversations, with a new folder as its home. The texts that it
sends are not kept: see ``tests.clients.structure``. The model's chat template alone is used.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.engine.request.result import Sink
from foretell.engine.request.row import Submission
from foretell.model.load import load_tokenizer
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from tests.clients.structure import Sent, fixture, table
from tests.server.fake import EOS, FakeService
from tests.server.live import live

NAME = "local-coder"
BODY: ContextVar[dict[str, Any] | None] = ContextVar("body", default=None)
CALLS = 3
COMMANDS = ("ls", "cat a.py", "wc -l a.py")
TOOLS: Mapping[str, Any] = {
    "Bash": lambda text: {"command": text, "description": "Look"},
    "bash": lambda text: {"command": text, "description": "Look"},
    "exec_command": lambda text: {"cmd": text},
    "shell": lambda text: {"command": ["bash", "-lc", text]},
    "shell_command": lambda text: {"command": text},
}
"""Tools that run a command, and their arguments."""
SOURCE = "def f():\n    return 1\n\n"
CONVERSATIONS = (
    ("Say how many lines a.py has.", "work"),
    ("Say which functions a.py has.", "work"),  # in the same folder
    ("Say how many lines a.py has.", "other"),  # in a folder under git
)


CLIENTS: Mapping[str, tuple[Sequence[str], str]] = {
    "claude": (["-p", "{prompt}", "--allowedTools", "Bash"], ""),
    "codex": (["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"], ""),
    "opencode": (["run", "{prompt}"], ""),
    "aider": (
        ["--yes-always", "--no-git", "--no-check-update", "--no-fancy-input", "--no-pretty", "a.py"],
        "{prompt}\n" * (CALLS + 1) + "/exit\n",
    ),
}
"""(what a program is given, what is typed)."""


class Scripted(FakeService):
    """Three calls of the tool that runs commands, then a text; each request is kept."""

    def __init__(self, model: str) -> None:
        super().__init__(self._answer, max_model_len=2**24)
        self.engine.tokenizer = self.tokenizer = load_tokenizer(model)
        self.engine.model.spec = replace(self.engine.model.spec, vocab_size=len(self.tokenizer))
        self.sent: list[Sent] = []
        self._texts: dict[str, str] = {}

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Keep the request that this is of."""
        body, path = BODY.get() or ({}, "")
        prompt = self.tokenizer.decode(list(submission.prompt_ids))
        self.sent.append(Sent(path, body, prompt))
        self._texts[submission.request_id] = answer(body)
        super().submit(submission, sink)

    def _answer(self, submission: Submission) -> list[int]:
        return [*self.tokenizer.encode(self._texts[submission.request_id], add_special_tokens=False), EOS]


def answer(body: Mapping[str, Any]) -> str:
    """What the model says."""
    names = [one.get("name") or one.get("function", {}).get("name") for one in body.get("tools") or ()]
    known = next((name for name in TOOLS if name in names), None)
    text = json.dumps(body.get("messages") or body.get("input") or "")
    done = max(text.count(f'"type": "{kind}"') for kind in ("tool_use", "function_call")) or text.count(
        '"tool_call_id"'
    )
    if "*SEARCH/REPLACE*" in text or "file listing" in text:  # aider has no tools: a file that grows by a line a turn
        return f"a.py\n```\n{SOURCE}{'# one more line' * text.count('assistant')}\n```\n"
    if known is None or done >= CALLS:
        return "a.py has 3 lines."
    call = {"name": known, "arguments": TOOLS[known](COMMANDS[done])}
    return f"I look at it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def recording(app: Any, log: list[Any]) -> Any:
    """An app before another one, which keeps bodies and statuses."""

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        whole = b"".join(parts)
        body = json.loads(whole) if whole.lstrip().startswith(b"{") else {}
        given = iter([{"type": "http.request", "body": whole, "more_body": False}])
        entry = {"method": scope["method"], "path": scope["path"], "body": body, "status": None, "error": ""}
        log.append(entry)
        BODY.set((body, scope["path"]))

        async def again() -> Any:
            return next(given, None) or await receive()

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
            elif entry["status"] >= 400:
                entry["error"] += message.get("body", b"").decode()
            await send(message)

        await app(scope, again, told)

    return outer


def session(client: str, prompt: str, model: str, home: Path, folder: str, raw: Path | None) -> tuple[list[Sent], str]:
    """(what was sent, the program's version)."""
    service, log = Scripted(model), list[Any]()
    app = build_app(service, ServerOptions(served_model_name=NAME))  # type: ignore[arg-type]
    work = home / folder
    if not work.exists():
        work.mkdir()
        (work / "a.py").write_text(SOURCE)
        if folder == "other":
            subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
    arguments, typed = CLIENTS[client]
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "TERM") if name in os.environ}
    started: Any = {"cwd": work, "capture_output": True, "text": True, "timeout": 300}
    started["env"] = {**kept, "HOME": str(home), "CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}  # as it comes
    version = subprocess.run([client, "--version"], **started).stdout.split() or ["?"]
    with live(recording(app, log)) as url:
        words = [sys.executable, "-m", "foretell", "launch", client, "--port", url.rpartition(":")[2], "--"]
        words += [one.format(prompt=prompt) for one in arguments]
        done = subprocess.run(words, input=typed.format(prompt=prompt), **started)
    if raw is not None:
        raw.mkdir(parents=True, exist_ok=True)
        (raw / f"{client}-{folder}-{prompt[4:9].strip()}.json").write_text(
            json.dumps({"log": log, "prompts": [one.prompt for one in service.sent], "said": done.stdout + done.stderr})
        )
    number = next((one for one in version if one[:1].isdigit()), "?")
    print(f"{client} {number}: status {done.returncode}, {len(service.sent)} answers")
    for one in log:
        if one["status"] != 200:
            print(" ", one["method"], one["path"], one["status"], one["error"])
    return service.sent, number


def main() -> None:
    """Record all that are installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model whose chat template makes the prompts")
    parser.add_argument("--out", type=Path, help="where the fixtures go")
    parser.add_argument("--raw", type=Path, help="where whole requests go, to look at; they are not to be shared")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    lines = []
    for client in CLIENTS:
        if shutil.which(client) is None or args.only not in client:
            continue
        with tempfile.TemporaryDirectory() as home:
            done = [session(client, text, args.model, Path(home), at, args.raw) for text, at in CONVERSATIONS]
        version, conversations = done[0][1], [sent for sent, _ in done]
        lines += table(client, version, conversations)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            made = json.dumps(fixture(client, version, conversations), separators=(",", ":"))
            (args.out / f"{client}.json").write_text(made + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
