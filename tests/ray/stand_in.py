"""A server without a model, for what Ray does between requests: it works for a while, and writes down what it did."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Ray itself is imported by the cluster's fixture, with its warnings caught
    from foretell.ray import Settings


class Diary:
    """What all replicas did, one line an event: a file, since a killed replica cannot be asked any more."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "diary"

    def write(self, *words: object) -> None:
        line = " ".join(map(str, (*words, os.getpid()))) + "\n"
        handle = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(handle, line.encode())  # one call, so lines of several processes do not mix
        os.close(handle)

    def read(self, event: str) -> list[list[str]]:
        """The words of every line that begins with event; the last word is a process id."""
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [words[1:] for words in lines if words[0] == event]

    def num_open(self, process: int) -> int:
        """Requests that a process has begun and not ended."""
        begun, ended = (sum(words[-1] == str(process) for words in self.read(event)) for event in ("begin", "end"))
        return begun - ended


class StandIn:
    """In place of a Service."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        diary.write("open")

    @property
    def healthy(self) -> bool:
        return not (self._diary.folder / f"sick-{os.getpid()}").exists()

    def drain(self, timeout_s: float) -> bool:
        self._diary.write("drain")
        return True

    def close(self) -> None:
        self._diary.write("close")


def build(settings: "Settings") -> tuple[StandIn, Any]:
    """The target of the settings is the folder of the diary."""
    diary = Diary(Path(settings.target))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{phase}"
                await send({"type": f"lifespan.{phase}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = json.loads(body)
        diary.write("begin", asked["id"], asked["attempt"])
        await asyncio.sleep(asked["seconds"])
        diary.write("end", asked["id"], asked["attempt"])
        answer = json.dumps({"id": asked["id"], "pid": os.getpid(), "at": time.monotonic()}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": answer})

    return StandIn(diary), app
