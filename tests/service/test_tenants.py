"""What one client's requests may show another: nothing of their text, neither in guesses nor in figures.

A request is compared with the same one in a service that nobody else has used: tokens, trees and figures must be equal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission, speculative_config
from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.shapes import Chain
from foretell.draft.suffix import Suffix
from foretell.methods.hybrid.drafter import Hybrid
from foretell.service import tenants as tenants_module
from foretell.service.choices import Choices
from foretell.service.tenants import Tenants
from tests.engine.harness import ToyTokenizer, started, sure
from tests.engine.integrity import check_service
from tests.model.table import TableLM
from tests.service.test_service import Mailbox

SECRET = [5, 9, 4, 11, 2, 16, 7, 13, 3, 18, 1, 12, 6, 15, 8, 10, 17, 0, 14]  # what the first client has written


def follow() -> TableLM:
    """A target that says SECRET again and again."""
    return sure(lambda text: SECRET[(SECRET.index(text[-1]) + 1) % len(SECRET)] if text[-1] in SECRET else SECRET[0])


@contextmanager
def service(**options: Any) -> Iterator[Service]:
    settings = {"speculation": "on", "max_num_seqs": 4, "max_model_len": 200, **options}
    made = Service(Engine(follow(), ToyTokenizer(), speculative="suffix"), ServiceOptions(**settings))
    with started(made):
        yield made


def asked(name: str, prompt: list[int], method: str, count: int, **fields: Any) -> Submission:
    params = SamplingParams(max_new_tokens=count, seed=1, temperature=0.0, ignore_eos=True)
    speculative = speculative_config({"method": method, "num_speculative_tokens": 8})
    return Submission(name, prompt, params, speculative=speculative, trace=True, **fields)


def seen(made: Service, *submissions: Submission, box: Mailbox | None = None) -> list[Any]:
    """All that the clients of these requests, run together, are told: tokens, trees, figures."""
    box = box or Mailbox()
    for submission in submissions:
        made.submit(submission, box.hear)
    told = []
    for submission in submissions:
        done = box.last(submission.request_id).completion
        traces = [update.trace for update in box.updates[submission.request_id] if update.trace is not None]
        told.append((done.token_ids, traces, done.steps, done.num_cached_tokens))
    return told


def guessed(told: Any) -> set[int]:
    """Tokens of all guesses."""
    return {token for trace in told[1] for token in trace.tokens[1:]}


LONG = [*SECRET, *SECRET[:3]]  # a prompt long enough for the prefix store


@pytest.mark.parametrize(
    ("shared", "first", "second"),
    [
        ("off", None, None),
        ("off", "a", "b"),
        ("off", "a", "a"),
        ("key", "a", "b"),
        ("key", None, None),
        ("key", "a", None),
    ],
)
def test_nothing_of_another_clients_text_is_told(shared: str, first: Any, second: Any) -> None:
    mine = asked("mine", [5], "suffix", 15, tenant=second)
    with service(shared_drafts=shared) as alone:
        (expected,) = seen(alone, mine)
    with service(shared_drafts=shared) as used:
        for number in range(2):
            seen(used, asked(f"theirs-{number}", [5], "suffix", 40, tenant=first))
        (found,) = seen(used, mine)
        third = "c" if second == "b" else second  # a tenant's own text may come back to it
        beside = seen(
            used, asked("more", [9], "suffix", 60, tenant=first), asked("again", [5], "suffix", 15, tenant=third)
        )
    assert found == expected
    assert beside[1] == expected
    assert not guessed(expected)  # it wrote nothing twice, so there was nothing to guess from


@pytest.mark.parametrize(("shared", "tenants"), [("all", (None, None)), ("all", ("a", "b")), ("key", ("a", "a"))])
def test_control_where_sharing_is_asked_for_it_is_seen(shared: str, tenants: tuple[Any, Any]) -> None:
    with service(shared_drafts=shared) as used:
        seen(used, asked("theirs", [5], "suffix", 40, tenant=tenants[0]))
        (found,) = seen(used, asked("mine", [5], "suffix", 15, tenant=tenants[1]))
    assert guessed(found)
    assert len(found[2]) < 15


def test_nothing_of_a_request_that_is_not_to_be_stored_is_guessed_to_others() -> None:
    """It entered the shared stores: only learners left it out."""
    mine = asked("mine", [5], "suffix", 15)
    with service(shared_drafts="all") as alone:
        (expected,) = seen(alone, mine)
    with service(shared_drafts="all") as used:
        seen(used, asked("theirs", [5], "suffix", 40, store=False))
        (found,) = seen(used, mine)
    assert found == expected
    assert not guessed(found)


def test_a_request_still_learns_from_its_own_text() -> None:
    with service() as made:
        (found,) = seen(made, asked("mine", [5], "suffix", 60))
    assert guessed(found)
    assert len(found[2]) < 45


def test_sharing_is_off_by_default_and_unknown_ways_are_refused() -> None:
    assert ServiceOptions().shared_drafts == "off"
    with pytest.raises(ConfigError, match="off, key, all"):
        ServiceOptions(shared_drafts="everybody")


def test_prefixes_are_the_tenants_own() -> None:
    """``cached_tokens`` would tell that somebody had the same prompt."""
    with service() as made:
        for tenant, cached in (("a", False), ("a", True), ("b", False), (None, False), (None, True), ("b", True)):
            name = f"{tenant} {cached}"
            (found,) = seen(made, asked(name, LONG, "none", 4, tenant=tenant))
            assert (found[3] > 0) == cached, name
        check_service(made)


def choices() -> Choices:
    return Choices(Engine(follow(), ToyTokenizer(), speculative="suffix"), (), off=False)


def test_stores_of_tenants_are_bounded() -> None:
    made = choices()
    tenants = Tenants("key", max_bytes=100_000)
    first = tenants.choice(made.default, "first")
    assert tenants.choice(made.default, "first").method is first.method
    for name in map(str, range(40)):
        method = tenants.choice(made.default, name).method
        assert tenants.learned_bytes <= 100_000
        method.library.add(list(range(20)))
    assert len(tenants._stores) < 40
    assert tenants.choice(made.default, "first").method is not first.method, "the least recently used is dropped"


def test_each_adapter_of_a_tenant_has_a_store() -> None:
    """Another adapter writes other texts."""
    made, tenants = choices(), Tenants("key")
    stores = {id(tenants.choice(made.default, tenant, lora).method) for tenant in "ab" for lora in (None, "x", "y")}
    assert len(stores) == len(tenants._stores) == 6
    assert tenants.choice(made.default, "a", "x").method is tenants.choice(made.default, "a", "x").method


def test_requests_that_share_nothing_form_one_team() -> None:
    made, tenants = choices(), Tenants("off")
    for config in ("suffix", "ngram"):
        base = made.of(speculative_config(config))
        assert tenants.choice(base, None).key == tenants.choice(base, "a").key
    hybrid = Hybrid(Suffix(), made.default.method, shape=Chain(2), discount=1.0)
    base = replace(made.default, method=hybrid)
    assert tenants.choice(base, None).key == tenants.choice(base, "a").key, "one pass of the second method for all"


def test_the_number_of_stores_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may ask for any options of a method that loads nothing: each makes a method, and so a store, of its own."""
    monkeypatch.setattr(tenants_module, "MAX_STORES", 5)
    made, tenants = choices(), Tenants("key")
    for number in range(1, 20):
        config = speculative_config({"method": "suffix", "suffix_decoding_min_token_prob": number / 40})
        tenants.choice(made.of(config), "a")
    assert len(tenants._stores) == 5


def test_what_has_no_memory_is_shared() -> None:
    made = choices()
    base = made.of(speculative_config("ngram"))
    assert Tenants("key").choice(base, "a") is base


class Hoarder(Suffix):
    """Learns, and has not said how to keep tenants apart."""

    def fresh(self) -> Method:
        return self


def test_a_learner_that_cannot_be_separated_is_refused() -> None:
    engine = Engine(follow(), ToyTokenizer(), speculative="suffix", method=Hoarder())
    base = Choices(engine, (), off=False).default
    with pytest.raises(ConfigError, match="fresh"):
        Tenants("key").choice(base, "a")


def test_learned_bytes_grow_with_what_is_learned() -> None:
    suffix = Suffix()
    assert suffix.learned_bytes < 1000
    suffix.library.add(list(range(1000)))
    assert suffix.learned_bytes > 50_000
