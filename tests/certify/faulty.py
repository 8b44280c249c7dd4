"""A small OpenAI-compatible server that speculates by rejection sampling, with faults that can be planted.

It shares no code with the package: a table model over words, a draft that is a blurred table, plain loops. ``speculative:
false`` in a request decodes plainly, which no fault but those of ``EVERYWHERE`` touches.
"""

import json
import secrets
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCAB, CONTEXTS, GUESSES = 24, 61, 3
WORDS = [f" {a}{b}" for a in "bdgk" for b in ("a", "en", "i", "ost", "u", "yr")]

FAULTS = {
    "bonus_from_draft": "unverified tokens",
    "guesses_unchecked": "unverified tokens",
    "wrong_row": "unverified tokens",
    "other_weights": "another model",
    "no_residual": "wrong distribution",
    "accepts_too_often": "wrong distribution",
    "wrong_q": "wrong temperature",
    "temperature_ignored": "wrong temperature",
    "temperature_squared": "wrong temperature",
    "penalty_dropped": "penalties dropped",
    "penalty_stale": "penalties dropped",
    "filter_dropped": "filters dropped",
    "scores_of_draft": "foreign log probabilities",
    "scores_shifted": "foreign log probabilities",
    "stop_ignored": "stop ignored",
    "stop_at_step_end": "stop ignored",
    "stop_kept": "stop kept in the text",
    "overrun": "wrong length",
    "finish_wrong": "wrong finish reason",
    "seed_ignored": "seed ignored",
    "seed_constant": "samples repeat",
    "rows_mixed": "answers change under load",
    "stream_loses": "stream differs",
    "crash_under_load": "requests fail",
}
"""Each fault, and the name that it must be found by."""
UNDER_LOAD = ("rows_mixed", "crash_under_load")
"""Those of requests that are answered beside others."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Law:
    """What a token is drawn from: weights, made once for many draws."""

    def __init__(self, p: np.ndarray) -> None:
        self.p, self.total = p, float(p.sum())
        self.chances: list[float] = p.tolist()
        self.cumulative: list[float] = np.cumsum(p).tolist()

    def at(self, uniform: float) -> int:
        return min(bisect_right(self.cumulative, uniform * self.total), VOCAB - 1)


@lru_cache(maxsize=20_000)
def distribution(logits: bytes, temperature: float, top_p: float) -> Law:
    """What a sampler draws from."""
    given = np.frombuffer(logits)
    if temperature == 0:
        return Law(np.eye(VOCAB)[int(given.argmax())])
    p = softmax(given / temperature)
    if top_p < 1.0:
        order = np.argsort(-p)
        kept = order[: int((np.cumsum(p[order]) < top_p).sum()) + 1]
        p = np.where(np.isin(np.arange(VOCAB), kept), p, 0.0)
        p /= p.sum()
    return Law(p)


@lru_cache(maxsize=20_000)
def residual(p: Law, q: Law) -> Law:
    """What is drawn from where a guess from q is rejected."""
    left = Law(np.maximum(p.p - q.p, 0.0))
    return left if left.total > 0 else p


class Model:
    """Logits by the last two tokens."""

    def __init__(self, seed: int = 0, rounding: float = 0.0) -> None:
        draw = np.random.default_rng(seed)
        sharpness = draw.uniform(1.0, 3.5, (CONTEXTS, 1))
        self.target = draw.normal(size=(CONTEXTS, VOCAB)) * sharpness
        self.draft = 0.6 * self.target + 1.3 * draw.normal(size=(CONTEXTS, VOCAB))
        self.target += rounding * draw.normal(size=(CONTEXTS, VOCAB))

    def rows(self, context: list[int]) -> tuple[np.ndarray, np.ndarray]:
        at = (7 * context[-1] + 31 * context[-2] + 3) % CONTEXTS
        return self.target[at], self.draft[at]


MODELS = {False: Model(0), True: Model(1)}
ROUNDED = Model(0, rounding=0.1)
"""The first one by another engine's kernels."""


