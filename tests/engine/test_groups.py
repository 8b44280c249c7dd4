"""Rows of one batch with several ways of guessing: each row draws with its own seed, whatever stands above it.

Under a rule that reads q the text depends on the draft's own draws. So a row whose drafter drew with another row's seed
has another text than alone, though not a wrong distribution: no statistical test of one row sees it.
"""

import threading
from typing import Any

import pytest

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission, Update
from foretell.draft.config import Loader
from foretell.model.target import CausalModel
from tests.engine.harness import ToyTokenizer, table

PAIR = {"method": "draft_model", "model": "table", "verify": "rejection"}
WAYS: tuple[dict[str, Any], ...] = (
    {**PAIR, "num_speculative_tokens": 4},
    {**PAIR, "shape": "static/branching=3x1"},
    {**PAIR, "shape": "static/branching=2x1", "draws": "iid"},
    {**PAIR, "num_speculative_tokens": 3, "verify": "block"},
)
"""No two of them can be guessed by one drafter and judged by one verifier, so each is a group of its own."""


class TableEngine(Engine):
    @property
    def loader(self) -> Loader:
        def load(name: str, weights: str = "auto", *, checked: bool = True) -> CausalModel:
            return table(2, blur=0.5)

        return Loader(self.model, load, lambda name: None)  # a table has no tokenizer


def engine(way: dict[str, Any]) -> Engine:
    return TableEngine(table(1), ToyTokenizer(), speculative=way)


def together(requests: list[tuple[dict[str, Any], Request]]) -> list[list[int]]:
    """The tokens of requests that run in one batch: the first holds the engine's thread until all have been sent."""
    service = Service(
        engine(WAYS[0]), ServiceOptions(max_num_seqs=8, max_model_len=200, speculation="on", kv_memory_gib=0.05)
    )
    sent, heard, news = threading.Event(), {}, threading.Condition()

    def sink(update: Update) -> None:
        assert sent.wait(30)
        if update.is_last:
            with news:
                heard[update.request_id] = update
                news.notify_all()

    service.start()
    try:
        for number, (way, request) in enumerate(requests):
            submission = Submission(str(number), list(request.prompt), request.params, speculative=service.method(way))
            service.submit(submission, sink)
        sent.set()
        with news:
            assert news.wait_for(lambda: len(heard) == len(requests), 60)
    finally:
        service.close()
    return [heard[str(number)].completion.token_ids for number in range(len(requests))]


@pytest.mark.parametrize("same_prompt", [True, False])
def test_a_row_of_any_group_has_its_solo_text(same_prompt: bool) -> None:
    requests = []
    for number, way in enumerate(WAYS * 2):
        prompt = [3, 1, 4, 1, 5] if same_prompt else [number, 3, 1, 4, *range(number)]
        params = SamplingParams(seed=100 + number, max_new_tokens=24, ignore_eos=True)
        requests.append((way, Request(prompt, params)))
    found = together(requests)
    alone = [engine(way).generate(request.prompt, request.params).token_ids for way, request in requests]
    assert found == alone
    assert len({tuple(tokens) for tokens in found}) == len(found), "seeds matter"
