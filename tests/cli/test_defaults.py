"""One rule of defaults for all commands: what guesses where no method, or no drafter, is named."""

from pathlib import Path
from typing import Any

import pytest

from foretell import ConfigError, Engine, Service, ServiceOptions, bundled, speculative_config
from foretell.cli import settings
from foretell.cli.commands import certify
from foretell.cli.commands.bench import _methods
from foretell.cli.commands.serve import _also
from foretell.engine.config import default_drafter

HEAD = "bundled/smollm2-135m/eagle3"
NAMED = "smollm2-135m"


@pytest.mark.parametrize(
    ("target", "draft", "method"),
    [
        (NAMED, None, "hybrid"),
        (NAMED, HEAD, "eagle3"),
        ("bundled", None, "draft_model"),
        ("bundled", "bundled/draft", "draft_model"),
        ("bundled", "bundled/medusa", "medusa"),
        ("bundled", "some/hub-id", "draft_model"),  # nobody looks it up for that
        ("some/where", None, "suffix"),
    ],
)
def test_the_method_is_the_target_s_own_or_what_the_draft_holds(target: str, draft: str | None, method: str) -> None:
    """A head by --draft alone was taken for a draft model, and could not be loaded."""
    assert settings.default_config(target, draft) == {"method": method}
    assert certify.speculation(target, draft, None, None)["method"] == method
    benched = _methods(None, target, draft, None, predictions=False)
    assert [one.label for one in benched] == [method, "ngram"]


@pytest.mark.parametrize(
    ("method", "target", "drafter"),
    [
        ("eagle3", NAMED, HEAD), ("draft_model", NAMED, None), ("medusa", NAMED, None),
        ("eagle3", "bundled", "bundled/eagle3"), ("eagle2", "bundled", "bundled/eagle2"),
        ("draft_model", "bundled/target", "bundled/draft"), ("eagle3", "some/where", None),
    ],
)  # fmt: skip
def test_the_drafter_that_comes_with_a_target(method: str, target: str, drafter: str | None) -> None:
    assert default_drafter(method, target) == drafter


def test_a_head_that_the_wheel_leaves_out_is_nobody_s_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bundled._PATHS, "medusa", tmp_path / "absent")
    assert default_drafter("medusa", "bundled") is None
    assert default_drafter("eagle1", "bundled") == "bundled/eagle1"


@pytest.mark.parametrize("method", ["eagle3", "hybrid"])
def test_what_comes_with_a_named_model_need_not_be_named(method: str) -> None:
    settings.check_method({"method": method}, NAMED)
    assert _also(method, NAMED).method == method
    assert [one.label for one in _methods(method, NAMED, None, None, predictions=False)] == [method]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"method": "medusa"},
            r"--method medusa needs a trained head \(medusa\) for smollm2-135m, and none comes with it",
        ),
        ({"method": "hybrid", "second": "eagle1"}, r"--method hybrid needs a trained head \(eagle1\)"),
        ({"method": "hybrid", "second": "draft_model"}, "--method hybrid needs a draft model"),
    ],
)
def test_what_does_not_come_with_a_named_model_is_asked_for_before_the_load(given: dict[str, Any], said: str) -> None:
    """It was looked for among the heads of another model."""
    with pytest.raises(ConfigError, match=said):
        settings.check_method(given, NAMED)
    settings.check_method({**given, "model": "x"}, NAMED)
    settings.check_method(given, "bundled")


def test_further_methods_of_a_service_have_the_drafters_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve --also eagle3`` read the head of another model."""
    engine = Engine.load("bundled", speculative="ngram")
    head = str(Path(settings.__file__).parents[1] / "bundled" / "eagle1")
    monkeypatch.setattr(
        "foretell.engine.config.default_draft", lambda target, method: head if method == "eagle1" else None
    )
    service = Service(engine, ServiceOptions(speculation="on"), also=[speculative_config("eagle1")])
    assert service.method("eagle1") == service.method({"method": "eagle1", "model": head})
    assert service.method({"method": "eagle1"}).resolved()["model"] == head
