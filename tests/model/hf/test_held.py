"""Inputs that are read again stand in front of new ones."""

import numpy as np
import pytest
import torch

from foretell.model.hf.runner import CallPlaces


@pytest.mark.parametrize("lag", [[0, 0], [2, 2], [3, 0], [1, 4], [0, 2]])
@pytest.mark.parametrize("count", [[3, 3], [1, 3], [3, 2]])
def test_places_join_and_part(lag: list[int], count: list[int]) -> None:
    """Every input of a row is where a plain concatenation has it."""
    total = [a + b for a, b in zip(lag, count, strict=True)]
    places = CallPlaces(np.array(lag), max(total), max(count))
    held = torch.arange(2 * max(lag)).view(2, -1, 1) + 100
    new = torch.arange(2 * max(count)).view(2, -1, 1)
    joined = places.join(held if max(lag) else None, new)
    assert joined.shape == (2, max(total), 1)
    for row in range(2):
        expected = [*held[row, : lag[row], 0].tolist(), *new[row, : count[row], 0].tolist()]
        assert joined[row, : total[row], 0].tolist() == expected
        assert places.new(joined)[row, : count[row], 0].tolist() == new[row, : count[row], 0].tolist()
