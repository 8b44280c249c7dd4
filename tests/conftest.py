"""Settings of the whole suite: one thread (two cores are shared), reproducible hypothesis runs, no deadline."""

import itertools
import secrets

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "foretoken",
    deadline=None,  # a busy machine is no bug
    derandomize=True,  # the same examples in every run; drop it on purpose to search for more
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("foretoken")


@pytest.fixture(autouse=True)
def fresh_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a seed gets a fresh one: still another each time, but the same in every run of a test."""
    counter = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda bits: (next(counter) * 0x9E3779B97F4A7C15) % (1 << bits))
