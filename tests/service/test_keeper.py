"""A service that is started again guesses as the one before would have, and nobody's text that was not to be stored, or was
another tenant's, is found on the disk or in a guess."""

import logging
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from foretell import Engine, Service, ServiceOptions
from foretell.core.errors import ConfigError
from foretell.core.shelf import Shelf
from foretell.draft.ngram import Ngram
from foretell.draft.shapes import Chain
from foretell.draft.suffix import Suffix, SuffixOptions
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.hybrid.drafter import Hybrid
from foretell.model.identity import arithmetic, target_hash, tokenizer_hash
from foretell.service import keeper as keeper_module
from tests.engine.harness import ToyTokenizer, started, table
from tests.engine.integrity import check_service
from tests.service.test_service import Mailbox
from tests.service.test_tenants import LONG, SECRET, asked, follow, guessed, seen

TEXT = [7, 3, 18, 1, 12, 6, 15, 8, 10, 17, 0, 14, 5, 9, 4, 11] * 10
"""A prompt that is long enough to be worth a file."""


@contextmanager
def service(
    folder: Path | None = None, *, prefixes: bool = False, seed: int | None = None, **options: Any
) -> Iterator[Service]:
    """seed: of another target."""
    target = follow() if seed is None else table(seed)
    given: dict[str, Any] = {"speculation": "on", "max_num_seqs": 4, "max_model_len": 300, **options}
    if folder is not None:
        given["prefix_dir" if prefixes else "state_dir"] = str(folder)
    made = Service(Engine(target, ToyTokenizer(), speculative="suffix"), ServiceOptions(**given))
    with started(made):
        yield made


# -- what was learned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "tenant"), [("all", None), ("key", "a")])
def test_a_server_that_is_started_again_guesses_as_before(shared: str, tenant: Any, tmp_path: Path) -> None:
    first, second = asked("1", [5], "suffix", 40, tenant=tenant), asked("2", [9], "suffix", 30, tenant=tenant)
    with service(shared_drafts=shared) as whole:
        seen(whole, first)
        (expected,) = seen(whole, second)
    with service(tmp_path, shared_drafts=shared) as before:
        seen(before, first)
    with service(tmp_path, shared_drafts=shared) as after:
        (found,) = seen(after, second)
    with service(shared_drafts=shared) as fresh:
        (without,) = seen(fresh, second)
    assert found == expected
    assert guessed(found)
    assert len(found[2]) < len(without[2]), "control: without what was learned it takes more steps"
    assert found[0] == without[0], "the text never depends on it"


def test_after_a_start_too_nothing_of_another_tenants_text_is_told(tmp_path: Path) -> None:
    mine = asked("mine", [5], "suffix", 15, tenant="b")
    with service() as alone:
        (expected,) = seen(alone, mine)
    with service(tmp_path, shared_drafts="key") as used:
        seen(used, asked("theirs", [5], "suffix", 40, tenant="a"))
    with service(tmp_path, shared_drafts="key") as after:
        assert seen(after, mine) == [expected]
        (control,) = seen(after, asked("again", [5], "suffix", 15, tenant="a"))
    assert not guessed(expected)
    assert guessed(control)


def test_another_model_begins_anew_and_leaves_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, mine = asked("1", [5], "suffix", 40), asked("2", [5], "suffix", 15)
    with service(tmp_path, shared_drafts="all") as used:
        seen(used, first)
    with service(tmp_path, shared_drafts="all", seed=3) as other, service(shared_drafts="all", seed=3) as fresh:
        assert seen(other, mine) == seen(fresh, mine)
    assert "are not used: they were made with target = " in caplog.text
    with service(tmp_path, shared_drafts="all") as again:
        assert guessed(seen(again, mine)[0])


def bytes_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


def spelled(content: bytes, ids: list[int]) -> bool:
    """Whether these tokens stand there one after the other, as numbers of any width or as text."""
    forms = [struct.pack(f"<{len(ids)}{kind}", *ids) for kind in "bhiq"]
    return any(form in content for form in [*forms, ", ".join(map(str, ids)).encode()])


