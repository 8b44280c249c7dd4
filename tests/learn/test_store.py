"""The folder of a learner where it is full, shared, damaged, or of another drafter; and who may pause whom."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import ConfigError, LearnOptions, SamplingParams, Submission
from foretell.learn import store
from foretell.learn.adapters import ServedAdapter
from foretell.learn.learner import Learner
from foretell.learn.store import UNUSABLE, WEIGHTS
from foretell.learn.training import pool as export
from foretell.learn.training.pool import TrainerPool
from tests.learn.test_revert import first, publish, session_of


def no_space(*given: Any, **more: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_version_that_cannot_be_kept_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended learning, and the trainer compared what came later with a version that nobody had."""
    session, learner, served, trainer = session_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_bytes", no_space)
        learner._inline.results.append((served.name, publish(trainer, 1.5)))
        learner.swap()
    assert served.method.serving[0] == trainer.number == 1
    assert learner.failure == ""
    assert [event["event"] for event in learner.events] == ["not kept", "swap"]
    learner._inline.results.append((served.name, publish(trainer, 1.5)))
    learner.swap()
    assert (tmp_path / "eagle1-0" / WEIGHTS).is_file()
    session.close()


def test_a_version_that_cannot_be_built_is_none_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    session, learner, served, trainer = session_of()
    with monkeypatch.context() as patch:
        patch.setattr(type(served.method.base), "rebuilt", no_space)
        learner._inline.results.append((served.name, publish(trainer, 1.5)))
        learner.swap()
    assert learner.failure == ""
    assert trainer.served is trainer.versions[0]
    learner._inline.results.append((served.name, publish(trainer, 1.5)))
    learner.swap()
    assert served.method.serving[0] == 2
    session.close()


def test_a_save_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an OSError of Python's, and another error of the library that writes the weights."""
    session, learner, _, _ = session_of(tmp_path)

    def full(*given: Any, **more: Any) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export.formats, "save", full)
    learner.act("save")
    session.learn()
    assert learner.failure == ""
    assert [event["event"] for event in learner.events] == ["save", "save failed"]
    assert not list((tmp_path / "eagle1-0").glob("*")) if (tmp_path / "eagle1-0").exists() else True
    session.close()


@pytest.mark.parametrize("tenant", ["", "a", "Ä/1"])
def test_a_folder_of_several_adapters_a_method_is_refused_until_one_is_left(tmp_path: Path, tenant: str) -> None:
    """Earlier versions had up to three, routed by prompts; the first one's weights are those that are loaded."""
    with contextlib.closing(store.VersionStore(tmp_path)) as opened:
        folders = [opened.folder(f"{tenant}/eagle1/{index}") for index in range(3)]
    for folder in folders:
        folder.mkdir()
    (folders[0] / WEIGHTS).touch()
    (folders[2] / "events.jsonl").touch()
    store.VersionStore(tmp_path).close()
    (folders[1] / WEIGHTS).touch()
    with pytest.raises(ConfigError, match=rf"earlier version, .*: delete {folders[1].name} to go on with the first"):
        store.VersionStore(tmp_path)
    (folders[1] / WEIGHTS).unlink()
    store.VersionStore(tmp_path).close()  # nothing is held of what was refused


def test_a_folder_is_one_learner_s(tmp_path: Path) -> None:
    """The second would have deleted the versions of the first when it started."""
    session, _, _, _ = session_of(tmp_path)
    with pytest.raises(ConfigError, match="in use by another learner"):
        session_of(tmp_path)
    session.close()
    session_of(tmp_path)[0].close()


