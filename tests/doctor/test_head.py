"""Every planted mistake is found and named, and clean heads get no false alarm.

The bundled heads are real ones: the figures are those of trained weights on a real, small target. Statistical rule: a
variant is named at 3.5 standard errors over texts, in a direction in which a correct head only loses, so that the
false-alarm rate of a clean head is far below 1e-3 a variant.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from foretell import Engine
from foretell.bench import Item, load_suite
from foretell.core.errors import ModelError
from foretell.doctor import head
from foretell.doctor.contexts import TextScore, answers
from foretell.doctor.diagnosis import HeadDiagnosis
from foretell.doctor.findings import paired
from foretell.doctor.head import diagnose
from foretell.doctor.templates import GIVEN, TEMPLATES, formats_of
from foretell.doctor.variants import FAULTS
from foretell.train.responses import Responses
from tests.doctor import plants
from tests.stress import MINUTES

KINDS = ("eagle3", "eagle1", "medusa", "dflash", "kangaroo")


def questions(start: int, count: int) -> list[Item]:
    """Prompts of every category in turn."""
    items = load_suite("bundled")
    categories = list(dict.fromkeys(item.category for item in items))
    of = {name: [item for item in items if item.category == name] for name in categories}
    return [of[categories[i % len(categories)]][(i // len(categories)) % 8] for i in range(start, start + count)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled")


@pytest.fixture(scope="module", autouse=True)
def written_once() -> Iterator[None]:
    """Most of a diagnosis is the target's answers, and most tests ask the same of the same target."""
    made: dict[tuple[object, ...], Responses] = {}

    def remembered(engine: Engine, prompts: Sequence[Sequence[int]], **options: int) -> Responses:
        key = (engine, str(prompts), *options.items())
        if key not in made:
            made[key] = answers(engine, prompts, **options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "answers", remembered)
        yield


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Another target that writes the same texts."""
    return Engine.load(str(plants.other_basis(tmp_path_factory.mktemp("other"))))


def examine(engine: Engine, name: str | Path, *, start: int = 0, count: int = 15, seed: int = 0) -> HeadDiagnosis:
    return diagnose(engine, str(name), formats_of(engine, questions(start, count)), seed=seed, rope_theta=10000.0)


def faults(found: HeadDiagnosis) -> list[str]:
    return [finding.fault for finding in found.findings]


PLANTS: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "layers": ("layer_ids", plants.layers_one_early, "layer_ids = [1, 3, 5]: one layer later"),
    "exit": ("layer_ids", plants.exit_one_early, "exit_layer = 2: one layer later"),
    "rope": ("rope", plants.rope_in_pairs, "rotary dimensions stored as pairs: reorder q_proj and k_proj"),
    "norm_output": ("norm", plants.norm_after, "norm_output = false"),
    "norm_before_residual": ("norm", plants.residual_normed, "norm_before_residual = false"),
    "first_ids": ("token_mapping", plants.first_ids, "d2t as the rows of lm_head suggest"),
    "offsets": ("token_mapping", plants.ids_for_offsets, ""),
    "half": ("dtype", plants.too_large_for_half, ""),
    "joined": ("inputs", plants.joined_the_other_way, "join the feature before the embedding"),
}
QUICK = ("exit", "offsets", "half", "joined")


@pytest.mark.parametrize(
    "plant", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANTS]
)
def test_a_planted_mistake_is_found_and_named(engine: Engine, tmp_path: Path, plant: str) -> None:
    fault, make, remedy = PLANTS[plant]
    found = examine(engine, make(tmp_path), count=10)
    assert faults(found) == [fault]
    assert found.findings[0].remedy.startswith(remedy)
    assert not found.is_healthy


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", range(4 if MINUTES else 1))
def test_no_false_alarm_on_clean_heads(engine: Engine, kind: str, run: int) -> None:
    """At length (``tests.stress``) twenty runs on other texts each, else five."""
    found = examine(engine, f"bundled/{kind}", start=10 * run, seed=100 * run)
    assert faults(found) == []
    assert found.expected_accepted is None or found.accepted > 0.75 * found.expected_accepted


def test_a_clean_head_is_healthy_and_its_curve_stands_beside_that_of_its_training(engine: Engine) -> None:
    found = examine(engine, "bundled/eagle1", count=8)
    assert found.is_healthy
    assert [slot.slot for slot in found.slots] == [1, 2, 3, 4]
    first = found.slots[0]
    assert first.expected is not None
    assert abs(first.acceptance - first.expected) < 0.2
    assert {trial.fault for trial in found.trials} >= {"layer_ids", "rope", "norm", "inputs"}
    assert set(FAULTS) >= {trial.fault for trial in found.trials}


@pytest.mark.slow
@pytest.mark.parametrize("template", ["Llama 3", "Vicuna"])
def test_another_template_is_found(template: str, tmp_path: Path) -> None:
    engine = Engine.load("bundled")
    engine.tokenizer.chat_template = TEMPLATES[template]  # type: ignore[union-attr]
    assert GIVEN in formats_of(engine, questions(0, 2))
    found = examine(engine, "bundled/eagle3")
    assert faults(found) == ["template"]
    assert "ChatML" in found.findings[0].remedy


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
def test_another_target_is_found_by_its_record_and_without_one(
    engine: Engine, others: Engine, tmp_path: Path, recorded: bool
) -> None:
    """The target writes the same texts, so that nothing but its hidden states says so."""
    texts = [one.generate("The river", temperature=0.0, max_new_tokens=12).token_ids for one in (others, engine)]
    assert texts[0] == texts[1]
    found = examine(others, plants.copy("eagle1", tmp_path, record=recorded))
    assert faults(found)[:1] == ["other_target"]


def test_what_is_no_head_is_refused(engine: Engine) -> None:
    with pytest.raises(ModelError, match="draft_model"):
        examine(engine, "bundled/draft")


def test_a_head_that_only_judges_is_refused(engine: Engine) -> None:
    with pytest.raises(ModelError, match="does not guess"):
        examine(engine, "bundled/judge")


def one(log_chance: float, places: int) -> TextScore:
    return TextScore(1.0, (), places, log_chance, 0.0, 0.0, 0)


def test_paired_differences_in_standard_errors() -> None:
    """Differences 1, 2 and 3 over texts of one place each: mean 2, deviation 1, error 1 / sqrt 3."""
    base = [one(0.0, 1), one(0.0, 1), one(0.0, 1)]
    better = [one(1.0, 1), one(2.0, 1), one(3.0, 1)]
    assert paired(base, better) == pytest.approx(2.0 * 3**0.5)
    assert paired(better, base) == pytest.approx(-2.0 * 3**0.5)
    assert paired(base[:1], better[:1]) is None
