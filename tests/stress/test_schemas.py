"""Random JSON schemas: the same tokens by every method, all that ended valid, the control not."""

from foretell import Engine
from tests.stress import size
from tests.stress.schemas import compare, report


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
