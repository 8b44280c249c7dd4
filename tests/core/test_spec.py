"""Values written as one word with options: what is read, what is refused, and that writing and reading agree."""

from dataclasses import dataclass, fields, replace

import pytest

from foretell import SHAPES, VERIFIERS, ConfigError
from foretell.core.spec import parse_numbers, parse_spec, spec_of
from foretell.draft.shapes import Adaptive, DySpec, Sequoia, Static, parse_shape
from foretell.verify import Typical, parse_verifier


@dataclass(frozen=True)
class Plain:
    """A value of a package with an option that is on or off."""

    sharp: bool = False


def test_options_are_fields() -> None:
    assert parse_verifier("typical/epsilon=0.2/delta=0.1") == Typical(epsilon=0.2, delta=0.1)
    assert parse_shape("static/branching=4x2x1", 9) == Static(branching=(4, 2, 1))
    assert parse_shape("sequoia/size=3/acceptance=0.5x0.25", 4) == Sequoia(depth=4, size=3, acceptance=(0.5, 0.25))
    assert parse_spec("plain/sharp=true", {"plain": Plain()}, "thing") == Plain(sharp=True)
    assert parse_shape("adaptive/rule=probability/threshold=1", 6) == Adaptive(
        depth=6, rule="probability", threshold=1.0
    )


def test_depth_is_num_speculative_tokens_unless_it_is_given() -> None:
    assert parse_shape("chain", 7).depth == 7
    assert parse_shape("chain/depth=3", 7).depth == 3
    assert parse_shape("static/branching=2x1", 7).depth == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("typicl", "did you mean 'typical'"),
        ("typical/epsilom=1", "did you mean 'epsilon'"),
        ("typical/epsilon", "expected typical/field=value"),
        ("typical/epsilon=x", "must be a number"),
        ("typical/epsilon=nan", "must be a number"),
        ("typical/epsilon=0.1/epsilon=0.2", "given twice"),
        ("coupled/x=1", "has no options"),
        ("judge/head=x", "unknown option"),
        ("top_n/n=1.5", "whole number"),
        ("typical/epsilon=-1", "epsilon"),
    ],
)
def test_wrong_verifiers(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_verifier(text)
    assert said in str(caught.value)
    assert text.split("/")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sequia", "did you mean 'sequoia'"),
        ("static/branching=4,2", "joined by x"),
        ("static/branching=0x1", "between 1 and 64"),
        ("static/branching=64x64", "at most 512 nodes"),
        ("static/depth=2", "unknown option"),
        ("dyspec/threshold=1", "in [0, 1)"),
        ("sequoia/acceptance=0.9x0.9", "sum to at most 1"),
        ("adaptive/rule=guess", "path or probability"),
        ("chain/depth=65", "between 0 and 64"),
        ("eagle2/size=0", "between 1 and 512"),
    ],
)
def test_wrong_shapes(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_shape(text, 5)
    assert said in str(caught.value)


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(ConfigError, match="true or false"):
        parse_spec("plain/sharp=maybe", {"plain": Plain()}, "thing")


def test_what_is_written_is_read() -> None:
    for name, value in VERIFIERS.items():
        assert spec_of(value, name) == name, "defaults go without saying"
        assert parse_spec(name, VERIFIERS, "verifier") == value
    for shape in (
        Sequoia(depth=3, size=9, acceptance=(0.5, 0.125)), DySpec(depth=2, width=4, threshold=0.25),
        Static(branching=(1, 2)),
    ):  # fmt: skip
        assert parse_shape(shape.spec, 1) == shape


def test_every_option_of_every_value_can_be_written() -> None:
    for known in (VERIFIERS, SHAPES):
        for name, value in known.items():
            for field in fields(value):  # type: ignore[arg-type]
                if field.init and field.metadata.get("spec", True):
                    given = getattr(value, field.name)
                    text = "x".join(map(str, given)) if isinstance(given, tuple) else str(given)
                    parsed = parse_spec(f"{name}/{field.name}={text}", known, "value")
                    assert parsed == replace(value, **{field.name: given})  # type: ignore[type-var]


def test_numbers() -> None:
    assert parse_numbers("1,2.5", "--x") == [1.0, 2.5]
    for text in ("", "1,,2", "x", "nan"):
        with pytest.raises(ConfigError, match="--x"):
            parse_numbers(text, "--x")
