"""``/metrics`` in Prometheus' text form: vLLM's names and definitions under the prefix ``foretell:``.

Counters and gauges are read from ``Service.snapshot()`` at each scrape, so nothing is counted twice; histograms are
observed by the server, which alone knows when a request arrived and when its first token was sent.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import isnan
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from foretell.engine.request.result import Completion
from foretell.service.snapshot import Snapshot

logger = logging.getLogger(__name__)
PREFIX = "foretell:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "cancelled", "timeout", "error")
"""Exposed at 0 from the start: a rate over a series that starts with its first event misses that event."""

LEARN_GAUGES = {
    "is_learning": "1 where the server learns: not paused, and its learner runs.",
    "version": "Of the learned drafter that serves; 0 is the one that was loaded.",
    "acceptance": "Share of first guesses kept by drafters that learn, of late.",
    "held_bytes": "Texts held to learn from.",
    "num_adapters": "Drafters that learn.",
}
LEARN_COUNTERS = {
    "num_texts": "Texts learned from or held out.",
    "num_skipped": "Requests of which nothing was kept.",
    "num_updates": "Updates made.",
    "num_swaps": "Updates that passed the gate and serve.",
    "num_refused": "Updates that the gate refused.",
    "num_reverts": "Times that earlier weights were taken back.",
    "num_drifts": "Falls of acceptance seen by drafters that learn.",
    "num_failures": "Learners that ended; drafters serve on as they are.",
    "seconds_learning": "Seconds of the learner's own work.",
    "seconds_serving": "Seconds of the engine's thread for capturing and swapping.",
}

POSSIBLE = {
    "speedup_possible": ("possible", "Speedup if all guesses were right, for nothing; absent where it is not known."),
    "speedup_lost_guesses": ("guesses", "Of it lost by guesses that are wrong or not made."),
    "speedup_lost_shape": ("shape", "Of it lost by guesses beside those that are kept."),
    "speedup_lost_time": ("time", "Of it lost by the drafter's time."),
    "speedup_lost_width": ("width", "Of it lost by passes over guesses deeper than those that are kept."),
}
"""Gauges, to the field of ``Possible``."""

DISK_GAUGES = {
    "total_bytes": "Of all experts, as they lie in memory.",
    "held_bytes": "Of the experts that are held in memory, at most.",
    "hit_rate": "Share of the experts that layers needed which were held, 0 to 1.",
}
DISK_COUNTERS = {
    "bytes_read": "Read of the files because a layer needed an expert.",
    "bytes_ahead": "Of files that the system was asked to read before a layer needed them.",
    "hits": "Experts that layers needed and that were held.",
    "misses": "Experts that layers needed and that were read.",
    "seconds_waited": "Seconds of passes that waited for experts.",
}

Values = Mapping[tuple[str, ...], float]
"""Values of the labels after model_name, to what is counted."""
Known = Mapping[tuple[str, ...], float | None]
"""The same where some are not known."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
SECONDS_A_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16, 32)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token's leaving.", SECONDS),
    "inter_token_latency_seconds": (
        "Between the tokens of one step of a request and those of its next.",
        SECONDS_A_TOKEN,
    ),
    "request_time_per_output_token_seconds": ("A request's decode seconds by its tokens.", SECONDS_A_TOKEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", SECONDS),
    "request_queue_time_seconds": ("Waiting to be admitted.", SECONDS),
    "request_prefill_time_seconds": ("Prefill of a request.", SECONDS),
    "request_decode_time_seconds": ("Decode steps of a request.", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt, reused ones too.", TOKENS),
    "request_generation_tokens": ("Tokens of an output.", TOKENS),
    "request_mean_acceptance_length": ("1 + accepted / steps that guessed, of a request.", LENGTHS),
}


@dataclass(frozen=True)
class RequestRecord:
    """One request that has ended: the values of its log line and of the histograms. n choices are n records."""

    request_id: str
    finish_reason: str  # one of FINISH_REASONS
    status: int = 200  # HTTP
    endpoint: str = ""  # path
    stream: bool = False
    method: str = "none"  # of speculation
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix store
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0  # steps that guessed
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    seconds_queue: float = 0.0
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0
    seconds_total: float = 0.0  # from arrival to the end, as the server saw it
    error: str | None = None  # one line

    @classmethod
    def of(
        cls,
        request_id: str,
        completion: Completion,
        *,
        seconds_total: float,
        endpoint: str = "",
        stream: bool = False,
        status: int = 200,
    ) -> "RequestRecord":
        """The record of a choice that the engine has ended."""
        return cls(
            request_id=request_id,
            finish_reason=completion.finish_reason or "error",
            status=status,
            endpoint=endpoint,
            stream=stream,
            method=str((completion.config.get("speculative") or {}).get("method", "none")),
            num_drafts=sum(depth > 0 for depth, _ in completion.steps),
            seconds_total=seconds_total,
            **{name: getattr(completion, name) for name in _SAME},
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / steps that guessed, as in vLLM; None where none did."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


_SAME = (
    "num_prompt_tokens", "num_cached_tokens", "num_tokens", "num_steps", "num_draft_tokens", "num_accepted_tokens",
    "num_preemptions", "seconds_queue", "seconds_prefill", "seconds_decode",
)  # fmt: skip
"""Fields with the same name in a record and a completion."""


class Observed(Protocol):
    """The interface of a service that metrics need."""

    def snapshot(self) -> Snapshot:
        """The figures of now; thread-safe and cheap."""
        ...


class Metrics:
    """A server's figures, in a registry of its own: two servers in one process do not mix. Thread-safe."""

    def __init__(self, service: Observed, model_name: str) -> None:
        self._histograms = {
            # registry=None: ``_Figures`` hands them out, without their *_created series.
            name: Histogram(PREFIX + name, text, ["model_name"], registry=None, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._observers = {name: histogram.labels(model_name) for name, histogram in self._histograms.items()}
        self._registry = CollectorRegistry()
        self._figures = _Figures(service, model_name, self._histograms)
        self._registry.register(self._figures)
        ProcessCollector(registry=self._registry)

    def first_token(self, seconds: float) -> None:
        """A request's first token was sent, the given seconds after the request's arrival."""
        self._see("time_to_first_token_seconds", seconds)

    def next_tokens(self, seconds: float) -> None:
        """The tokens of a request's next step were sent, the given seconds after the step before."""
        self._see("inter_token_latency_seconds", seconds)

    def observe(self, record: RequestRecord) -> None:
        """A request has ended. Cancelled and failed requests are not counted in the times."""
        if record.finish_reason in ("cancelled", "error"):
            return
        self._see("e2e_request_latency_seconds", record.seconds_total)
        self._see("request_queue_time_seconds", record.seconds_queue)
        self._see("request_prefill_time_seconds", record.seconds_prefill)
        self._see("request_decode_time_seconds", record.seconds_decode)
        self._see("request_prompt_tokens", record.num_prompt_tokens)
        self._see("request_generation_tokens", record.num_tokens)
        if record.num_tokens:
            self._see("request_time_per_output_token_seconds", record.seconds_decode / record.num_tokens)
        if record.mean_acceptance_length is not None:
            self._see("request_mean_acceptance_length", record.mean_acceptance_length)

    def render(self) -> tuple[bytes, str]:
        """The body of ``GET /metrics``, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE

    def families(self) -> Iterator[Metric]:
        """All but those of the process."""
        return self._figures.collect()

    def _see(self, name: str, value: float) -> None:
        self._observers[name].observe(value)


def render_several(figures: Iterable[Iterable[Metric]], loads: Mapping[str, tuple[bool, int]]) -> tuple[bytes, str]:
    """``Metrics.render`` of several models, each family once: ``model_name`` tells them apart. figures: ``families`` of
    those that are loaded, and ``lasting`` of earlier loads. loads: of each model by its name, whether it is loaded, and how
    often it was."""
    is_loaded = GaugeMetricFamily(PREFIX + "model_loaded", "1 of a model in memory.", labels=["model_name"])
    times = CounterMetricFamily(PREFIX + "model_loads", "Times that a model was loaded.", labels=["model_name"])
    for name, (now, count) in loads.items():
        is_loaded.add_metric([name], float(now))
        times.add_metric([name], count)
    found = _joined([is_loaded, times, *chain(*figures), *ProcessCollector(registry=None).collect()])
    made: Any = SimpleNamespace(collect=lambda: found)
    return generate_latest(made), CONTENT_TYPE


def lasting(families: Iterable[Metric]) -> list[Metric]:
    """Those that only grow, each once: of a model that is unloaded they go on from here when it is loaded again."""
    return _joined(family for family in families if family.type in ("counter", "histogram"))


def _joined(families: Iterable[Metric]) -> list[Metric]:
    """Each family once, samples of equal labels added up."""
    found, samples = dict[str, Metric](), dict[tuple[str, ...], Sample]()
    for family in families:
        found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            key = (family.name, sample.name, *chain(*sample.labels.items()))
            known = samples.get(key)
            samples[key] = sample if known is None else sample._replace(value=known.value + sample.value)
    for (name, *_), sample in samples.items():
        found[name].samples.append(sample)
    return list(found.values())


class _Figures(Collector):
    """One snapshot a scrape, so that all values are of the same moment."""

    def __init__(self, service: Observed, model_name: str, histograms: Mapping[str, Histogram]) -> None:
        self.service, self.model_name, self.histograms = service, model_name, histograms

    def collect(self) -> Iterator[Metric]:
        """All families."""
        now = self.service.snapshot()
        for part in (
            self._gauges, self._outlook, self._counters, self._speculation, self._failures, self._disk, self._learning,
        ):  # fmt: skip
            try:
                yield from part(now)
            except Exception:  # the others are there all the same
                logger.exception("figures left out of /metrics")
        for histogram in self.histograms.values():
            for family in histogram.collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family

    def _gauges(self, now: Snapshot) -> Iterator[Metric]:
        decode = now.seconds_draft + now.seconds_target + now.seconds_rest
        gauges: dict[str, tuple[str, float | None]] = {
            "num_requests_running": ("Requests being decoded.", now.num_running),
            "num_requests_prefilling": ("Requests whose prompt is being read.", now.num_prefilling),
            "num_requests_waiting": ("Requests in the queue.", now.num_waiting),
            "kv_cache_usage_perc": ("KV slots in use, 0 to 1.", _share(now.kv_used_tokens, now.kv_capacity_tokens)),
            "kv_cache_used_tokens": ("KV slots in use.", now.kv_used_tokens),
            "kv_cache_capacity_tokens": ("KV slots there are.", now.kv_capacity_tokens),
            "prefix_cache_tokens": ("Tokens whose KV is kept for requests to come.", now.prefix_cached_tokens),
            "is_speculating": ("1 where the last step guessed.", now.is_speculating),
            "num_speculative_tokens": ("Guesses planned a row in the last step, mean.", now.num_speculative_tokens),
            "speedup": (
                "Live estimate: tokens a second against this engine with speculation off; absent where it is not measured.",
                now.speedup,
            ),
            **{name: (text, getattr(now.possible, field, None)) for name, (field, text) in POSSIBLE.items()},
            "spec_decode_draft_overhead": (
                "Drafting's share of the seconds of all decode steps so far, 0 to 1.", _share(now.seconds_draft, decode)
            ),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text, {(): value})

    def _outlook(self, now: Snapshot) -> Iterator[Metric]:
        """The plan by length of text and number of requests."""
        texts = {
            "guesses": "Guesses in a line that auto would make, by requests at once and tokens of text.",
            "speedup": "Expected of these guesses, against speculation off.",
        }
        for name, text in texts.items():
            cells: Known = {
                (cell.method, str(cell.context), str(cell.concurrency)): float(getattr(cell, name))
                for cell in now.outlook
            }
            yield self._gauge(f"planned_{name}", text, cells, "method", "context", "concurrency")

    def _counters(self, now: Snapshot) -> Iterator[Metric]:
        counters = {
            "steps": ("Decode steps of the batch.", now.num_steps),
            "num_preemptions": ("Requests put back to make room.", now.num_preemptions),
            "prompt_tokens": ("Prompt tokens taken in, reused ones too.", now.num_prompt_tokens),
            "generation_tokens": ("Tokens written.", now.num_generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix store.", now.num_prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the prefix store.", now.num_cached_prompt_tokens),
            "requests_rejected": ("Requests refused because the queue was full.", now.num_rejected),
        }
        for name, (text, value) in counters.items():
            yield self._counter(name, text, {(): value})
        finished: Values = {
            (reason,): now.num_finished.get(reason, 0)
            for reason in {**dict.fromkeys(FINISH_REASONS), **now.num_finished}
        }
        yield self._counter("request_success", "Requests that ended, by reason.", finished, "finished_reason")
        parts = ("draft", "target", "rest", "prefill")
        seconds: Values = {(part,): getattr(now, f"seconds_{part}") for part in parts}
        yield self._counter("step_time_seconds", "Seconds of the engine's thread, by what it did.", seconds, "part")

    def _speculation(self, now: Snapshot) -> Iterator[Metric]:
        methods = now.methods
        totals = {
            "num_drafts": "Steps of a request that proposed anything.",
            "num_draft_tokens": "Tokens guessed.",
            "num_accepted_tokens": "Guesses accepted.",
        }
        for name, text in totals.items():
            values: Values = {(method,): getattr(figures, name) for method, figures in methods.items()}
            yield self._counter(f"spec_decode_{name}", text, values, "method")
        positions = {
            "num_draft_tokens_per_pos": ("drafted_per_pos", "Drafts that reached the position."),
            "num_accepted_tokens_per_pos": ("accepted_per_pos", "Drafts accepted up to the position and there."),
        }
        for name, (field, text) in positions.items():
            counts: Values = {
                (method, str(position)): count
                for method, figures in methods.items()
                for position, count in enumerate(getattr(figures, field))
            }
            yield self._counter(f"spec_decode_{name}", text, counts, "method", "position")

    def _failures(self, now: Snapshot) -> Iterator[Metric]:
        """Drafters that raised: their requests went on without guesses."""
        values: Values = {(method,): count for method, count in now.drafter_failures.items()}
        yield self._counter(
            "drafter_failures", "Drafters that raised; their requests lost guesses alone.", values, "method"
        )
        places: Values = {(place,): count for place, count in now.internal_errors.items()}
        text = "Errors of the engine's own parts, by place; those of drafters are counted apart."
        yield self._counter("internal_errors", text, places, "place")
        text = "Seconds for which a method is not tried after failures in a row; 0 where it is."
        rests: Values = {(method,): seconds for method, seconds in now.drafter_rests.items()}
        yield self._gauge("drafter_rest_seconds", text, rests, "method")

    def _disk(self, now: Snapshot) -> Iterator[Metric]:
        """Of a mixture whose experts are read as they are needed."""
        if now.disk is not None:
            for name, text in DISK_GAUGES.items():
                yield self._gauge(f"experts_{name}", text, {(): getattr(now.disk, name)})
            for name, text in DISK_COUNTERS.items():
                yield self._counter(f"experts_{name}", text, {(): getattr(now.disk, name)})

    def _learning(self, now: Snapshot) -> Iterator[Metric]:
        """Drift is reported by every service, the others by those that learn."""
        drifts: Values = {(method,): count for method, count in now.drifts.items()}
        yield self._counter("acceptance_drifts", "Falls of acceptance against its own history.", drifts, "method")
        recent: Known = {(method,): rate for method, rate in now.recent_acceptance.items()}
        yield self._gauge("recent_acceptance", "Share of first guesses kept, of late.", recent, "method")
        if now.learn is None:
            return
        for name, text in LEARN_GAUGES.items():
            yield self._gauge(f"learn_{name.removeprefix('num_')}", text, {(): getattr(now.learn, name)})
        for name, text in LEARN_COUNTERS.items():
            yield self._counter(f"learn_{name.removeprefix('num_')}", text, {(): getattr(now.learn, name)})

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        """A family whose samples are named ``..._total``."""
        return self._filled(CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels]), values)

    def _gauge(self, name: str, text: str, values: Known, *labels: str) -> Metric:
        """A family of what is known: None and NaN are left out."""
        known = {given: value for given, value in values.items() if value is not None and not isnan(value)}
        return self._filled(GaugeMetricFamily(PREFIX + name, text, labels=["model_name", *labels]), known)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
        for given, value in values.items():
            family.add_metric([self.model_name, *given], float(value))
        return family


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
