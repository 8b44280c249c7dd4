"""Models by hub id and revision, from a hub on this machine: as over the network, but for the distance."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import pytest

REPO = "owner/tiny"
SHA = {"main": "a" * 40, "v1": "b" * 40}


def revisions() -> dict[str, dict[str, bytes]]:
    """main: the bundled target; v1: the bundled draft. Their texts differ."""
    root = Path(str(files("foretell"))) / "bundled"
    return {
        name: {file.name: file.read_bytes() for file in (root / folder).iterdir() if file.suffix != ".md"}
        for name, folder in (("main", "target"), ("v1", "draft"))
    }


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub to download a snapshot."""

    protocol_version = "HTTP/1.1"
    held: ClassVar[dict[str, dict[str, bytes]]] = {}

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, status: int, headers: dict[str, str], data: bytes, *, body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _answer(self, *, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        if repo != REPO:
            return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", body=body)
        named = rest[1] if len(rest) > 1 else "main"
        name = next((one for one in SHA if named in (one, SHA[one])), None)
        if name is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", body=body)
        held = self.held[name]
        if api:
            listed = [
                {
                    "type": "file",
                    "path": file,
                    "rfilename": file,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for file, data in held.items()
            ]
            whole = (
                listed if rest[0] == "tree" else {"id": REPO, "sha": SHA[name], "siblings": listed, "private": False}
            )
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(whole).encode(), body=body)
        data = held.get("/".join(rest[2:]))
        if data is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"", body=body)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA[name]}
        return self._send(200, headers, data, body=body)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    Hub.held = revisions()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


PROGRAM = """
import json, sys
from typer.testing import CliRunner
from foretell.cli.app import app
given = ["generate", "def f(x):", "--temperature", "0", "--max-new-tokens", "12", "--method", "none", "--json"]
for arguments in json.load(sys.stdin):
    done = CliRunner().invoke(app, [*given, *arguments])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""
ASKED: dict[str, list[str]] = {
    "newest": ["--target", REPO],
    "old": ["--target", REPO, "--revision", "v1"],
    "same": ["--target", f"{REPO}@{SHA['v1']}"],
    "main": ["--target", "bundled/target"],
    "v1": ["--target", "bundled/draft"],
    "no revision": ["--target", REPO, "--revision", "v9"],
    "no model": ["--target", "owner/absent"],
}


@pytest.fixture(scope="module")
def told(hub: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What ``foretell generate`` says with that hub: (exit status, output, errors). In a process of its own, as the hub's
    address is read when it is imported; one for all, as importing takes longer than all that is asked."""
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    home = str(tmp_path_factory.mktemp("home"))
    settings = {"HF_ENDPOINT": hub, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **proxies}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | settings, input=json.dumps(list(ASKED.values())),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: tuple(json.loads(line)) for name, line in zip(ASKED, done.stdout.splitlines(), strict=True)}


@pytest.mark.slow
def test_an_id_and_a_revision_give_the_weights_of_that_revision(told: dict[str, tuple[int, str, str]]) -> None:
    good = [name for name in ASKED if not name.startswith("no ")]
    assert all(told[name][0] == 0 for name in good), told
    texts = {name: json.loads(told[name][1])["token_ids"] for name in good}
    assert texts["newest"] == texts["main"]
    assert texts["old"] == texts["same"] == texts["v1"]
    assert texts["newest"] != texts["old"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no revision", f"{REPO} has no revision 'v9' on the Hugging Face hub"),
        ("no model", "no model owner/absent on the Hugging Face hub"),
    ],
)
def test_what_the_hub_has_not_is_one_line(told: dict[str, tuple[int, str, str]], name: str, said: str) -> None:
    status, _, errors = told[name]
    assert status == 1
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
