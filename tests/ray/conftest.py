"""One small Ray cluster of this machine for the tests of this folder, gone when they end, whatever happened.

Serve listens on loopback; Ray's own ports cannot be kept to it, so a token that only this process knows guards them.
"""

import gc
import logging
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A cluster of this machine: four slots of work, whatever the cores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, on import
        import ray.data

        import ray
        from ray import serve
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ft", dir="/tmp") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray would write one to the home directory
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine is no bug
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")
        patch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        context = ray.data.DataContext.get_current()
        patch.setattr(context, "enable_progress_bars", False)
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        try:
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                _temp_dir=os.path.realpath(folder),  # short: the path of a Unix socket must fit 107 bytes
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
            yield
        finally:
            serve.shutdown()
            ray.shutdown()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray forgets its ended processes without asking how they ended
                gc.collect()
