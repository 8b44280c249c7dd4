"""Settings of the whole suite: one thread (two cores are shared), reproducible hypothesis runs, no deadline."""

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
