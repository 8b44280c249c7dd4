"""A mixed load on our server: every text is what its request gives alone, and nothing is left behind."""

import pytest

from tests.stress import minutes, size, soak

SERVE = "--speculation on --also ngram --max-num-seqs 8"


@pytest.mark.slow
def test_soak() -> None:
    clients, pool = size(6, 16), size(8, 60)
    arguments = ["--minutes", str(minutes(0.1)), "--clients", str(clients), "--pool", str(pool)]
    assert soak.main([*arguments, "--serve-args", SERVE]) == 0


def test_the_pool_has_every_kind_of_request() -> None:
    asks = soak.pool("toy", 60)
    assert asks == soak.pool("toy", 60), "the same requests each time"
    assert {path for path, _ in asks} == {soak.CHAT, soak.TEXT}
    keys = {key for _, body in asks for key in body}
    assert keys >= {"top_p", "top_k", "min_p", "stop", "logit_bias", "n", "response_format", "logprobs", "seed"}


def test_memory_that_grows_is_seen() -> None:
    flat = [(minute / 10, 500.0) for minute in range(100)]
    assert soak.slope(flat)[0] == pytest.approx(0.0)
    assert soak.slope([(minute, mib + 3.0 * minute) for minute, mib in flat])[0] == pytest.approx(3.0)
