"""Draw the next token from the target's distribution p. Where it was guessed, go on from there; else stop, and emit it."""

from dataclasses import dataclass

import torch

import foretell


@dataclass(frozen=True)
class Direct(foretell.Verifier):
    name = "direct"
    exact = True
    # No draft distribution q is corrected for, so the most probable guesses are the best.
    draws = foretell.DrawMode.FIXED
    summary = "draws from p and keeps the guess that it meets"

    def stops(self, evidence):
        parent, tokens = evidence.tree.parent, evidence.tree.tokens  # [B, N]
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        edges = evidence.p[row, parent.clamp(min=0), tokens]  # of each node: p(its token | its parent)
        twin = (parent[:, :, None] == parent[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
        edges = edges.masked_fill(twin.tril(-1).any(-1), 0.0)  # of equal siblings the first one counts
        return foretell.Walk(foretell.stops_from_edges(parent, edges))

    def residual(self, evidence, walk, at):
        """p at the node where the walk stopped, without the tokens that would have led on."""
        probs = evidence.p[torch.arange(len(at), device=at.device), at]  # [B, V]
        child = evidence.tree.parent == at[:, None]  # [B, N]
        met = torch.zeros_like(probs).scatter_add_(1, evidence.tree.tokens, child.to(probs.dtype))
        left = probs.masked_fill(met > 0, 0.0)
        return torch.where(left.sum(-1, keepdim=True) > 0, left, probs)  # nothing left: stopped here by rounding alone
