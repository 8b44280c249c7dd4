"""Several plain passes in one call: whatever ends a row, all is as if they had been made one by one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Completion, Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.engine.batch import Batch
from foretell.engine.speculation import Speculation
from foretell.kernels.native import library
from foretell.model.llama.run.native import MOST_PASSES
from foretell.model.target import Target
from tests.engine.harness import started
from tests.service.test_service import Mailbox

pytestmark = pytest.mark.skipif(library()[0] is None, reason="there are no native passes here")
BASE = SamplingParams(max_new_tokens=40, seed=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = Engine.load("bundled")
    assert made.model.most_passes == MOST_PASSES
    return made


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Passes of each call."""
    made: list[int] = []
    decode = Target.decode

    def counted(self: Target, *given: Any) -> Any:
        found = decode(self, *given)
        made.append(len(found.tokens))
        return found

    monkeypatch.setattr(Target, "decode", counted)
    return iter([made])


def told(completion: Completion) -> tuple[Any, ...]:
    """All that a completion says, but for times."""
    return (
        completion.token_ids, completion.text, completion.finish_reason, completion.steps, completion.num_steps,
        completion.pieces,
    )  # fmt: skip


def both(engine: Engine, requests: list[Request], **options: Any) -> list[Completion]:
    """Of the requests, each as it is one by one."""
    model: Any = engine.model
    found = engine.generate_batch(requests, **options)
    model.most_passes, many = 1, model.most_passes
    try:
        slow = engine.generate_batch(requests, **options)
    finally:
        model.most_passes = many
    assert list(map(told, found)) == list(map(told, slow))
    return found


KINDS = [
    BASE,
    replace(BASE, temperature=0.0),
    replace(BASE, temperature=0.6, top_k=20, top_p=0.9),
    replace(BASE, temperature=1.2, min_p=0.05, ignore_eos=True),
    *(replace(BASE, max_new_tokens=count, ignore_eos=True) for count in (1, 2, 3, 4, 5, 6, 9)),
]


@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_that_of_single_steps(engine: Engine, runs: Iterator[list[int]], params: SamplingParams) -> None:
    before = engine.recorder.num_steps, engine.recorder.num_generated_tokens
    requests = [Request("def add(a, b):\n", replace(params, seed=seed)) for seed in range(6)]
    found = [both(engine, [request])[0] for request in requests]
    assert [told(one) for one in found] == list(map(told, both(engine, requests, batch_size=3)))
    tokens = sum(one.num_tokens for one in found)
    assert engine.recorder.num_generated_tokens - before[1] == 4 * tokens
    made = next(runs)
    assert max(made, default=1) == (4 if params.max_new_tokens > 6 else 2 if params.max_new_tokens > 3 else 1)
    assert sum(made) <= 3 * tokens + 3 * len(made), "few passes are made in vain"


@pytest.mark.parametrize("params", KINDS[:4])
def test_a_row_ends_at_any_token_of_a_call(engine: Engine, runs: Iterator[list[int]], params: SamplingParams) -> None:
    """With a stop text or a stop token that a text of single steps has at this place."""
    ids = engine.generate("def add(a, b):\n", replace(params, ignore_eos=True))
    for place in range(4, 16):
        token, text = ids.token_ids[place], "".join(piece.text for piece in ids.pieces[place : place + 2])
        stops = [replace(params, stop=(text,)), replace(params, stop_token_ids=(token,))]
        ended = both(engine, [Request("def add(a, b):\n", each) for each in (*stops, params)], batch_size=3)
        assert ended[0].num_tokens <= place + 2
        assert ended[1].num_tokens <= place + 1
    assert max(next(runs)) == MOST_PASSES


def test_a_draw_that_the_logits_do_not_decide_ends_the_call(engine: Engine, runs: Iterator[list[int]]) -> None:
    """top-k above what the kernel takes: no draw is decided in it, and every call is of one pass."""
    both(engine, [Request("def add(a, b):\n", replace(BASE, top_k=300))])
    assert set(next(runs)) == {1}


def looked_on(engine: Engine) -> list[tuple[str, Engine, SamplingParams]]:
    """Cases in which something is asked of every pass, or somebody may guess."""
    observed = engine.with_method("none")
    observed.observers.append(lambda event: None)
    return [
        ("observer", observed, BASE),
        ("logprobs", engine, replace(BASE, logprobs=1)),
        ("penalty", engine, replace(BASE, presence_penalty=0.5)),
        ("bias", engine, replace(BASE, logit_bias={5: 1.0})),
        ("rule", engine.with_method({"method": "none", "verify": "rejection"}), BASE),
        ("guesses", engine.with_method("ngram"), BASE),
    ]


