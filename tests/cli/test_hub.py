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


def ask(hub: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``foretell generate`` with that hub, in a process of its own: the hub's address is read when it is imported."""
    program = [
        sys.executable,
        "-m",
        "foretell",
        "generate",
        "def f(x):",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
    ]
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **proxies}
    return subprocess.run(
        [*program, "--method", "none", "--json", *arguments], env=os.environ | settings, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_an_id_and_a_revision_give_the_weights_of_that_revision(hub: str, tmp_path: Path) -> None:
    newest = ask(hub, tmp_path, "--target", REPO)
    assert newest.returncode == 0, newest.stderr
    old = ask(hub, tmp_path, "--target", REPO, "--revision", "v1")
    assert old.returncode == 0, old.stderr
    same = ask(hub, tmp_path, "--target", f"{REPO}@{SHA['v1']}")
    assert same.returncode == 0, same.stderr
    wanted = [ask(hub, tmp_path, "--target", name) for name in ("bundled/target", "bundled/draft")]
    texts = [json.loads(one.stdout)["token_ids"] for one in (newest, old, same, *wanted)]
    assert texts[0] == texts[3]
    assert texts[1] == texts[2] == texts[4]
    assert texts[0] != texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", REPO, "--revision", "v9"), f"{REPO} has no revision 'v9' on the Hugging Face hub"),
        (("--target", "owner/absent"), "no model owner/absent on the Hugging Face hub"),
    ],
)
def test_what_the_hub_has_not_is_one_line(hub: str, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = ask(hub, tmp_path, *arguments)
    assert result.returncode == 1
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
