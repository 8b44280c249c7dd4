"""Going back to an earlier version: nothing that is on its way undoes it, and the next start remembers it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import LearnOptions
from foretell.learn import adapters
from foretell.learn.session import Session
from foretell.learn.store import VersionStore
from foretell.learn.training.gate import Verdict
from foretell.learn.training.student import Origin
from foretell.learn.training.trainer import Version
from tests.engine.harness import table
from tests.learn.test_student import engine_of
from tests.learn.test_texts import raw

VERDICT = Verdict(True, "", None, None)


def session_of(folder: Path | None = None) -> tuple[Session, Any, Any, Any]:
    """(session, learner, what serves, its trainer)."""
    options = LearnOptions(where="inline", learn_share=1.0, learn_dir=None if folder is None else str(folder))
    session = Session(engine_of("eagle1"), options)
    learner: Any = session.learner
    return (
        session,
        learner,
        next(iter(learner.adapters.by_name.values())),
        next(iter(learner._inline.trainers.values())),
    )


def publish(trainer: Any, scale: float) -> Version:
    """A version that passed the gate, as far from the one before as scale says."""
    made: Version = trainer._publish({name: value * scale for name, value in trainer.served.items()}, VERDICT)
    return made


def send(learner: Any, served: Any, trainer: Any, *scales: float) -> None:
    """Versions that the trainer publishes, each in service before the next."""
    for scale in scales:
        learner._result((served.name, publish(trainer, scale)))
        learner.swap()


def test_a_version_that_was_reverted_is_watched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "FALL_STEPS", 2)
    session, learner, served, trainer = session_of()
    served.watch._quick, served.watch._seen = 0.5, 1
    send(learner, served, trainer, 1.01)
    assert served.since_swap == 0
    assert served.fell(kept=False) is None
    served.revert()
    assert [served.fell(kept=False) for _ in range(4)] == [None] * 4
    session.close()


def test_a_version_on_its_way_does_not_undo_a_revert() -> None:
    session, learner, served, trainer = session_of()
    send(learner, served, trainer, 1.01)
    learner._result((served.name, publish(trainer, 1.02)))  # built, and waits for the next step
    on_its_way = publish(trainer, 1.03)  # sent before the trainer hears of it
    assert served.method.serving[0] == 1
    learner.act("revert")
    learner._result((served.name, on_its_way))
    learner.swap()
    learner.swap()
    assert served.method.serving[0] == 0
    send(learner, served, trainer, 1.04)  # made after it
    assert served.method.serving[0] == 4
    session.close()


def test_what_a_fall_chose_is_not_undone_either() -> None:
    session, learner, served, trainer = session_of()
    send(learner, served, trainer, 1.01, 1.02)
    late = publish(trainer, 1.03)
    trainer.best = lambda texts: 1
    trainer.fresh = [None]
    learner._inline.act(served.name, "fell", 2)
    learner._result((served.name, late))  # it was sent first
    learner._drain()
    learner.swap()
    assert served.method.serving[0] == 1
    send(learner, served, trainer, 1.04)
    assert served.method.serving[0] == 4
    session.close()


def first(serves: Any) -> Tensor:
    """A tensor by which versions are told apart."""
    values = serves.method.serving[1].head.state_dict().values()
    return next(value for value in values if value.is_floating_point() and value.abs().sum() > 0).float()


def test_the_next_start_begins_with_what_was_gone_back_to(tmp_path: Path) -> None:
    session, learner, served, trainer = session_of(tmp_path)
    base = first(served)
    send(learner, served, trainer, 1.25)
    kept = first(served)
    send(learner, served, trainer, 2.0)
    assert not torch.equal(first(served), kept)
    learner.act("revert")
    session.close()

    session, learner, served, trainer = session_of(tmp_path)
    assert torch.allclose(first(served), kept), "the version before"
    send(learner, served, trainer, 2.0)
    learner.act("revert")
    session.close()

    found, before = learner.adapters.store.load(served.name, served.origin), served.origin.weights
    assert before.keys() == found.keys()
    assert all(torch.equal(found[name], before[name]) for name in before), (
        "what was there at the start is its version 0"
    )
    assert not torch.allclose(base, kept)


def test_the_drafter_as_it_was_loaded_can_be_gone_back_to(tmp_path: Path) -> None:
    session, learner, served, trainer = session_of(tmp_path)
    base = first(served)
    send(learner, served, trainer, 2.0)
    learner.act("revert")
    session.close()
    session, learner, served, _ = session_of(tmp_path)
    assert torch.equal(first(served), base)
    assert "restored" not in [event["event"] for event in learner.events]
    session.close()


@pytest.mark.parametrize(
    ("one", "other"), [("team 1", "team-1"), ("team/1", "team-1"), ("-", ""), ("a.b", "a-b"), ("é", "-é")]
)
def test_tenants_do_not_share_a_folder(one: str, other: str, tmp_path: Path) -> None:
    store, origin = VersionStore(tmp_path), Origin("eagle1", "bundled/eagle1", table(1).spec, None, 3)
    mine, theirs = (f"{tenant}/eagle1/0" for tenant in (one, other))
    assert store.folder(mine) != store.folder(theirs)
    assert store.folder(mine).parent == store.folder(theirs).parent == tmp_path
    store.save(mine, origin, {"w": torch.ones(1)}, 1)
    store.serve(mine, 1)
    assert store.load(theirs, origin) is None
    found = store.load(mine, origin)
    assert found["w"].tolist() == [1.0]


def test_few_versions_are_kept(tmp_path: Path) -> None:
    store, origin = VersionStore(tmp_path), Origin("eagle1", "bundled/eagle1", table(1).spec, None, 3)
    for number in range(1, 12):
        store.save("/eagle1/0", origin, {"w": torch.full((1,), float(number))}, number)
        store.serve("/eagle1/0", number)
    assert len(list(store.folder("/eagle1/0").iterdir())) == 4
    store.serve("/eagle1/0", 10)
    found = store.load("/eagle1/0", replace(origin))
    assert found["w"].tolist() == [10.0]


def test_a_version_that_cannot_be_kept_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, origin = VersionStore(tmp_path), Origin("eagle1", "bundled/eagle1", table(1).spec, None, 3)
    store.save("/eagle1/0", origin, {"w": torch.ones(1)}, 1)
    store.serve("/eagle1/0", 1)
    before = sorted(path.name for path in store.folder("/eagle1/0").iterdir())

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            store.save("/eagle1/0", origin, {"w": torch.ones(1)}, 2)
        store.serve("/eagle1/0", 1)  # tells the log
    store.serve("/eagle1/0", 1)  # one file by two names is not renamed
    assert sorted(path.name for path in store.folder("/eagle1/0").iterdir()) == before


def test_an_update_under_way_at_a_revert_publishes_nothing() -> None:
    """In every piece of it: it was made of what is given up, and would serve at once as a version of after the revert."""
    session, _, _, trainer = session_of()
    text = raw([5, *range(30)], 6).reduced(8)
    trainer.student.learn = lambda text, share=1.0: 0.0
    trainer.student.score = lambda text: 0.9 if trainer.student.weights()["marked"].item() == 7 else 0.1
    weights, load = trainer.student.weights, trainer.student.load
    mark = [torch.tensor(1.0)]

    def loaded(given: Any) -> None:
        mark[0] = given.get("marked", torch.tensor(1.0))
        load({name: value for name, value in given.items() if name != "marked"})

    def applied() -> bool:
        mark[0] = torch.tensor(7.0)
        return True

    trainer.student.weights = lambda: {**weights(), "marked": mark[0]}
    trainer.student.load, trainer.student.apply = loaded, applied
    trainer.served = trainer.versions[0] = trainer.student.weights()

    def results(stop: int) -> list[Any]:
        trainer.fresh = [text] * trainer.options.learn_every
        trainer.held_out.recent.clear()
        trainer.held_out.recent.extend(replace(text, start=5 - index) for index in range(4))
        found = []
        for index, one in enumerate(trainer.work()):
            found.append(one)
            if index == stop:
                trainer.revert(0)
        return found

    whole = results(-1)
    assert isinstance(whole[-1], Version)
    assert mark[0] == 7
    for stop in range(len(whole) - 1):
        trainer.revert(0)
        found = results(stop)
        assert len(found) == stop + 1
        assert mark[0] == 1, "it goes on from what serves"
        assert not any(isinstance(one, Version) for one in found)
    session.close()


def both(served: Any, trainer: Any) -> tuple[list[int], list[int]]:
    """The versions that are kept where it serves, and where it learns."""
    return served.method.versions, sorted(trainer.versions)


def test_both_sides_go_back_to_one_version() -> None:
    """The trainer kept what was given up and dropped what served: it compared updates with other weights than those in
    service, and a fall chose a version that only it had."""
    session, learner, served, trainer = session_of()
    send(learner, served, trainer, 1.01, 1.02, 1.03, 1.04)
    learner.act("revert")
    assert both(served, trainer) == ([0, 3], [0, 3])
    send(learner, served, trainer, 1.05)
    assert both(served, trainer) == ([0, 3, 5], [0, 3, 5])
    learner.act("revert")
    assert served.method.serving[0] == 3
    assert trainer.served is trainer.versions[3]
    session.close()


def test_what_the_trainer_has_no_longer_serves_no_longer() -> None:
    """While a version is on its way it has dropped the one before the one that serves."""
    session, learner, served, trainer = session_of()
    send(learner, served, trainer, 1.01, 1.02)
    late = publish(trainer, 1.03)
    learner.act("revert")
    learner._drain()
    learner._result((served.name, late))
    learner.swap()
    assert served.method.serving[0] == 0
    assert trainer.served is trainer.versions[0]
    send(learner, served, trainer, 1.04)
    assert both(served, trainer) == ([0, 4], [0, 4])
    session.close()
