"""/metrics: what a scraper reads, against the snapshot and the records it was made of."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell.costs.outlook import Cell
from foretell.engine.recorder import MethodFigures
from foretell.engine.request.result import Completion
from foretell.model.target import DiskFigures
from foretell.server.metrics import FINISH_REASONS, HISTOGRAMS, PREFIX, Metrics, RequestRecord, render_several
from foretell.service.learning import LearnFigures
from foretell.service.snapshot import Snapshot
from foretell.theory.possible import Possible

NAME = 'a "quoted" \\ name\nin two lines'
BUSY = Snapshot(
    outlook=(Cell("eagle3", 256, 1, 3, 1.5), Cell("eagle3", 256, 8, 0, 1.0)),
    num_running=3,
    num_prefilling=1,
    num_waiting=7,
    kv_used_tokens=250,
    kv_capacity_tokens=1000,
    prefix_cached_tokens=40,
    is_speculating=True,
    num_speculative_tokens=3.5,
    speedup=1.75,
    possible=Possible(1.75, 4.0, 3.0, 2.5, 1.0, 0.25, 0.75, 0.25),
    num_steps=90,
    num_finished={"stop": 5, "length": 2, "moved": 1},
    num_rejected=4,
    num_preemptions=2,
    num_prompt_tokens=500,
    num_cached_prompt_tokens=120,
    num_generated_tokens=333,
    seconds_draft=1.0,
    seconds_target=2.5,
    seconds_rest=0.5,
    seconds_prefill=3.0,
    methods={
        "draft_model": MethodFigures(60, 240, 150, (60, 60, 60, 60), (60, 50, 30, 10)),
        "ngram": MethodFigures(7, 9, 4, (7, 2), (3, 1)),
    },
    drafter_failures={"draft_model": 4, "ngram": 0},
    internal_errors={"planner": 2, "step": 1},
    drafter_rests={"draft_model": 7.5, "ngram": 0.0},
)
RECORD = RequestRecord(
    request_id="r1",
    finish_reason="stop",
    num_prompt_tokens=11,
    num_tokens=20,
    num_steps=9,
    num_drafts=8,
    num_draft_tokens=24,
    num_accepted_tokens=12,
    seconds_queue=0.25,
    seconds_prefill=0.5,
    seconds_decode=2.0,
    seconds_total=3.0,
)


class FakeService:
    def __init__(self, now: Snapshot) -> None:
        self.now, self.asked = now, 0

    def snapshot(self) -> Snapshot:
        self.asked += 1
        return self.now


Sample = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: Metrics) -> Sample:
    """(name, labels but model_name) -> value. Fails where a line cannot be parsed or is told twice."""
    body, _ = metrics.render()
    samples: Sample = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(PREFIX):
                assert labels.pop("model_name") == NAME
            key = (sample.name, frozenset(labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Sample, name: str, **labels: str) -> float:
    return samples[PREFIX + name, frozenset(labels.items())]


def test_every_figure_of_the_snapshot_is_told() -> None:
    told = scrape(Metrics(FakeService(BUSY), NAME))
    gauges = {
        "num_requests_running": 3, "num_requests_prefilling": 1, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.25,
        "kv_cache_used_tokens": 250, "kv_cache_capacity_tokens": 1000, "prefix_cache_tokens": 40, "is_speculating": 1,
        "num_speculative_tokens": 3.5, "speedup": 1.75, "spec_decode_draft_overhead": 0.25, "speedup_possible": 4.0,
        "speedup_lost_guesses": 1.0, "speedup_lost_shape": 0.25, "speedup_lost_time": 0.75, "speedup_lost_width": 0.25,
    }  # fmt: skip
    counters = {
        "steps": 90, "num_preemptions": 2, "prompt_tokens": 500, "generation_tokens": 333, "prefix_cache_queries": 500,
        "prefix_cache_hits": 120, "requests_rejected": 4,
    }  # fmt: skip
    assert {name: value(told, name) for name in gauges} == gauges
    assert {name: value(told, f"{name}_total") for name in counters} == counters
    for cell in BUSY.outlook:
        labels = {"method": cell.method, "context": str(cell.context), "concurrency": str(cell.concurrency)}
        assert value(told, "planned_guesses", **labels) == cell.guesses
        assert value(told, "planned_speedup", **labels) == cell.speedup
    parts = {"draft": 1.0, "target": 2.5, "rest": 0.5, "prefill": 3.0}
    assert {part: value(told, "step_time_seconds_total", part=part) for part in parts} == parts


def test_what_is_possible_is_absent_where_it_is_not_known() -> None:
    told = scrape(Metrics(FakeService(replace(BUSY, possible=Possible(1.75, unknown="nothing was guessed"))), NAME))
    assert not [name for name, _ in told if "possible" in name or "_lost_" in name]
    assert value(told, "speedup") == 1.75


def test_speculation_is_told_by_method_and_position() -> None:
    told = scrape(Metrics(FakeService(BUSY), NAME))
    for method, figures in BUSY.methods.items():
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert value(told, f"spec_decode_{name}_total", method=method) == getattr(figures, name)
        for name, counts in (("draft", figures.drafted_per_pos), ("accepted", figures.accepted_per_pos)):
            key = f"spec_decode_num_{name}_tokens_per_pos_total"
            assert [value(told, key, method=method, position=str(k)) for k in range(len(counts))] == list(counts)
            assert (PREFIX + key, frozenset({"method": method, "position": str(len(counts))}.items())) not in told


def test_failures_and_rests_are_told_by_method() -> None:
    told = scrape(Metrics(FakeService(BUSY), NAME))
    assert {
        one: value(told, "internal_errors_total", place=one) for one in BUSY.internal_errors
    } == BUSY.internal_errors
    assert {m: value(told, "drafter_failures_total", method=m) for m in BUSY.drafter_failures} == BUSY.drafter_failures
    assert {m: value(told, "drafter_rest_seconds", method=m) for m in BUSY.drafter_rests} == BUSY.drafter_rests


def test_reasons_nobody_met_yet_stand_at_zero_and_unknown_ones_are_told() -> None:
    told = scrape(Metrics(FakeService(BUSY), NAME))
    reasons = dict.fromkeys(FINISH_REASONS, 0) | BUSY.num_finished
    assert {r: value(told, "request_success_total", finished_reason=r) for r in reasons} == reasons


def test_an_idle_service_divides_nothing_by_zero() -> None:
    told = scrape(Metrics(FakeService(Snapshot()), NAME))
    assert value(told, "kv_cache_usage_perc") == 0
    assert value(told, "spec_decode_draft_overhead") == 0
    assert (PREFIX + "speedup", frozenset()) not in told, "nothing is decoded: there is nothing to compare"


def test_each_scrape_reads_one_snapshot_and_counts_nothing_twice() -> None:
    service = FakeService(BUSY)
    metrics = Metrics(service, NAME)
    assert service.asked == 0
    first, again = scrape(metrics), scrape(metrics)
    assert service.asked == 2
    ours = {key: told for key, told in first.items() if key[0].startswith(PREFIX)}
    assert ours == {key: told for key, told in again.items() if key[0].startswith(PREFIX)}
    service.now = replace(BUSY, num_steps=91)
    assert value(scrape(metrics), "steps_total") == 91


def test_histograms_hold_what_was_observed() -> None:
    metrics = Metrics(FakeService(Snapshot()), NAME)
    metrics.first_token(0.75)
    for seconds in (0.02, 0.04):
        metrics.next_tokens(seconds)
    metrics.observe(RECORD)
    metrics.observe(replace(RECORD, num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0))
    told = scrape(metrics)
    sums = {
        "time_to_first_token_seconds": (1, 0.75), "inter_token_latency_seconds": (2, 0.06),
        "e2e_request_latency_seconds": (2, 6.0), "request_queue_time_seconds": (2, 0.5),
        "request_prefill_time_seconds": (2, 1.0), "request_decode_time_seconds": (2, 4.0),
        "request_prompt_tokens": (2, 22), "request_generation_tokens": (2, 40),
        "request_time_per_output_token_seconds": (2, 0.2), "request_mean_acceptance_length": (1, 2.5),
    }  # fmt: skip
    assert set(sums) == set(HISTOGRAMS)
    for name, (count, total) in sums.items():
        assert value(told, f"{name}_count") == count
        assert value(told, f"{name}_sum") == pytest.approx(total)
        buckets = [v for (n, _), v in told.items() if n == f"{PREFIX}{name}_bucket"]
        assert buckets == sorted(buckets)
        assert value(told, f"{name}_bucket", le="+Inf") == count
    assert value(told, "time_to_first_token_seconds_bucket", le="0.5") == 0
    assert value(told, "time_to_first_token_seconds_bucket", le="1.0") == 1


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_requests_cut_short_say_nothing_of_times(reason: str) -> None:
    metrics = Metrics(FakeService(Snapshot()), NAME)
    metrics.observe(replace(RECORD, finish_reason=reason))
    told = scrape(metrics)
    assert [value(told, f"{name}_count") for name in HISTOGRAMS] == [0] * len(HISTOGRAMS)


def test_a_request_without_tokens_is_observed() -> None:
    metrics = Metrics(FakeService(Snapshot()), NAME)
    metrics.observe(RequestRecord("r", "timeout", seconds_total=1.0))
    told = scrape(metrics)
    assert value(told, "e2e_request_latency_seconds_count") == 1
    assert value(told, "request_time_per_output_token_seconds_count") == 0


def test_types_help_and_content_type() -> None:
    body, content_type = Metrics(FakeService(BUSY), NAME).render()
    assert content_type.startswith("text/plain; version=")
    lines = body.decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert names == [line.split()[2] for line in lines if line.startswith("# HELP")]
    kinds = {family.name: family.type for family in text_string_to_metric_families(body.decode())}
    assert kinds[f"{PREFIX}spec_decode_num_drafts"] == "counter"
    assert kinds[f"{PREFIX}num_requests_running"] == "gauge"
    assert kinds[f"{PREFIX}time_to_first_token_seconds"] == "histogram"
    assert not [name for name in kinds if name.endswith("_created")]
    assert "process_resident_memory_bytes" in kinds


def test_two_servers_of_one_process_do_not_mix() -> None:
    one, two = Metrics(FakeService(Snapshot()), NAME), Metrics(FakeService(Snapshot()), NAME)
    one.observe(RECORD)
    assert value(scrape(one), "request_prompt_tokens_count") == 1
    assert value(scrape(two), "request_prompt_tokens_count") == 0


def test_observations_from_many_threads_are_all_counted() -> None:
    metrics = Metrics(FakeService(BUSY), NAME)

    def work() -> None:
        for _ in range(200):
            metrics.observe(RECORD)
            metrics.first_token(0.1)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    scrape(metrics)
    for thread in threads:
        thread.join()
    told = scrape(metrics)
    assert value(told, "e2e_request_latency_seconds_count") == 800
    assert value(told, "time_to_first_token_seconds_count") == 800


def test_figures_of_a_record() -> None:
    assert RECORD.acceptance_rate == 0.5
    assert RECORD.mean_acceptance_length == 2.5
    plain = RequestRecord("r", "length", num_tokens=3, num_steps=3)
    assert (plain.acceptance_rate, plain.mean_acceptance_length) == (None, None)


def test_a_record_of_a_completion() -> None:
    figures = {
        "num_prompt_tokens": 5, "num_tokens": 8, "num_steps": 4, "num_draft_tokens": 9, "num_accepted_tokens": 4,
        "seconds_queue": 0.25, "seconds_prefill": 0.5, "seconds_decode": 2.0, "num_cached_tokens": 3, "num_preemptions": 1,
    }  # fmt: skip
    done = Completion(
        text="abc", token_ids=[1] * 8, finish_reason="length", seed=1, tokens_per_second=4.0, pieces=[],
        num_draft_tokens_per_pos=[3, 3, 3], num_accepted_tokens_per_pos=[3, 1, 0], mean_acceptance_length=2.0,
        acceptance_rate=4 / 9, config={"speculative": {"method": "ngram"}},
        steps=[(3, 2), (3, 1), (0, 0), (3, 1)], **figures,
    )  # fmt: skip
    record = RequestRecord.of("r9", done, seconds_total=3.0, endpoint="/v1/completions", stream=True)
    assert {name: getattr(record, name) for name in figures} == figures
    assert (record.request_id, record.finish_reason, record.status) == ("r9", "length", 200)
    assert (record.method, record.endpoint, record.stream, record.seconds_total) == (
        "ngram",
        "/v1/completions",
        True,
        3.0,
    )
    assert (record.num_drafts, record.mean_acceptance_length) == (3, 1 + 4 / 3)
    assert RequestRecord.of("r", replace(done, finish_reason=None, config={}), seconds_total=0).method == "none"


def test_learning_and_drift_are_told_and_nothing_of_learning_where_nothing_learns() -> None:
    learn = LearnFigures(is_learning=True, version=3, acceptance=0.5, held_bytes=99, num_adapters=2, num_texts=7,
                         num_skipped=1, num_updates=4, num_swaps=3, num_refused=1, num_reverts=5, num_drifts=6,
                         num_failures=8, seconds_learning=2.5, seconds_serving=0.25)  # fmt: skip
    now = Snapshot(learn=learn, drifts={"eagle3": 2}, recent_acceptance={"eagle3": 0.75, "medusa": None})
    told = scrape(Metrics(FakeService(now), NAME))
    gauges = {"is_learning": 1, "version": 3, "acceptance": 0.5, "held_bytes": 99, "adapters": 2}
    counters = {"texts": 7, "skipped": 1, "updates": 4, "swaps": 3, "refused": 1, "reverts": 5, "drifts": 6,
                "failures": 8, "seconds_learning": 2.5, "seconds_serving": 0.25}  # fmt: skip
    assert {name: value(told, f"learn_{name}") for name in gauges} == gauges
    assert {name: value(told, f"learn_{name}_total") for name in counters} == counters
    assert len(gauges) + len(counters) == len(fields(LearnFigures)), "every figure"
    assert value(told, "acceptance_drifts_total", method="eagle3") == 2
    assert value(told, "recent_acceptance", method="eagle3") == 0.75
    assert (PREFIX + "recent_acceptance", frozenset({("method", "medusa")})) not in told
    silent = scrape(Metrics(FakeService(Snapshot()), NAME))
    assert not [name for name, _ in silent if name.startswith(PREFIX + "learn_")]


DISK = DiskFigures(900, 300, 70, 50, 30, 10, 8, 6, 1.25)


def test_experts_on_disk_are_told_where_there_are_any() -> None:
    told = scrape(Metrics(FakeService(Snapshot(disk=DISK)), NAME))
    assert [value(told, f"experts_{name}") for name in ("total_bytes", "held_bytes", "hit_rate")] == [900, 300, 0.75]
    counters = ("bytes_read", "bytes_ahead", "hits", "misses", "seconds_waited")
    assert [value(told, f"experts_{name}_total") for name in counters] == [70, 50, 30, 10, 1.25]
    silent = scrape(Metrics(FakeService(Snapshot()), NAME))
    assert not [name for name, _ in silent if name.startswith(PREFIX + "experts_")]


# -- the document ----------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2]


def families() -> list[tuple[str, str, str, str]]:
    """(name, kind, labels but model_name, text) of everything that a server can tell."""
    learn = LearnFigures(is_learning=True, version=1, acceptance=0.5, held_bytes=1, num_adapters=1)
    now = replace(BUSY, learn=learn, disk=DISK, drifts={"ngram": 1}, recent_acceptance={"ngram": 0.5})
    metrics = Metrics(FakeService(now), NAME)
    metrics.observe(RECORD)
    found = []
    told = render_several([metrics.families()], {NAME: (True, 1)})[0].decode()
    for family in text_string_to_metric_families(told):
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        found.append((family.name, family.type, ", ".join(sorted(labels)), family.documentation))
    return found


def test_the_document_has_every_metric_and_no_other() -> None:
    text = (DOCS / "docs" / "metrics.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| `foretell:", "| `process_"))
    ]
    told = {(row[0].strip("`"), row[1], row[2].strip(), row[3]) for row in rows}
    assert told == set(families())
    assert len(rows) == len(told)


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((DOCS / "examples" / "grafana.json").read_text())
    metrics = Metrics(FakeService(BUSY), NAME)
    metrics.observe(RECORD)
    samples = {
        sample.name
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
    }
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"foretell:\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= samples
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 12


def test_a_figure_that_cannot_be_told_leaves_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise OSError("the sensor is gone")

    monkeypatch.setattr("foretell.server.metrics._Figures._counters", broken)
    body, _ = Metrics(FakeService(BUSY), "toy").render()
    assert b"foretell:kv_cache_used_tokens" in body
    assert b"foretell:drafter_failures_total" in body
    assert b"foretell:prompt_tokens" not in body
    assert [record.getMessage() for record in caplog.records] == ["figures left out of /metrics"]
