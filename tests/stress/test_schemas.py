"""Random JSON schemas: the same tokens by every method, all that ended valid, the control not."""

import pytest

from foretell import Engine
from tests.stress import size
from tests.stress.schemas import compare, of_keywords, report


def test_random_schemas() -> None:
    methods = [{"method": "draft_model", "num_speculative_tokens": 4}, {"method": "ngram"}]
    engine = Engine.load("bundled", speculative=methods[0])
    count = size(12, 200)
    for tallies in compare(engine, methods, range(1000, 1000 + count), batch_size=min(count, 16)):
        last = tallies
    control, plain, *speculative = last
    assert all(not tally.different and not tally.invalid for tally in (plain, *speculative)), report(last)
    assert plain.num_finished >= 0.8 * count
    assert control.num_valid == 0
    assert speculative[0].acceptance_length > 1.5


@pytest.mark.slow
def test_schemas_of_all_keywords() -> None:
    count = size(300, 20_000)
    seen = of_keywords(range(2000, 2000 + count))
    assert seen.faults == []
    assert seen.num_texts > 2 * count
    assert seen.num_left_out > count / 5
