"""An OpenAI-compatible endpoint, seen from outside: what it can be asked, and its answers in one form."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json

CHOICES = (8, 4, 2)
"""Texts of one request, where the endpoint takes n: some take no more than they decode at a time."""
MAX_LOGPROBS = (20, 5, 1)
NEUTRAL: tuple[Mapping[str, Any], ...] = (
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0},
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0},
    {"top_p": 1.0},
    {},
)
"""Fields that switch off a server's own filters and penalties, the fullest set first: llama.cpp cuts at top_p = 0.95 by
itself, its Python server penalises repetition, and vLLM takes defaults from the model's ``generation_config.json``. A
server that refuses a set gets the next one."""
BUSY = (429, 503)
RETRIES = 6


class AnswerError(Exception):
    """A request that was not answered. status: of HTTP; 0 where the connection or the answer's form failed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server says that it does not take such a request."""
        return 400 <= self.status < 500


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop: str | None = None
    logprobs: int | None = None
    n: int = 1
    stream: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones, as they are


@dataclass(frozen=True)
class Answer:
    """One choice of an answer."""

    text: str
    finish: str | None
    completion_tokens: int | None  # of the request's usage; of requests with n = 1 this choice's
    tokens: tuple[str, ...] | None = None  # texts of single tokens, where log probabilities were asked for
    logprobs: tuple[float, ...] | None = None  # of each token
    top: tuple[Mapping[str, float], ...] | None = None  # the likeliest tokens of each position; may hold the token too

    @property
    def written(self) -> tuple[str, ...] | None:
        """``tokens`` without the end token behind the text, which some servers show (vLLM) and others do not."""
        tokens = self.tokens
        return tokens[:-1] if tokens and self.finish == "stop" and "".join(tokens[:-1]) == self.text else tokens


@dataclass(frozen=True)
class Abilities:
    """What an endpoint was found to take."""

    api: str  # "completions" or "chat"
    neutral: Mapping[str, Any]
    num_logprobs: int | None
    choices: int  # the largest of CHOICES that is taken as n; 1: none
    seed: bool

    def words(self) -> str:
        """For reports."""
        logprobs = "no log probabilities" if self.num_logprobs is None else f"{self.num_logprobs} log probabilities"
        choices = f"n = {self.choices}" if self.choices > 1 else "no n"
        return f"{self.api}, {logprobs}, {choices}, {'seeds' if self.seed else 'no seeds'}"


