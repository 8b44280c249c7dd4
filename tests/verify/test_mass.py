"""``has_mass``: on the host for few rows, by tensors for many."""

from math import inf, nan

import pytest
import torch

from foretell.verify.base import has_mass


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 40])
def test_every_row_is_asked_at_its_own_node_and_token(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    p = torch.tensor([0.0, 0.5, nan, -1.0, inf])[torch.randint(0, 5, (num_rows, 4, 6), generator=generator)]
    for values in (p, p.double()):
        at, tokens = (torch.randint(0, size, (num_rows,), generator=generator) for size in (4, 6))
        expected = [bool(values[row, int(at[row]), int(tokens[row])] > 0) for row in range(num_rows)]
        found = has_mass(values, at, tokens)
        assert found.dtype == torch.bool
        assert found.tolist() == expected