def test_a_save_and_a_swap_at_once_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread keeps a version while the engine's names the one that serves: both wrote to one name."""
    session, learner, served, trainer = session_of(tmp_path)
    learner._result((served.name, publish(trainer, 1.5)))
    kept = learner.adapters.store
    write = store.write_bytes

    def meanwhile(file: Path, content: bytes) -> None:
        write(file, content[: len(content) // 2])
        kept.serve(served.name, 1)
        write(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_bytes", meanwhile)
        kept.save(served.name, served.origin, publish(trainer, 2.0).weights, 2)
    learner.swap()
    mine = first(served)
    session.close()
    again, _, one, _ = session_of(tmp_path)
    assert torch.allclose(first(one), mine)
    again.close()


def kept_of(tenant: str, folder: Path, weights: dict[str, torch.Tensor] | None) -> Path:
    """A folder in which something is kept for a tenant: these weights (or its own), or garbage after that."""
    session, learner, _, _ = session_of(folder)
    learner.assign(session.choice, Submission("x", [1, 2], tenant=tenant or None))
    one: ServedAdapter = learner.adapters.of(tenant)[0]
    learner.adapters.store.save(one.name, one.origin, weights or one.origin.weights, 1)
    learner.adapters.store.serve(one.name, 1)
    session.close()
    found: Path = learner.adapters.store.folder(one.name) / WEIGHTS
    return found


@pytest.mark.parametrize("kind", ["garbage", "half", "other sizes"])
def test_what_cannot_be_used_is_told_at_the_start_and_refuses_no_client_s_request(kind: str, tmp_path: Path) -> None:
    """Each request of the key was refused with the path of a file of the server."""
    for tenant in ("", "key-a"):
        other = {"w": torch.ones(3, 5)} if kind == "other sizes" else None
        file = kept_of(tenant, tmp_path / f"of{tenant}", other)
        if kind != "other sizes":
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(b"garbage" if kind == "garbage" else content[: len(content) // 2])
        if not tenant:
            with pytest.raises(ConfigError, match=r"delete (it|them) to begin anew"):
                session_of(tmp_path / "of")
            continue
        session, learner, _, _ = session_of(tmp_path / "ofkey-a")
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        assert [one.num_tokens for one in session.run([[5, 6, 7]], params, tenant=tenant)] == [6]
        assert [event["event"] for event in learner.state(tenant)["events"]] == ["begun anew"]
        assert file.with_name(UNUSABLE).is_file()
        assert not file.exists()
        session.close()


def test_one_key_pauses_its_own_learning_alone() -> None:
    """It paused everybody's; when another key resumed, it was told that it learned, and did not."""
    session, learner, _, _ = session_of()
    for tenant in ("a", "b"):
        learner.assign(session.choice, Submission(tenant, [1, 2], tenant=tenant))
    trainers = learner._inline.trainers

    def paused() -> list[bool]:
        said = [learner.state(tenant)["paused"] for tenant in ("a", "b")]
        assert said == [trainers[f"{tenant}/eagle1/0"].paused for tenant in ("a", "b")]
        return said

    learner.act("pause", "a")
    assert paused() == [True, False]
    assert learner.state()["paused"] is False
    assert [event["event"] for event in learner.state("a")["events"]] == ["pause"]
    assert learner.state("b")["events"] == []
    learner.act("resume", "b")
    assert paused() == [True, False]
    learner.act("pause")
    learner.act("resume", "a")
    assert paused() == [True, True], "it is paused for all"
    learner.act("resume")
    assert paused() == [False, False]
    session.close()


def test_paused_requests_are_not_learned_from() -> None:
    session, learner, _, _ = session_of()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    learner.assign(session.choice, Submission("x", [1, 2], tenant="a"))
    learner.act("pause", "a")
    for tenant, texts in (("a", 0), ("b", 1)):
        list(session.run([[5, 6, 7]], params, tenant=tenant))
        assert learner.figures().num_texts == texts
    session.close()


def test_after_a_failure_nothing_of_requests_is_held() -> None:
    session, learner, _, _ = session_of()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    held = []

    def between() -> None:
        held.append(learner.capture.held_bytes)
        if len(held) == 2:
            learner._result(("", {"event": "failed", "reason": "its process was killed"}))

    list(session.run([[5, 6, 7], [8, 9]], params, between=between))
    assert held[1] > 0
    assert held[3] == held[-1] == learner.capture.held_bytes == 0
    session.close()


def test_the_target_s_matrices_travel_once() -> None:
    """Each key's adapter came with a copy of its own of the target's embedding and head."""
    session, learner, served, _ = session_of()
    sent: list[Any] = []

    class Process:
        from foretell.learn.training.process import TrainerProcess

        open = TrainerProcess.open

        def __init__(self) -> None:
            import threading

            self._lock, self._has_ends = threading.Lock(), False
            self._outbox = self

        def put(self, message: Any) -> None:
            sent.append(message)

    parent: Any = Process()
    for name in ("a/eagle1/0", "b/eagle1/0"):
        parent.open(name, served.origin)
    assert [kind for kind, *_ in sent] == ["ends", "open", "open"]
    pool = TrainerPool(LearnOptions(where="inline"))
    for kind, *rest in sent:
        getattr(pool, kind)(*rest)
    held = [one.student.teacher.model.matrices.embedding.data_ptr() for one in pool.trainers.values()]  # type: ignore[attr-defined]
    assert held == [served.origin.matrices.embedding.data_ptr()] * 2
    assert isinstance(learner, Learner)
    session.close()