class Request:
    """One text of one request."""

    def __init__(self, body: dict[str, Any], fault: str | None, seed: int, busy: bool, rounded: bool) -> None:
        self.body, self.busy = body, busy
        self.plain = body.get("speculative") is False
        self.fault = None if self.plain else fault
        self.model = ROUNDED if rounded and not self.plain else MODELS[self.fault == "other_weights"]
        self.temperature = float(body.get("temperature", 1.0))
        self.draw = np.random.default_rng(seed)
        number = zlib.crc32(body["prompt"].encode())
        self.begin = [number % VOCAB, number // VOCAB % VOCAB]
        self.tokens: list[int] = []
        self.scores: list[np.ndarray] = []  # logits of each token's position
        self.reason = "length"

    def law(
        self, logits: np.ndarray, written: list[int], *, checks: bool = False, temperature: float | None = None
    ) -> Law:
        """What a token is drawn from after these; checks: whether this is the target at a guessed position."""
        body, fault = self.body, self.fault if checks else None
        frequency, presence = body.get("frequency_penalty", 0.0), body.get("presence_penalty", 0.0)
        if (frequency or presence) and fault != "penalty_dropped":
            counted = self.tokens if fault == "penalty_stale" else written
            counts = np.bincount(counted, minlength=VOCAB) if counted else np.zeros(VOCAB)
            logits = logits - frequency * counts - presence * (counts > 0)
        t = self.temperature if temperature is None else temperature
        if t > 0:
            t = {"temperature_ignored": 1.0, "temperature_squared": t * t}.get(str(fault), t)
        top_p = 1.0 if fault == "filter_dropped" else body.get("top_p", 1.0)
        return distribution(logits.tobytes(), t, top_p)

    def pick(self, law: Law) -> int:
        return law.at(self.draw.random())

    def write(self, token: int, target: np.ndarray, draft: np.ndarray, guessed: bool = True) -> None:
        shown = draft if self.fault == "scores_of_draft" and guessed else target
        self.tokens.append(token)
        self.scores.append(shown)

    def run(self) -> None:
        most = self.body["max_tokens"]
        target, draft = self.model.rows(self.begin)
        self.write(self.pick(self.law(target, [])), target, draft, guessed=False)
        while len(self.tokens) < most and not self.stopped():
            self.plain_step() if self.plain else self.step(most)
        if self.fault != "overrun":
            del self.tokens[most:], self.scores[most:]
        if self.fault == "scores_shifted":
            self.scores = [*self.scores[1:], self.scores[-1]]

    def plain_step(self) -> None:
        target, draft = self.model.rows(self.begin + self.tokens)
        self.write(self.pick(self.law(target, self.tokens)), target, draft)

    def step(self, most: int) -> None:
        """Guess GUESSES tokens, keep those that pass, and add one."""
        guesses, laws = [], []
        for _ in range(GUESSES):
            written = self.tokens + guesses
            q = self.law(self.model.rows(self.begin + written)[1], written)
            guesses.append(self.pick(q))
            laws.append(q)
        begin = list(self.tokens)
        kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        for guess, q in zip(guesses, laws, strict=True):
            written = begin + [token for token, _, _ in kept]
            target, draft = self.rows(written)
            p = self.law(target, written, checks=True)
            compared = self.law(draft, written, temperature=1.0) if self.fault == "wrong_q" and self.temperature else q
            if self.fault == "guesses_unchecked" and not kept:
                kept.append((guess, target, draft))
                continue
            favour = 2.0 if self.fault == "accepts_too_often" else 1.0
            if self.draw.random() < favour * p.chances[guess] / max(compared.chances[guess], 1e-12):
                kept.append((guess, target, draft))
                continue
            left = p if self.fault == "no_residual" else residual(p, compared)
            kept.append((self.pick(left), target, draft))
            break
        else:
            written = begin + [token for token, _, _ in kept]
            target, draft = self.rows(written)
            source = draft if self.fault == "bonus_from_draft" else target
            kept.append((self.pick(self.law(source, written, checks=True)), target, draft))
        for one in kept:
            if self.stopped() and self.fault not in ("stop_ignored", "stop_at_step_end"):
                break
            self.write(*one)

    def rows(self, written: list[int]) -> tuple[np.ndarray, np.ndarray]:
        context = self.begin + written
        if self.fault == "wrong_row" and len(written) > 3:
            context = [context[-2], context[-2]]
        if self.fault == "rows_mixed" and self.busy:
            context = [*context[:-1], (context[-1] + 1) % VOCAB]
        return self.model.rows(context)

    def text(self) -> str:
        return "".join(WORDS[token] for token in self.tokens)

    def stopped(self) -> bool:
        stop = (self.body.get("stop") or [None])[0]
        if stop is None or self.fault == "stop_ignored":
            return False
        text = self.text()
        if self.fault == "stop_at_step_end":
            return text.endswith(stop)
        return stop in text

    def choice(self, index: int) -> dict[str, Any]:
        self.run()
        text, finish = self.text(), "length"
        stop = (self.body.get("stop") or [None])[0]
        if stop is not None and self.stopped():
            finish = "stop"
            text = text[: text.index(stop) + (len(stop) if self.fault == "stop_kept" else 0)]
        if self.fault == "finish_wrong" and stop is None:
            finish = "stop"
        out: dict[str, Any] = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
        count = self.body.get("logprobs")
        if count is not None:
            logprobs = np.log(softmax(np.stack(self.scores)))
            order = np.argsort(-logprobs)[:, :count].tolist()
            scores = logprobs.tolist()
            out["logprobs"] = {
                "tokens": [WORDS[token] for token in self.tokens],
                "token_logprobs": [row[token] for row, token in zip(scores, self.tokens, strict=True)],
                "top_logprobs": [
                    {**{WORDS[at]: row[at] for at in best}, WORDS[token]: row[token]}
                    for best, row, token in zip(order, scores, self.tokens, strict=True)
                ],
            }
        return out


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    fault: str | None = None
    logprobs = True
    most = 64
    rounded = False
    failures = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.active = threading.Lock(), 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one piece: between two the client's delayed acknowledgement costs 40 ms
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "words"}]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.reply(404, {"error": {"message": "no such route"}})
        if not server.logprobs and body.get("logprobs") is not None:
            return self.reply(400, {"error": {"message": "no log probabilities here"}})
        if body.get("n", 1) > server.most:
            return self.reply(400, {"error": {"message": f"n is at most {server.most} here"}})
        with server.lock:
            server.active += 1
            busy = server.active > 1
        if server.fault in UNDER_LOAD:
            time.sleep(0.005)  # requests that are sent together overlap, however fast the machine answers
        try:
            if busy and server.fault == "crash_under_load" and body.get("speculative") is not False:
                return self.reply(500, {"error": {"message": "out of slots"}})
            self.answer(body, busy)
        finally:
            with server.lock:
                server.active -= 1

    def answer(self, body: dict[str, Any], busy: bool) -> None:
        fault = None if body.get("speculative") is False else self.server.fault
        seed = body.get("seed")
        if seed is None or fault == "seed_ignored":
            seed = secrets.randbits(60)
        if fault == "seed_constant":
            seed = 1
        made = [Request(body, fault, seed + index, busy, self.server.rounded) for index in range(body.get("n", 1))]
        choices = [one.choice(index) for index, one in enumerate(made)]
        count = sum(len(one.tokens) for one in made)
        if not body.get("stream"):
            return self.reply(200, {"choices": choices, "usage": {"completion_tokens": count}})
        pieces = [choices[0]["text"][at : at + 4] for at in range(0, len(choices[0]["text"]), 4)]
        if fault == "stream_loses":
            del pieces[-2:]
        events = [{"choices": [{"index": 0, "text": piece, "finish_reason": None}]} for piece in pieces]
        events.append({"choices": [{"index": 0, "text": "", "finish_reason": choices[0]["finish_reason"]}]})
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None


@contextmanager
def faulty(fault: str | None = None, *, logprobs: bool = True, most: int = 64, rounded: bool = False) -> Iterator[str]:
    """The URL of a server with this fault, which takes at most so large an n. rounded: only plain requests are answered
    by the reference's arithmetic."""
    with Server() as server:
        server.fault, server.logprobs, server.most, server.rounded = fault, logprobs, most, rounded
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
