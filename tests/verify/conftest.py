"""Both implementations of rules that read q."""

import pytest

from tests.verify.kernels import KERNELS, use


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the C kernels, and as on a machine without a compiler."""
    use(request.param, monkeypatch)
    return str(request.param)
