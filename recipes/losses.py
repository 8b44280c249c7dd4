"""Losses over a whole vocabulary that never hold all logits at once.

The gradient with respect to the hidden states and the output matrix is computed in the forward pass, piece by piece, so
that a piece of logits stays in the cache of the processor: [512, 8192] instead of [8192, 8192].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIECE = 512  # rows of logits held at once


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy: hidden [T, H], weight [V, H], labels [T] -> scalar float32."""
        low = torch.bfloat16
        w = weight.to(low)
        grad_hidden = torch.empty_like(hidden, dtype=low)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.size(0), PIECE):
            h, y = hidden[start : start + PIECE].to(low), labels[start : start + PIECE, None]
            probs = torch.softmax(h @ w.T, -1, dtype=torch.float32)  # [piece, V]
            total -= probs.gather(1, y).clamp_min(1e-30).log().sum()
            grad = probs.to(low)
            grad.scatter_add_(1, y, torch.full_like(y, -1, dtype=low))
            grad_hidden[start : start + PIECE] = grad @ w
            grad_weight += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.scale, ctx.dtypes = 1.0 / hidden.size(0), (hidden.dtype, weight.dtype)
        return total / hidden.size(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """The stored gradients, times the incoming one."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0] * ctx.scale
        return (grad_hidden * scale).to(ctx.dtypes[0]), (grad_weight * scale).to(ctx.dtypes[1]), None


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean next-token loss in nats: hidden [T, H], output matrix [V, H], labels [T]."""
    return _CrossEntropy.apply(hidden, weight, labels)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        """Mean KL(teacher || student): hidden [T, H], weight [V, H], the teacher's [T, G] and [V, G] -> scalar."""
        low = torch.bfloat16
        w, teacher_w = weight.to(low), teacher_weight.to(low)
        grad_hidden = torch.empty_like(hidden, dtype=low)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.size(0), PIECE):
            h = hidden[start : start + PIECE].to(low)
            teacher = torch.log_softmax(
                teacher_hidden[start : start + PIECE].to(low) @ teacher_w.T, -1, dtype=torch.float32
            )
            student = torch.log_softmax(h @ w.T, -1, dtype=torch.float32)  # [piece, V]
            p = teacher.exp()
            total += (p * (teacher - student)).sum()
            grad = (student.exp_() - p).to(low)
            grad_hidden[start : start + PIECE] = grad @ w
            grad_weight += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.scale, ctx.dtypes = 1.0 / hidden.size(0), (hidden.dtype, weight.dtype)
        return total / hidden.size(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The stored gradients, times the incoming one."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0] * ctx.scale
        return (grad_hidden * scale).to(ctx.dtypes[0]), (grad_weight * scale).to(ctx.dtypes[1]), None, None


def distillation(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """Mean KL from the teacher's distribution to the student's at temperature 1, in nats, over the whole vocabulary.

    hidden [T, H] and weight [V, H] are the student's; teacher_hidden [T, G] and teacher_weight [V, G] the teacher's.
    """
    return _Distillation.apply(hidden, weight, teacher_hidden, teacher_weight)
