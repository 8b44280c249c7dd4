"""The pretend device itself: it computes what the CPU does, counts what CUDA would wait for, and raises where CUDA does."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.device.pretend import METER, device, recording, replay

HERE = device()


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    METER.reset()
    with torch.inference_mode():
        yield


def numbers() -> Tensor:
    return torch.arange(12.0, device=HERE).view(3, 4)


def counts() -> tuple[int, int, int]:
    """(launches, reads, uploads) since the last call."""
    found = tuple(sum(counter.values()) for counter in (METER.launches, METER.reads, METER.uploads))
    METER.reset()
    return found  # type: ignore[return-value]


def test_values_are_the_cpus() -> None:
    """Also through views, and what is written through them."""
    x = numbers()
    x[:, 1] = x[:, 0] * 2
    x[torch.tensor([0, 2], device=HERE), 3] = 5
    x.view(-1)[4:6].add_(1)
    expected = torch.arange(12.0).view(3, 4)
    expected[:, 1] = expected[:, 0] * 2
    expected[[0, 2], 3] = 5
    expected.view(-1)[4:6].add_(1)
    assert x.device == HERE
    assert len(torch.arange(3, device=HERE)) == len(torch.eye(3, device=HERE)) == 3
    assert not x.is_cpu
    assert x.tolist() == expected.tolist()


def test_a_shape_alone_moves_nothing() -> None:
    assert torch.ones(4).expand_as(numbers()).is_cpu
    assert torch.ones(1, device=HERE).expand_as(torch.ones(4)).device == HERE


COUNTED: dict[str, tuple[Callable[[Tensor], object], tuple[int, int, int]]] = {
    "view": (lambda x: x[1:].t().unsqueeze(0), (0, 0, 0)),
    "room": (torch.empty_like, (0, 0, 0)),
    "sum": (lambda x: x + x, (1, 0, 0)),
    "in place": (lambda x: x.add_(1), (1, 0, 0)),
    "attention": (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), (1, 0, 0)),
    "factory": (lambda x: torch.zeros(3, device=HERE), (1, 0, 0)),
    "item": (lambda x: x[0, 0].item(), (1, 1, 0)),
    "list": (lambda x: x.tolist(), (1, 1, 0)),
    "truth": (lambda x: bool((x > 0).all()), (3, 1, 0)),
    "equal": (lambda x: torch.equal(x, x), (1, 1, 0)),
    "nonzero": (lambda x: x.nonzero(), (1, 1, 0)),
    "mask": (lambda x: x[x > 3], (2, 1, 0)),
    "copy back": (lambda x: torch.empty(3, 4).copy_(x), (1, 1, 0)),
    "tensor": (lambda x: torch.tensor([1, 2], device=HERE), (1, 0, 1)),
    "to": (lambda x: torch.ones(3).to(HERE), (1, 0, 1)),
    "list as index": (lambda x: x[[0, 1]], (2, 0, 1)),
    "host index": (lambda x: x[torch.tensor([0, 1])], (2, 0, 1)),
    "pinned": (lambda x: torch.ones(3).pin_memory().to(HERE, non_blocking=True), (1, 0, 0)),
    "not waited for, from memory that moves": (lambda x: torch.ones(3).to(HERE, non_blocking=True), (1, 0, 1)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts(name: str) -> None:
    """(launches, reads, blocking uploads)."""
    call, expected = COUNTED[name]
    x = numbers()
    counts()
    call(x)
    assert counts() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x + torch.ones(3, 4), "same device"),
        (lambda x: x.index_select(0, torch.tensor([1])), "same device"),
        (lambda x: torch.ones(4)[x[0].long()], "tensors of the cpu"),
        (lambda x: x.long() @ x.long().t(), "not there on CUDA"),
        (lambda x: x.numpy(), "numpy"),
    ],
)
def test_what_cuda_refuses(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(numbers())


def test_modules_move_and_learn() -> None:
    with torch.inference_mode(mode=False):
        layer = torch.nn.Linear(4, 2)
        expected = torch.autograd.grad(layer(torch.ones(3, 4)).sum(), layer.weight)[0]
        moved = layer.to(HERE).to(torch.float64)
        moved(torch.ones(3, 4, device=HERE, dtype=torch.float64)).sum().backward()
        assert moved.weight.dtype == torch.float64
        assert moved.weight.grad is not None
        assert moved.weight.grad.tolist() == expected.tolist()


def test_every_thread_has_it() -> None:
    """A service decodes on a thread of its own."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append((torch.ones(2, device=HERE) + 1).sum().item()))
    thread.start()
    thread.join()
    assert found == [4.0]


def test_recorded_operators_run_again_on_the_same_memory() -> None:
    x, total = numbers(), torch.zeros(4, device=HERE)
    with recording() as calls:
        total.copy_((x * 2).sum(0))
    first = total.tolist()
    x.add_(1)
    replay(calls)
    assert [y - x for x, y in zip(first, total.tolist(), strict=True)] == [6.0] * 4
    assert [call.described()[0] for call in calls] == ["aten.mul.Tensor", "aten.sum.dim_IntList", "aten.copy_.default"]