@pytest.mark.parametrize("stored", [False, True])
def test_nothing_of_a_request_that_is_not_to_be_stored_is_on_the_disk(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a control: a search that finds what is to be stored."""
    monkeypatch.setattr(keeper_module, "BEAT_S", 0.01)
    state, prefixes = tmp_path / "state", tmp_path / "prefixes"
    with service(state, shared_drafts="all", prefix_dir=str(prefixes)) as used:
        seen(used, asked("theirs", TEXT, "suffix", 40, store=stored, tenant="a"))
        seen(used, asked("begun", TEXT[:30], "suffix", 1, store=True, tenant="b"))
    content = bytes_in(state) + bytes_in(prefixes)
    assert spelled(content, TEXT[40:60]) == stored
    assert spelled(bytes_in(state), SECRET[5:10]) == stored
    with service(state, shared_drafts="all") as after:
        _, counts = after._costs.planner.acceptance.memory()
        assert counts[:, -2].any() == stored, "how often its guesses were kept is not counted, either"
        (found,) = seen(after, asked("mine", [5], "suffix", 15, tenant="c"))
        assert (len(guessed(found)) > 2) == stored  # one token of the other request's may be known


def test_what_a_client_owns_is_not_named(tmp_path: Path) -> None:
    with service(tmp_path, shared_drafts="key") as used:
        seen(used, asked("theirs", [5], "suffix", 40, tenant="key-0123"))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2  # a store, and rates of acceptance
    assert b"key-0123" not in bytes_in(tmp_path) + " ".join(file.name for file in tmp_path.iterdir()).encode()


def test_it_is_written_while_the_service_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "BEAT_S", 0.02)
    with service(tmp_path, shared_drafts="all") as used:
        seen(used, asked("1", [5], "suffix", 40))
        ends = time.monotonic() + 20
        while not any(spelled(file.read_bytes(), SECRET[5:10]) for file in tmp_path.glob("*.safetensors")):
            assert time.monotonic() < ends
            time.sleep(0.01)
        check_service(used)


def test_a_store_that_is_dropped_from_memory_comes_back(tmp_path: Path) -> None:
    with service(tmp_path, shared_drafts="key") as used:
        seen(used, asked("1", [5], "suffix", 40, tenant="a"))
        used._tenants.max_bytes = 1
        seen(used, asked("2", [5], "suffix", 40, tenant="b"))
        assert len(used._tenants._stores) == 1
        assert guessed(seen(used, asked("3", [5], "suffix", 15, tenant="a"))[0])


def test_rates_of_acceptance_are_taken_up(tmp_path: Path) -> None:
    def rates(made: Service) -> Any:
        assert made._costs is not None
        return made._costs.planner.acceptance.curve("suffix", "new", 8)

    with service(tmp_path) as before:
        fresh = rates(before)
        seen(before, asked("1", [5], "suffix", 60))
        expected = rates(before)
    with service(tmp_path) as after:
        assert rates(after) == expected != fresh


def test_a_directory_is_one_servers_and_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, options, said in (
        ("a", {}, "in use by another server"),
        ("file", {"prefixes": True}, "cannot be written"),
    ):
        with service(tmp_path / "a"), pytest.raises(ConfigError, match=said), service(tmp_path / name, **options):
            pass
    with service(tmp_path / "a") as again:
        assert again.ready


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state_dir": "x", "speculation": "off"}, "state_dir keeps what guesses learned"),
        ({"prefix_dir": "x", "prefix_reuse": False}, "prefix_reuse is off"),
        ({"prefix_max_gib": 1.0}, "bounds prefix_dir, which is not given"),
        ({"prefix_dir": "x", "prefix_max_gib": 0.0}, "must be positive"),
    ],
)
def test_options_that_contradict_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServiceOptions(**given)


# -- KV of prompts -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_known_after_a_start(tmp_path: Path) -> None:
    with service(tmp_path, prefixes=True) as before:
        (first,) = seen(before, asked("1", TEXT, "none", 10, tenant="a"))
        (again,) = seen(before, asked("2", TEXT, "none", 10, tenant="a"))
    with service(tmp_path, prefixes=True) as after:
        (mine,) = seen(after, asked("3", TEXT, "none", 10, tenant="a"))
        (others,) = seen(after, asked("4", TEXT, "none", 10, tenant="b"))
        (nobodys,) = seen(after, asked("5", TEXT, "none", 10))
        check_service(after)
    assert mine == again
    assert mine[0] == first[0] == others[0]
    assert mine[3] == len(TEXT) - 1
    assert others[3] == nobodys[3] == first[3] == 0


def test_others_decode_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request whose prompt it holds waits for it, and then takes it up."""
    with service(tmp_path, prefixes=True) as before:
        (expected,) = seen(before, asked("1", TEXT, "none", 10))
    go, get, box = Event(), Shelf.get, Mailbox()

    def slow(shelf: Shelf, name: str) -> Any:
        assert go.wait(30.0)
        return get(shelf, name)

    monkeypatch.setattr(Shelf, "get", slow)
    with service(tmp_path, prefixes=True) as after:
        after.submit(asked("neighbour", [5], "none", 250), box.hear)
        while "neighbour" not in box.updates:
            time.sleep(0.001)
        after.submit(asked("2", TEXT, "none", 10), box.hear)
        assert box.last("neighbour").completion is not None, "it has ended while the other one waited"
        assert "2" not in box.updates
        go.set()
        completion = box.last("2").completion
    assert completion is not None
    assert completion.token_ids == expected[0]
    assert completion.num_cached_tokens == len(TEXT) - 1


def test_kv_of_another_target_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service(tmp_path, prefixes=True) as before:
        seen(before, asked("1", TEXT, "none", 4))
    with service(tmp_path, prefixes=True, seed=3) as other:
        assert seen(other, asked("2", TEXT, "none", 4))[0][3] == 0
    assert "are not used: they were made with computed = " in caplog.text


def test_a_file_that_is_damaged_is_read_again_from_its_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service(tmp_path, prefixes=True) as before:
        (expected,) = seen(before, asked("1", TEXT, "none", 4))
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with service(tmp_path, prefixes=True) as after:
        assert seen(after, asked("2", TEXT, "none", 4)) == [expected]
        assert seen(after, asked("3", TEXT, "none", 4))[0][3] > 0
    assert [record.levelno for record in caplog.records if "is damaged" in record.getMessage()] == [logging.WARNING]


def test_short_texts_are_not_worth_a_file(tmp_path: Path) -> None:
    with service(tmp_path, prefixes=True) as before:
        seen(before, asked("1", LONG, "none", 4))
    assert not list(tmp_path.glob("*.safetensors"))


# -- identities and memories -------------------------------------------------------------------------------------------


def test_identities_differ_where_they_must() -> None:
    assert target_hash(table(1)) == target_hash(table(1)) != target_hash(table(1, context=3))
    assert arithmetic(table(1)) == arithmetic(table(1))
    assert arithmetic(table(1))["computed"] != arithmetic(table(2))["computed"]
    other = ToyTokenizer([b"q", *ToyTokenizer().pieces[1:]])
    assert tokenizer_hash(ToyTokenizer()) == tokenizer_hash(ToyTokenizer()) != tokenizer_hash(other)
    assert tokenizer_hash(None) is None


def test_what_methods_have_learned_survives() -> None:
    suffix, empty = Suffix(SuffixOptions(max_cached_tokens=60)), Suffix()
    for start in range(9):
        suffix.library.add([start, *SECRET[:10], start])
    hybrid = Hybrid(suffix, DraftModel(table(2)), shape=Chain(4), discount=1.0)
    hybrid.worth_at(0.0).second.add(3.0)
    hybrid.worth_at(1.0).suffix[2].add(2.0)
    several = Hybrid(suffix, DraftModel(table(2)), shape=Chain(4), discount=1.0, others=[Ngram()])
    several.worth_at(0.0).others[0].add(3.0)
    with pytest.raises(ValueError, match="zip"):
        several.recall(hybrid.memory())
    for method in (suffix, hybrid, several, empty):
        made = method.fresh()
        assert isinstance(made, Suffix | Hybrid)
        made.recall(method.memory())
        was, now = method.memory(), made.memory()
        assert was.keys() == now.keys()
        assert all(torch.equal(was[key], now[key]) for key in was)
