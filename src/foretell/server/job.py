"""The submissions of one HTTP request, and the bridge from the engine's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from time import perf_counter

from structlog.contextvars import get_contextvars

from foretell.core.errors import ForetellError, ModelError
from foretell.engine.request.result import Completion, Sink, StepTrace, Update
from foretell.engine.request.row import Submission
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, bad, of_engine
from foretell.server.logs import log, log_request
from foretell.server.metrics import RequestRecord


class ServerJob:
    """Starts all submissions, forwards their updates in order, and cancels running ones when it is closed.

    Memory is bounded: unread updates hold at most the submissions' outputs. Used on one event loop; ``sink``
    alone is called elsewhere.
    """

    def __init__(
        self, backend: Backend, submissions: Sequence[Submission], *, endpoint: str, stream: bool, arrived: float
    ) -> None:
        """arrived: perf_counter when the request came."""
        self.backend, self.submissions = backend, list(submissions)
        self.endpoint, self.stream, self.arrived = endpoint, stream, arrived
        self.completions: list[Completion | None] = [None] * len(self.submissions)
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # whose log lines carry the request's id
        self._delivered: deque[tuple[int, Update]] = deque()  # by the engine's thread
        self._is_woken = False
        self._ready: deque[tuple[int, Update]] = deque()
        self._news = asyncio.Event()
        self._running: set[int] = set()
        self._last: list[float | None] = [None] * len(self.submissions)  # when a choice last had tokens
        self.after: Callable[[Submission, Completion], None] | None = None
        """Called on the worker's thread once a request for one text has ended well."""

    def start(self) -> None:
        """Submit all or none. Raises ApiError."""
        for index, submission in enumerate(self.submissions):
            try:
                self.backend.service.submit(submission, self._sink(index))
            except ForetellError as error:
                self.close()
                raise of_engine(error) from None
            self._running.add(index)

    @property
    def is_done(self) -> bool:
        """Whether all have ended and been read."""
        return not self._running and not self._ready

    async def news(self, timeout_s: float | None = None) -> list[tuple[int, Update]]:
        """All updates since the last call, at least one; none on a timeout. Raises ApiError where one has failed."""
        if not self._ready and self._running:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        news = list(self._ready)
        self._ready.clear()
        for index, update in news:
            self._check(index, update)
        return news

    def close(self) -> None:
        """Cancel running submissions. Idempotent."""
        for index in sorted(self._running):
            self.backend.service.cancel(self.submissions[index].request_id)
        self._running.clear()

    def whole(self) -> list[Completion]:
        """The completions, once all have ended. Raises ApiError 408 where the timeout came before any output."""
        completions = [one for one in self.completions if one is not None]
        if all(one.finish_reason == "timeout" and not one.num_tokens for one in completions):
            limit = self.backend.options.request_timeout_s
            raise ApiError(
                408, f"nothing was written within {limit} s", code="request_timeout", kind="timeout",
                headers={"x-should-retry": "false"},  # OpenAI's clients would wait as long again, twice
            )  # fmt: skip
        return completions

    def _sink(self, index: int) -> Sink:
        def tell(update: Update) -> None:
            self._delivered.append((index, update))
            if not self._is_woken:  # one wake-up for all updates until the loop reads them
                self._is_woken = True
                with suppress(RuntimeError):  # the loop is closed: the update has no reader
                    self._loop.call_soon_threadsafe(self._wake, context=self._context)

        return tell

    def _wake(self) -> None:
        self._is_woken = False
        while self._delivered:
            index, update = self._delivered.popleft()
            try:
                self._note(index, update)
            except Exception as error:  # figures and logs are not worth the answer
                log("not noted", level="error", error=error)
            if index in self._running:
                self._ready.append((index, update))
                if update.is_last:
                    self.completions[index] = update.completion
                    self._running.discard(index)
                    self._go_on(update.completion)
        self._news.set()

    def _go_on(self, completion: Completion | None) -> None:
        if completion is None or completion.finish_reason != "stop" or self.after is None or len(self.submissions) > 1:
            return
        if self.backend.service.is_idle:
            with suppress(RuntimeError):  # the server is closing
                self.backend.worker.submit(self.after, self.submissions[0], completion)

    def _note(self, index: int, update: Update) -> None:
        """Record times and the log line, also of a choice whose client has left."""
        now = perf_counter()
        if update.pieces:
            last = self._last[index]
            if last is None:
                self.backend.metrics.first_token(now - self.arrived)
            else:
                self.backend.metrics.next_tokens(now - last)
            self._last[index] = now
        if update.is_last:
            record = self._record(index, update, now - self.arrived)
            self.backend.metrics.observe(record)
            prompt, text = None, None
            if self.backend.options.log_prompts and self.backend.tokenizer is not None:
                prompt = self.backend.tokenizer.decode(self.submissions[index].prompt_ids)
                text = update.completion.text if update.completion is not None else None
            log_request(record, prompt=prompt, text=text)

    def _record(self, index: int, update: Update, seconds: float) -> RequestRecord:
        known = get_contextvars().get("request_id") or update.request_id
        done = update.completion
        if update.error is not None:
            told = self._refusal(index, update.error)
            why = str(update.error) if told.status >= 500 else told.message
            return RequestRecord(
                known, "error", told.status, self.endpoint, self.stream, seconds_total=seconds, error=why
            )
        assert done is not None
        late = done.finish_reason == "timeout" and not done.num_tokens and len(self.submissions) == 1  # see ``whole``
        return RequestRecord.of(
            known, done, seconds_total=seconds, endpoint=self.endpoint, stream=self.stream, status=408 if late else 200
        )

    def _refusal(self, index: int, error: ForetellError) -> ApiError:
        """An error as the client gets it; the log line of the request has the same status and text."""
        params = self.submissions[index].params
        constrained = bool(params.logit_bias) or params.logits_processor is not None
        if isinstance(error, ModelError) and constrained:
            reason = getattr(params.logits_processor, "error", "")
            reason = reason or "logit_bias or the grammar leave nothing to choose"
            return bad(f"no token is possible any more: {reason}", None)
        return of_engine(error)

    def _check(self, index: int, update: Update) -> None:
        if update.error is not None:
            error = self._refusal(index, update.error)
            if error.status == 500:
                log("request failed", level="error", error=update.error)
            raise error
        if update.completion is not None and update.completion.finish_reason == "cancelled":
            raise ApiError(503, "the server is stopping", code="unavailable", headers={"retry-after": "5"})


async def finish(job: ServerJob) -> list[list[StepTrace]]:
    """Wait for all completions; returns the traces of each. Raises ApiError."""
    traces: list[list[StepTrace]] = [[] for _ in job.submissions]
    while not job.is_done:
        for index, update in await job.news():
            if update.trace is not None:
                traces[index].append(update.trace)
    return traces
