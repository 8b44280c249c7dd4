"""Check that a rule that reads noise emits p. Its stops are determined by the noise, so the distribution is estimated
by production ``draw``.

Guesses are made in the way the rule requires (first of the race, or fixed), on the user's own
distributions cut to a few tokens; many seeds, each with noise of its own; the first two tokens are counted. Freedman's
inequality bounds every count at a stated false-alarm rate, so a bias of about one percent of a probability is found, a
smaller one is not.
"""

import torch
from torch import Tensor

from foretell.certify.distribution import VisitedContext
from foretell.certify.draws import freedman_bound
from foretell.certify.joint import SIZE, ContextTables, projected
from foretell.certify.report import DEFECT, Check, Finding, Tally
from foretell.core.noise import Noise, exponentials, int64_seed, mix
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.verify.base import Evidence, Verifier
from foretell.verify.drawing import draw

TREES = {"1-1": (-1, 0, 1), "3": (-1, 0, 0, 0), "2-1": (-1, 0, 0, 1, 2)}
SETS = 2  # sets of visited distributions


def guessed(
    parent: tuple[int, ...], how: DrawMode, distributions: ContextTables, noise: Noise
) -> tuple[TokenTree, Tensor]:
    """(tree of R rows, p [R, N, SIZE]): the children of a node as ``how`` says, by the step's own noise."""
    num_rows, num_nodes = len(noise.seeds), len(parent)
    tokens, code = (torch.zeros(num_rows, num_nodes, dtype=torch.int64) for _ in range(2))
    depth, label = [0] * num_nodes, DrawnBy.FIXED if how == DrawMode.FIXED else DrawnBy.COUPLED
    for node in range(1, num_nodes):
        above = parent[node]
        depth[node] = depth[above] + 1
        rank = parent[1:node].count(above)
        score = distributions.q[depth[above]][code[:, above]].float()
        if how == DrawMode.COUPLED:
            score = score / exponentials(noise.coupled_keys(depth[node])[:, depth[above]], SIZE)
        tokens[:, node] = score.argsort(1, descending=True)[:, rank]
        code[:, node] = code[:, above] * SIZE + tokens[:, node]
    p = torch.stack([distributions.p[depth[node]][code[:, node]] for node in range(num_nodes)], 1).float()
    drawn_by = torch.tensor([int(DrawnBy.FIXED)] + [int(label)] * (num_nodes - 1)).expand(num_rows, -1)
    return TokenTree(tokens, torch.tensor(parent).expand(num_rows, -1), drawn_by), p


def counts(verifier: Verifier, parent: tuple[int, ...], distributions: ContextTables, noise: Noise) -> Tensor:
    """[SIZE * SIZE] float64: how often each pair of first tokens was emitted, a text of one continued by p."""
    tree, p = guessed(parent, verifier.draws, distributions, noise)
    verdict = draw(verifier, Evidence(tree, p, noise))
    rows = torch.arange(len(p))
    # Emitted: the tokens of path[1:count], then the bonus.
    text = torch.cat([tree.tokens.gather(1, verdict.path), verdict.bonus[:, None]], 1)[:, 1:]
    text[rows, verdict.count - 1] = verdict.bonus
    first, found = text[:, 0], torch.zeros(SIZE * SIZE, dtype=torch.float64)
    alone = verdict.count == 1
    pair = first[~alone] * SIZE + text[~alone, 1]
    found.index_add_(0, pair, torch.ones(len(pair), dtype=torch.float64))
    index = first[alone, None] * SIZE + torch.arange(SIZE)
    return found.index_add_(0, index.flatten(), distributions.p[1][first[alone]].flatten())


def check_noise(
    verifier: Verifier, spec: str, contexts: list[VisitedContext], seed: int, alpha: float, num_seeds: int
) -> Check:
    """Compare the counts with p at SETS sets of visited distributions, on each small tree."""
    chosen = projected(contexts, 3, SETS)
    trees = {"1-1": TREES["1-1"]} if verifier.chains_only else TREES
    each = alpha / max(1, len(chosen) * len(trees) * SIZE * SIZE)
    tally = Tally()
    for number, distributions in enumerate(chosen):
        target = (distributions.p[0].flatten()[:, None] * distributions.p[1]).flatten()  # [SIZE * SIZE]
        for name, parent in trees.items():
            key = mix(torch.tensor(int64_seed(seed + 1)) ^ mix(torch.tensor(number * len(TREES) + len(parent))))
            noise = Noise(mix(torch.arange(num_seeds) ^ key), torch.full((num_seeds,), 7))
            gaps = (counts(verifier, parent, distributions, noise) / num_seeds - target).abs()
            bounds = torch.tensor([freedman_bound(num_seeds * float(x * (1 - x)), each) / num_seeds for x in target])
            at = int((gaps / bounds).argmax())
            here = f"tree {name}, distributions of {distributions.where}"
            tally.add(float(gaps[at]), float(bounds[at]), here)
            if not bool((gaps <= bounds).all()):
                words = f"the frequency of a pair of tokens is {float(gaps[at]):.4f} from its probability; "
                words += f"by chance at most {float(bounds[at]):.4f}, but for {each:.1e}"
                tally.findings.append(Finding(DEFECT, here, words, {"probability": float(gaps[at])}))
    measure = f"largest difference of a frequency, distributions cut to {SIZE} tokens, and its bound"
    told = {"alpha": alpha, "seeds": num_seeds}
    return tally.check("noise", spec, "small trees", f"laws, {num_seeds} seeds", measure, told)
