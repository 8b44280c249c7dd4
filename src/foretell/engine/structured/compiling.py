"""Whether a grammar can be compiled in time: tried in a process of its own, which is ended where it cannot."""

import json
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from copy import copy
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import IO, Any

from foretell.core.errors import ConfigError

CPU_S = 1.0
"""CPU seconds that a grammar may take to compile, with its first mask."""
WAIT_S, START_S = 20.0, 60.0
"""Seconds by the clock after which the process is given up, and for it to start."""
MAX_BYTES = 8 << 30
"""Address space of the process."""
MAX_GRAMMAR = 1 << 18
"""Characters of a grammar, as llguidance reads it; about those of its schema."""
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""Of llguidance, beside its defaults. A state takes 1 to 2 kB; a mask stops after some 15 ms of its other limits."""
_REFUSED = 256


def as_text(tokenizer: Any) -> str:
    """A tokenizer that the tokenizers library runs (foretell's own, or a fast one of transformers), as llguidance reads it.
    Raises ValueError for any other."""
    found = getattr(tokenizer, "backend_tokenizer", None)
    if found is None:
        raise ValueError("it is none that the tokenizers library runs")
    backend = copy(found)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def _hear(pipe: IO[bytes], lines: "SimpleQueue[bytes]") -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(b"")


class CompileCheck:
    """One process for one tokenizer, started at once and after each grammar for which it had to be ended. Thread-safe."""

    def __init__(self, tokenizer: str, n_vocab: int, eos_token: list[int]) -> None:
        """tokenizer: see ``as_text``. The process reads it, for a second, beside whoever else does."""
        limits = {"limits": LIMITS, "cpu_seconds": CPU_S, "max_bytes": MAX_BYTES}
        self._given = {"tokenizer": tokenizer, "n_vocab": n_vocab, "eos_token": eos_token, **limits}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_reading = False  # the tokenizer, before its first answer
        self._lock = Lock()
        # What was too much, as it was told, and what was said of it.
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._start()

    def check(self, grammar: str, what: str) -> str:
        """The compiler's error, "" where there is none. Raises ConfigError for a grammar that is too large or takes too
        long."""
        if len(grammar) > MAX_GRAMMAR:
            raise ConfigError(
                f"the {what} has {len(grammar)} characters as a grammar; {MAX_GRAMMAR} are taken: make it smaller"
            )
        return str(self._asked(grammar, what))

    def converted(self, text: str) -> str:
        """A grammar of llama.cpp's as llguidance reads it. The converter is a slow one: a chain of 2,500 rules takes it
        5 s. Raises ConfigError for one that cannot be read or takes too long."""
        answer = self._asked({"gbnf": text}, "gbnf grammar")
        if "error" in answer:
            raise ConfigError(f"the gbnf grammar cannot be read: {answer['error']}")
        return str(answer["grammar"])

    def _asked(self, told: Any, what: str) -> Any:
        """The process's answer. Raises ConfigError where there is none in time."""
        line = json.dumps(told)
        with self._lock:
            refused, answer = self._refused.get(line), None
            if refused is None:
                try:
                    answer = self._answer_to(line)
                except (OSError, EOFError, TimeoutError):
                    self._end()
                    smaller = "make it, its numbers or repetitions smaller"
                    refused = f"the {what} takes more than {CPU_S:g} s to compile: {smaller}"
                    self._refused[line] = refused
                    while len(self._refused) > _REFUSED:
                        self._refused.popitem(last=False)
        if refused is not None:
            raise ConfigError(refused)
        return answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _answer_to(self, line: str) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        if self._is_reading:
            self._wait()
        self._tell(line)
        return self._answer(WAIT_S)

    def _start(self) -> None:
        self._end()
        program = Path(__file__).with_name("grammar_child.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        # A pipe is read with a limit of time on a thread of its own: Windows selects among sockets alone.
        Thread(target=_hear, args=(self._process.stdout, self._lines), name="foretell-grammars", daemon=True).start()
        # A pipe takes some 64 kB at once, and the process reads no more before it has started.
        Thread(target=self._give, args=(self._process.stdin,), name="foretell-grammars", daemon=True).start()
        self._is_reading = True

    def _give(self, pipe: IO[bytes]) -> None:
        with suppress(OSError, ValueError):  # it has ended, and whoever reads its answer gets an error
            pipe.write(json.dumps(self._given).encode() + b"\n")
            pipe.flush()

    def _wait(self) -> None:
        """Until the process has read the tokenizer."""
        try:
            self._answer(START_S)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise ConfigError("grammars cannot be compiled here: the process that tries them does not start") from error
        self._is_reading = False

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, timeout_s: float) -> Any:
        """The next line, read. Raises EOFError where the process has ended, TimeoutError."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()

    def __del__(self) -> None:
        self._end()