@pytest.mark.parametrize("case", range(6))
def test_who_asks_more_of_a_pass_gets_single_steps(engine: Engine, runs: Iterator[list[int]], case: int) -> None:
    _, made, params = looked_on(engine)[case]
    both(made, [Request("def add(a, b):\n", params)])
    assert not next(runs)


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_a_service_says_the_same_in_fewer_updates(engine: Engine, runs: Iterator[list[int]], speculation: str) -> None:
    """Beside each other, some of them cancelled by their limits; where a planner rests it learns of every step."""
    lengths = [5, 40, 23, 11]
    made = Service(engine, ServiceOptions(speculation=speculation, max_num_seqs=2, max_model_len=200))
    box, ids = Mailbox(), engine.tokenizer.encode("def add(a, b):\n")  # type: ignore[union-attr]
    with started(made):
        for index, length in enumerate(lengths):
            params = replace(BASE, seed=index, max_new_tokens=length, ignore_eos=True)
            made.submit(Submission(str(index), ids, params), box.hear)
        ended = [box.last(str(index)).completion for index in range(len(lengths))]
    assert max(next(runs)) == MOST_PASSES, "within the service"
    for index, (length, completion) in enumerate(zip(lengths, ended, strict=True)):
        alone = replace(BASE, seed=index, max_new_tokens=length, ignore_eos=True)
        assert told(completion) == told(engine.generate(ids, alone))
        updates = box.updates[str(index)]
        assert [piece for update in updates for piece in update.pieces] == completion.pieces
        assert max(len(update.pieces) for update in updates) <= MOST_PASSES
        assert len(updates[0].pieces) == 1, "a text begins at once"


@pytest.mark.parametrize("method", ["eagle3", "suffix"])
def test_drafters_that_rested_know_what_single_steps_tell(
    engine: Engine, runs: Iterator[list[int]], method: str
) -> None:
    """A head reads the hidden states of each pass of a call, and guesses the same (single steps guess where calls did). A
    text that ends within a call is added to the store once."""
    model, found = engine.model, []
    ids = engine.tokenizer.encode("def add(a, b):\n")  # type: ignore[union-attr]
    guessed: set[int] = set()
    plain = engine.generate([*ids, 262], replace(BASE, temperature=0.0, ignore_eos=True))
    stops = ["".join(piece.text for piece in plain.pieces[at : at + 2]) for at in (5, 6, 7, 8)]  # within calls of four
    for most in (MOST_PASSES, 1):
        model.most_passes, made = most, engine.with_method(method)
        drafts = made.method.fresh() if made.method.capabilities.learns else made.method
        choice = Speculation(made.speculative, drafts, made.verifier)
        rows = []
        for index, stop in enumerate([(), *((text,) for text in stops)]):
            params = replace(BASE, temperature=0.0, ignore_eos=True, max_new_tokens=60, stop=stop)
            rows.append(made.row_of(index, Submission(str(index), [*ids, 262] if index else ids, params), choice))
        batch = Batch(model, max_rows=5, capacity=128)
        try:
            with torch.inference_mode():
                for row in rows:
                    batch.arrive(row)
                batch.read(256, catch_up=False, whole=True)
                while batch.members:
                    at = len(rows[0].token_ids)
                    guesses = at % 30 >= 17 if most > 1 else at in guessed
                    guessed |= {at} if guesses else set()
                    batch.step([4 if guesses else 0] * len(batch.members))
                    if ended := [row for row in batch.members if row.finish_reason is not None]:
                        batch.leave(ended, remember=False)
        finally:
            model.most_passes = MOST_PASSES
        memory = {name: tensor.tolist() for name, tensor in drafts.memory().items()}
        found.append(([(row.token_ids, row.steps, row.num_accepted_tokens) for row in rows], memory))
    assert max(next(runs)) == MOST_PASSES
    assert found[0] == found[1]
    assert found[0][0][0][2] > 0


def test_nothing_of_dropped_passes_is_left(engine: Engine) -> None:
    """A text that goes on where another was ended by a stop text reads what is stored of that one."""
    first = engine.generate("def add(a, b):\n", replace(BASE, ignore_eos=True))
    stop = "".join(piece.text for piece in first.pieces[5:7])
    ended = engine.generate("def add(a, b):\n", replace(BASE, stop=(stop,)))
    prompt = engine.tokenizer.encode("def add(a, b):\n") + ended.token_ids  # type: ignore[union-attr]
    with torch.inference_mode():
        both(engine, [Request(prompt, BASE)])
