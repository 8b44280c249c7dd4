"""The cost of verifiers: ``python benchmarks/verification.py [--vocab 8192 151936] [--shape chain tree] [--parts]``.

Microseconds of one ``verify.draw`` (noise included), p and q given, one row, float32. Contexts have Zipf-like
distributions and a correlated draft distribution; children are really drawn from q, as each verifier asks for.
Verifiers are timed in interleaved rounds, so that load on the machine affects all equally; the median over the rounds
and the least are printed. With ``--model MS`` the median is also given as a share of one pass of a model that takes so
many milliseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from foretell.core.noise import Noise, race_top
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.kernels.small import invert_cdf
from foretell.verify import VERIFIERS, Evidence, Verifier, draw
from foretell.verify.base import follow

SHAPES: dict[str, tuple[int, ...]] = {
    "chain": (1,) * 15,
    "tree": (3, 2, 1),
    "wide": (4, 2, 1),
    "paths": (3, 1, 1, 1, 1),
}
"""Children of the nodes of each depth; chain, tree and paths have 16 nodes with the root, wide has 21."""

LABELS = {
    DrawMode.FIXED: DrawnBy.FIXED,
    DrawMode.IID: DrawnBy.IID,
    DrawMode.COUPLED: DrawnBy.COUPLED,
}


def context_distributions(num_nodes: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """(p, q), both [N, V] float32: Zipf-like, correlated, in an own order of the tokens for each context."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(1, vocab_size + 1).float()
    common = torch.randn(num_nodes, vocab_size, generator=generator) * 2.0
    order = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_nodes)])
    zipf = (-1.2 * ids.log())[order]
    own = torch.randn(num_nodes, vocab_size, generator=generator)
    return torch.softmax(zipf + common, -1), torch.softmax(zipf + common + 0.7 * own, -1)


def grow(branching: tuple[int, ...], draws: DrawMode, vocab_size: int, seed: int) -> Evidence:
    """A tree of one row, drawn as asked, and the distributions of its nodes; breadth first."""
    parents, ranks, frontier = [-1], [0], [0]
    for count in branching:
        fresh = []
        for node in frontier:
            for rank in range(count):
                fresh.append(len(parents))
                parents.append(node)
                ranks.append(rank)
        frontier = fresh
    num_nodes = len(parents)
    p, q = context_distributions(num_nodes, vocab_size, seed)
    noise = Noise(torch.tensor([seed]), torch.tensor([100]))
    generator = torch.Generator().manual_seed(seed + 1)
    tokens, drawn_by = [0] * num_nodes, [int(DrawnBy.FIXED)] * num_nodes
    for node in range(num_nodes):
        children = [i for i in range(num_nodes) if parents[i] == node]
        if not children:
            continue
        count = len(children)
        depth = 0 if node == 0 else _depth(parents, node)
        labels = [int(LABELS.get(draws, DrawnBy.WITHOUT_REPLACEMENT))] * count
        if draws == DrawMode.FIXED:
            chosen = q[node].topk(count).indices.tolist()
        elif draws == DrawMode.COUPLED:
            chosen = race_top(q[node], noise.coupled_keys(depth + 1)[0, depth], count)[0].tolist()
        elif draws == DrawMode.GREEDY and count > 1:
            top = q[node].topk(count - 1).indices
            rest = q[node].scatter(0, top, 0.0)
            q[node] = rest / rest.sum()
            first = torch.multinomial(q[node], 1, generator=generator).tolist()
            chosen, labels = first + top.tolist(), [int(DrawnBy.IID)] + [int(DrawnBy.FIXED)] * (count - 1)
        else:
            chosen = torch.multinomial(q[node], count, draws == DrawMode.IID, generator=generator).tolist()
        for child, token, label in zip(children, chosen, labels, strict=True):
            tokens[child], drawn_by[child] = token, label
    drawn = any(drawn_by in (DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT) for drawn_by in drawn_by)
    tree = TokenTree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor([drawn_by]),
        q[None] if drawn else None,
        max_children=max(branching),
    )
    return Evidence(tree, p[None], noise)


def _depth(parents: list[int], node: int) -> int:
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


def parts_of(verifier: Verifier, evidence: Evidence) -> dict[str, Callable[[], object]]:
    """The steps of ``draw``, each to be timed alone."""
    noise = evidence.noise
    assert noise is not None
    if verifier.decide(evidence) is not None:
        return {"decide": lambda: verifier.decide(evidence)}
    walk = verifier.stops(evidence)
    at = invert_cdf(walk.stops, noise.stop())
    probs = verifier.residual(evidence, walk, at)
    return {
        "stops": lambda: verifier.stops(evidence),
        "where": lambda: invert_cdf(walk.stops, noise.stop()),
        "residual": lambda: verifier.residual(evidence, walk, at),
        "bonus": lambda: invert_cdf(probs, noise.bonus()),
        "follow": lambda: follow(evidence.tree.parent, at),
    }


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000.0


def main() -> int:
    """Time every verifier on every given shape and vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 151936])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--verifier", nargs="+", choices=list(VERIFIERS), default=list(VERIFIERS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--trees", type=int, default=4, help="trees of each case; rounds go through them in turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=float, help="milliseconds of one pass of the model to compare with")
    parser.add_argument("--parts", action="store_true", help="also the steps of draw, each timed alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for vocab_size in options.vocab:
        for shape in options.shape:
            chosen = {
                name: verifier
                for name in options.verifier
                if not ((verifier := VERIFIERS[name]).chains_only and max(SHAPES[shape]) > 1)
                and "taps" not in verifier.reads
            }
            drawn = {
                draws: [grow(SHAPES[shape], draws, vocab_size, seed) for seed in range(options.trees)]
                for draws in {verifier.draws for verifier in chosen.values()}
            }
            calls: dict[tuple[str, str], list[Callable[[], object]]] = {}
            for name, verifier in chosen.items():
                for evidence in drawn[verifier.draws]:
                    call = lambda verifier=verifier, evidence=evidence: draw(verifier, evidence)  # noqa: E731
                    calls.setdefault((name, ""), []).append(call)
                    for part, step in parts_of(verifier, evidence).items() if options.parts else ():
                        calls.setdefault((name, part), []).append(step)
            times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
            for turn in range(options.rounds + 3):
                for key, steps in calls.items():
                    spent = timed(steps[turn % len(steps)])
                    if turn >= 3:
                        times[key].append(spent)
            for (name, part), spent in times.items():
                median = statistics.median(spent)
                share = f"  {median / 10 / options.model:5.1f} %" if options.model else ""
                label = f"  {part}" if part else name
                print(f"V {vocab_size:6d}  {shape:6} {label:16} {median:9.0f} us  least {min(spent):9.0f} us{share}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
