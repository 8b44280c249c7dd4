"""Gradients of many small jobs on several threads, each job single-threaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn


def add_gradients(model: nn.Module, jobs: Sequence[Callable[[], Tensor]], threads: int) -> list[float]:
    """Add the gradients of all jobs' losses to the parameters; the losses, in the order of the jobs.

    Each job runs on one thread, and `threads` of them run at a time. Unlike one pass on two threads, which waits for the
    slower one at every product, this loses only what other programs really take. Summed in the order of the jobs, so
    the result does not depend on which job ends first. On a GPU use one thread.
    """
    params = list(model.parameters())

    def run(job: Callable[[], Tensor]) -> tuple[float, tuple[Tensor, ...]]:
        if threads > 1:
            torch.set_num_threads(1)  # of this worker's own operations
        loss = job()
        return loss.item(), torch.autograd.grad(loss, params)

    losses = []
    with ThreadPoolExecutor(threads) as pool:
        for loss, grads in pool.map(run, jobs):
            losses.append(loss)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad if p.grad is None else p.grad.add_(grad)
    torch.set_num_threads(threads)
    return losses