class Endpoint:
    """A client of one model of one server. To be closed, or used as a context manager. Threads may share it."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        api: str = "auto",
        timeout_s: float = 300.0,
        concurrency: int = 8,
    ) -> None:
        """url: with or without /v1. extra: fields of every request. api: "completions", "chat" or "auto".

        Raises ConfigError for a URL that is none, and for an unknown api.
        """
        if api not in ("auto", "completions", "chat"):
            raise ConfigError(f"api {api!r} is not known; expected completions, chat or auto")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL ({error}); expected e.g. http://127.0.0.1:8000") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not a URL of a server; expected e.g. http://127.0.0.1:8000")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else base + "/v1"
        self.shown = str(httpx.URL(self.url).copy_with(username=None, password=None))
        self.extra = dict(extra or {})
        self.concurrency = concurrency
        self.model = model
        self.about: Mapping[str, Any] = {}
        self._api = api
        self._abilities: Abilities | None = None
        self._refusal = ""  # of the last request that it did not take
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
        self._client = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=10.0), headers=headers, limits=limits)

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def sibling(self, extra: Mapping[str, Any]) -> "Endpoint":
        """The same endpoint with further fields in every request; it shares the connection and what was found."""
        made = object.__new__(Endpoint)
        made.__dict__.update(self.__dict__)
        made.extra = {**self.extra, **extra}
        made._abilities = None
        return made

    @property
    def abilities(self) -> Abilities:
        """What ``probe`` found."""
        assert self._abilities is not None, "probe() comes first"
        return self._abilities

    def probe(self, prompt: str) -> Abilities:
        """Find out what the endpoint takes. Raises ConfigError where nothing answers there."""
        self.find_model()
        api = self._find_api(prompt)
        self._abilities = Abilities(api, {}, None, 1, False)
        neutral = next((one for one in NEUTRAL if self._takes(Ask(prompt, 1, 1.0, fields=one)) is not None), None)
        if neutral is None:
            raise ConfigError(f"{self.shown} takes no sampled request: {self._refusal}")
        self._abilities = Abilities(api, neutral, None, 1, False)
        most = None
        for count in MAX_LOGPROBS:
            found = self._takes(Ask(prompt, 2, logprobs=count))
            if found is not None and found[0].top and any(found[0].top):
                most = count
                break
        taken = (self._takes(Ask(prompt, 1, 1.0, n=count)) for count in CHOICES)
        many = next((len(found) for found, n in zip(taken, CHOICES, strict=True) if found and len(found) == n), 1)
        seed = self._takes(Ask(prompt, 1, 1.0, seed=1)) is not None
        self._abilities = Abilities(api, neutral, most, many, seed)
        return self._abilities

    def find_model(self) -> None:
        """Set ``model``, where none was given, and ``about``, its entry in /v1/models. Raises ConfigError."""
        try:
            reply = self._client.get(self.url + "/models")
        except httpx.HTTPError as error:
            raise ConfigError(
                f"nothing answers at {self.shown} ({type(error).__name__}: {error}): start the server, or mend the URL"
            ) from None
        if reply.status_code in (401, 403):
            raise ConfigError(f"{self.shown} asks for a key (HTTP {reply.status_code}): give --api-key")
        try:
            known = [one for one in reply.json()["data"] if isinstance(one, dict)] if reply.is_success else []
        except (ValueError, KeyError, TypeError):
            known = []
        if self.model is None:
            if not known:
                raise ConfigError(f"{self.shown}/models names no model (HTTP {reply.status_code}): give --model NAME")
            self.model = str(known[0].get("id"))
        self.about = next((one for one in known if one.get("id") == self.model), {})

    def _find_api(self, prompt: str) -> str:
        tried = ("completions", "chat") if self._api == "auto" else (self._api,)
        reasons = []
        for api in tried:
            self._abilities = Abilities(api, {}, None, 1, False)
            try:
                self.ask(Ask(prompt, 2))
                return api
            except AnswerError as error:
                reasons.append(f"{api}: {error}")
        raise ConfigError(f"{self.shown} answers no request of model {self.model!r}; {'; '.join(reasons)}")

    def _takes(self, asked: Ask) -> list[Answer] | None:
        try:
            return self.ask(asked)
        except AnswerError as error:
            self._refusal = str(error)
            return None

    # -- requests --------------------------------------------------------------------------------------------------

    def ask(self, asked: Ask) -> list[Answer]:
        """The choices of one request. A busy server is asked again. Raises AnswerError."""
        body = self._body(asked)
        route = "/chat/completions" if self.abilities.api == "chat" else "/completions"
        for attempt in range(RETRIES):
            try:
                if asked.stream:
                    return [self._streamed(route, body)]
                reply = self._client.post(self.url + route, json=body)
            except httpx.HTTPError as error:
                raise AnswerError(0, f"{type(error).__name__}: {error}") from None
            if reply.status_code not in BUSY or attempt == RETRIES - 1:
                break
            time.sleep(min(0.1 * 2**attempt, 2.0))
        if not reply.is_success:
            raise AnswerError(reply.status_code, _reason(reply.text))
        try:
            return _answers(reply.json())
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise AnswerError(0, f"not an answer of OpenAI's form ({error!r}): {reply.text[:200]!r}") from None

    def one(self, asked: Ask) -> Answer:
        """The first choice of a request."""
        found = self.ask(asked)
        if not found:
            raise AnswerError(0, "an answer without choices")
        return found[0]

    def all(self, asked: Sequence[Ask]) -> list[list[Answer]]:
        """The answers of requests that are sent ``concurrency`` at a time, in order. Raises the first AnswerError."""
        if self.concurrency == 1 or len(asked) < 2:
            return [self.ask(one) for one in asked]
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self.ask, one) for one in asked]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def _body(self, asked: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": asked.max_tokens, "temperature": asked.temperature}
        chat = self.abilities.api == "chat"
        if chat:
            body["messages"] = [{"role": "user", "content": asked.prompt}]
        else:
            body["prompt"] = asked.prompt
        body |= self.abilities.neutral  # a penalty changes greedy texts too
        if asked.seed is not None:
            body["seed"] = asked.seed
        if asked.stop is not None:
            body["stop"] = [asked.stop]
        if asked.n != 1:
            body["n"] = asked.n
        if asked.stream:
            body["stream"] = True
        if asked.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": asked.logprobs} if chat else {"logprobs": asked.logprobs}
        return {**body, **asked.fields, **self.extra}

    def _streamed(self, route: str, body: Mapping[str, Any]) -> Answer:
        pieces: list[str] = []
        finish: str | None = None
        done = False
        with self._client.stream("POST", self.url + route, json=body) as reply:
            if not reply.is_success:
                reply.read()
                raise AnswerError(reply.status_code, _reason(reply.text))
            for line in reply.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    done = True
                    continue
                try:
                    for choice in parse_json(data).get("choices") or ():
                        pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
                        finish = choice.get("finish_reason") or finish
                except (ValueError, AttributeError, TypeError):
                    raise AnswerError(0, f"an event of a stream is no JSON object: {data[:200]!r}") from None
        if not done:
            raise AnswerError(0, "a stream ended without [DONE]")
        return Answer("".join(pieces), finish, None)


def _reason(text: str) -> str:
    """The message of an error's body."""
    try:
        found = parse_json(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)[:300]
    except ValueError:
        return text[:300]


def _answers(body: Mapping[str, Any]) -> list[Answer]:
    """The choices of a whole answer, by index."""
    choices = sorted(body["choices"], key=lambda one: one.get("index") or 0)
    usage = body.get("usage") or {}
    count = usage.get("completion_tokens") if len(choices) == 1 else None
    return [_answer(choice, count) for choice in choices]


def _answer(choice: Mapping[str, Any], count: int | None) -> Answer:
    text = choice["message"].get("content") or "" if "message" in choice else choice["text"] or ""
    given = choice.get("logprobs")
    finish = choice.get("finish_reason")
    if not given:
        return Answer(text, finish, count)
    if given.get("content") is not None:  # the form of chat completions
        entries = given["content"]
        tokens = tuple(str(one["token"]) for one in entries)
        logprobs = tuple(_number(one["logprob"]) for one in entries)
        top = tuple(_best((str(e["token"]), e["logprob"]) for e in one.get("top_logprobs") or ()) for one in entries)
        return Answer(text, finish, count, tokens, logprobs, top)
    tokens = tuple(map(str, given.get("tokens") or ()))
    logprobs = tuple(_number(value) for value in given.get("token_logprobs") or ())
    top = tuple(_best((one or {}).items()) for one in given.get("top_logprobs") or ())
    return Answer(text, finish, count, tokens, logprobs, top)


def _best(pairs: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Log probabilities by token text; of equal texts the likeliest."""
    out: dict[str, float] = {}
    for token, value in pairs:
        number = _number(value)
        if number > out.get(token, -math.inf):
            out[token] = number
    return out


def _number(value: Any) -> float:
    return -math.inf if value is None else float(value)
