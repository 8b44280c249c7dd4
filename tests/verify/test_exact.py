"""Exact match and its coupled twin: one-hot stops, the target's joint distribution exactly, and the same text for every
tree.

The exponentials E of one depth matter only by the order of E_a / p_a over tokens a, for each distribution p in play.
For V = 3 the direction of E is uniform on a triangle, which those comparisons cut into polygons: finitely many
outcomes, whose probabilities are areas. So enumeration is exact, with production code on one point inside each polygon.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.core import noise as noise_module
from foretell.core.noise import Noise, race
from foretell.core.tree import DrawnBy, TokenTree, chain_tree, pad_tree, root_tree
from foretell.verify import Coupled, Evidence, Exact, Rejection, draw
from foretell.verify.base import follow
from tests.verify.enumerate import Case, Tables, tables, target_joint

F, I, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.COUPLED  # noqa: E741
Polygon = np.ndarray  # [n, 3] corners, each row sums to 1


def clip(polygon: Polygon, a: int, b: int, p: Sequence[float]) -> Polygon:
    """The part where E_a / p_a <= E_b / p_b (a wins over b), by Sutherland and Hodgman."""
    height = polygon[:, b] * p[a] - polygon[:, a] * p[b]  # >= 0 inside
    out = []
    for i in range(len(polygon)):
        j = (i + 1) % len(polygon)
        if height[i] >= 0:
            out.append(polygon[i])
        if (height[i] > 0 > height[j]) or (height[i] < 0 < height[j]):
            t = height[i] / (height[i] - height[j])
            out.append(polygon[i] + t * (polygon[j] - polygon[i]))
    return np.array(out).reshape(-1, 3)


def area(polygon: Polygon) -> float:
    """Area relative to the whole triangle's."""
    x, y = polygon[:, 0], polygon[:, 1]
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))))


def cells(distributions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(points [K, 3], weights [K]): directions of E, one for each order of E / p under all the distributions at once."""
    polygons = [np.eye(3)]
    for probs in distributions:
        p = probs.tolist()
        for a, b in itertools.combinations(range(3), 2):
            if p[a] == 0 or p[b] == 0:
                continue  # a token that cannot win cuts nothing
            halves = [clip(polygon, x, y, p) for polygon in polygons for x, y in ((a, b), (b, a))]
            polygons = [half for half in halves if len(half) >= 3 and area(half) > 1e-15]
    points = torch.tensor(np.array([polygon.mean(0) for polygon in polygons]))
    return points, torch.tensor([area(polygon) for polygon in polygons], dtype=torch.float64)


GIVEN: dict[str, Tensor] = {}


class GivenNoise(Noise):
    """Noise whose exponentials are given by depth [R, D, V]: its keys count their rows."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))
        GIVEN["rows"] = rows.reshape(-1, rows.shape[-1])
        self._memo.append(torch.arange(len(rows) * rows.shape[1]).view(rows.shape[:2]))

    def coupled_keys(self, num_depths: int) -> Tensor:
        """As asked, and zero behind: a chain asks for more depths than are looked at."""
        keys = self._memo[0][:, :num_depths]
        return torch.nn.functional.pad(keys, (0, num_depths - keys.shape[1]))


@pytest.fixture
def given_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the race, in float64, read the exponentials of the last GivenNoise."""
    monkeypatch.setattr(noise_module, "exponentials", lambda keys, vocab_size: GIVEN["rows"][keys])


def markov(seed: int, depth: int, *, sparse_p: float = 0.0) -> Tables:
    """Tables whose distributions depend on the last token alone: as many contexts, but fewer distributions to cut the
    triangle by."""
    first = tables(3, 2, seed, sparse_p=sparse_p)

    def spread(distributions: list[Tensor]) -> list[Tensor]:
        return [distributions[0], *[distributions[1].repeat(3 ** (d - 1), 1) for d in range(1, depth)]]

    return Tables(3, spread(first.p), spread(first.q))


def all_noise(distributions: Tables, depth: int) -> tuple[Tensor, Tensor]:
    """(E [R, depth, 3], weights [R]) over all outcomes of independent exponentials at each depth."""
    # Markov distributions; nothing is drafted after the deepest nodes, so that q cuts nothing there.
    parts = [
        cells([*distributions.p[d][: 3 ** min(d, 1)], *(distributions.q[d][: 3 ** min(d, 1)] if d < depth - 1 else [])])
        for d in range(depth)
    ]
    index = torch.cartesian_prod(*[torch.arange(len(weight)) for _, weight in parts]).view(-1, depth)
    rows = torch.stack([points[index[:, d]] for d, (points, _) in enumerate(parts)], 1)
    weight = torch.stack([weight[index[:, d]] for d, (_, weight) in enumerate(parts)], 1).prod(1)
    return rows, weight


def coupled_tree(parent: Sequence[int], distributions: Tables, rows: Tensor) -> tuple[TokenTree, Tensor]:
    """(tree, p [R, N, V]) whose node of sibling rank k has the k-th best token of q / E at its depth."""
    depth, code = [0], [torch.zeros(len(rows), dtype=torch.int64)]
    tokens = [torch.zeros(len(rows), dtype=torch.int64)]
    for node in range(1, len(parent)):
        above = parent[node]
        depth.append(depth[above] + 1)
        score = distributions.q[depth[above]][code[above]] / rows[:, depth[above]]
        rank = sum(parent[i] == above for i in range(1, node))
        tokens.append(score.argsort(1, descending=True)[:, rank])
        code.append(code[above] * 3 + tokens[-1])
    p = torch.stack([distributions.p[depth[i]][code[i]] for i in range(len(parent))], 1)
    probs = torch.tensor([int(F)] + [int(C)] * (len(parent) - 1)).expand(len(rows), -1)
    return TokenTree(torch.stack(tokens, 1), torch.tensor(parent).expand(len(rows), -1), probs), p


def emitted(verifier: Exact, tree: TokenTree, p: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """(tokens [R, N], count [R]) of what one step emits, by production functions: both ways in which draw may go."""
    evidence = Evidence(tree, p, noise)
    verdict = draw(verifier, evidence)
    assert bool(verdict.sound.all())
    walk = verifier.stops(evidence)
    at = verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]
    assert bool(((walk.stops == 0) | (walk.stops == 1)).all())
    assert bool((walk.stops.sum(1) == 1).all())
    assert torch.equal(walk.stops.argmax(1), at), "settle agrees with stops"
    left = verifier.residual(evidence, walk, at)
    assert torch.equal(left, torch.nn.functional.one_hot(verdict.bonus, 3).double()), "settle agrees with leftover"
    tokens = tree.tokens.gather(1, verdict.path).roll(-1, 1)
    tokens.scatter_(1, verdict.count[:, None] - 1, verdict.bonus[:, None])
    return tokens, verdict.count


def plain_text(distributions: Tables, rows: Tensor, length: int) -> Tensor:
    """[R, length] what decoding without any draft draws from the same noise."""
    code, out = torch.zeros(len(rows), dtype=torch.int64), []
    for d in range(length):
        out.append((distributions.p[d][code] / rows[:, d]).argmax(1))
        code = code * 3 + out[-1]
    return torch.stack(out, 1)


@pytest.mark.usefixtures("given_noise")
@pytest.mark.parametrize("sparse", [0.0, 0.3])
@pytest.mark.parametrize("verifier", [Exact(), Coupled()])
@pytest.mark.parametrize(
    "parent", [(-1,), (-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 0, 1, 1, 2), (-1, 0, 0, 0, 1, 2, 3)]
)
def test_joint_law_and_text_by_exact_enumeration(parent: tuple[int, ...], verifier: Exact, sparse: float) -> None:
    probs = markov(7, 3, sparse_p=sparse)
    horizon = max(Case(parent, (F,) * len(parent)).depths) + 1
    rows, weight = all_noise(probs, horizon)
    assert abs(float(weight.sum()) - 1.0) < 1e-12
    tree, p = coupled_tree(parent, probs, rows)
    tokens, count = emitted(verifier, tree, p, GivenNoise(rows))
    assert int(count.max()) == horizon
    plain = plain_text(probs, rows, horizon)
    for k in range(horizon):
        assert bool(((tokens[:, k] == plain[:, k]) | (count <= k)).all()), "the text is that of plain decoding"
    code = (plain * 3 ** torch.arange(horizon - 1, -1, -1)).sum(1)
    joint = torch.zeros(3**horizon, dtype=torch.float64).index_add_(0, code, weight)
    assert float((joint - target_joint(probs, horizon)).abs().max()) < 1e-12


@pytest.mark.usefixtures("given_noise")
def test_coupled_acceptance_is_the_closed_form() -> None:
    """sum_j 1 / sum_i max(p_i / p_j, q_i / q_j), between (1 - TV) / (1 + TV) and 1 - TV; 1 where q = p."""
    for seed in range(8):
        distributions = tables(3, 2, seed)
        rows, weight = all_noise(distributions, 2)
        tree, p = coupled_tree((-1, 0), distributions, rows)
        stops = Coupled().stops(Evidence(tree, p, GivenNoise(rows))).stops
        accepted = float((weight * stops[:, 1]).sum())
        a, b = distributions.p[0][0], distributions.q[0][0]
        form = sum(1 / float(torch.maximum(a / a[j], b / b[j]).sum()) for j in range(3))
        overlap = float(torch.minimum(a, b).sum())
        assert abs(accepted - form) < 1e-12
        assert overlap / (2 - overlap) - 1e-12 <= accepted <= overlap + 1e-12


@pytest.mark.usefixtures("given_noise")
def test_equal_laws_accept_whole_coupled_chains() -> None:
    distributions = markov(1, 3)
    same = Tables(3, distributions.p, distributions.p)
    rows, _ = all_noise(same, 3)
    tree, p = coupled_tree((-1, 0, 1), same, rows)
    assert bool((Coupled().stops(Evidence(tree, p, GivenNoise(rows))).stops[:, 2] == 1).all())


@pytest.mark.usefixtures("given_noise")
def test_mutant_shared_noise_under_rejection() -> None:
    """COUPLED nodes verified as if drawn from q by a rule that then reads the same noise are biased: the mutant draws
    the residual from the noise that chose the draft."""
    worst = 0.0
    for seed in range(30):
        distributions = tables(3, 2, seed)
        rows, weight = all_noise(distributions, 2)
        tree, p = coupled_tree((-1, 0), distributions, rows)
        q = torch.stack([distributions.q[0], torch.zeros_like(distributions.q[0])], 1).expand(len(rows), 2, 3)
        drawn = TokenTree(tree.tokens, tree.parent, torch.tensor([int(F), int(I)]).expand(len(rows), 2), q)
        evidence = Evidence(drawn, p)
        walk = Rejection().stops(evidence)
        left = Rejection().residual(evidence, walk, torch.zeros(len(rows), dtype=torch.int64))
        residual = (left / rows[:, 0]).argmax(1)
        first = torch.zeros(3, dtype=torch.float64)
        first.index_add_(0, tree.tokens[:, 1], weight * walk.stops[:, 1])
        first.index_add_(0, residual, weight * walk.stops[:, 0])
        worst = max(worst, float((first - distributions.p[0][0]).abs().max()))
    assert worst > 1e-3  # exactly enumerated: rounding is 1e-12


# Token equality with plain decoding, by the real noise


def distribution_of(prefix: Sequence[int], vocab_size: int = 12) -> Tensor:
    """A context-dependent distribution for any text."""
    generator = torch.Generator().manual_seed(hash(tuple(prefix)) % (1 << 31))
    weight = -torch.rand(vocab_size, generator=generator).log()
    return weight / weight.sum()


def decode(verifier: Exact, propose: Callable[[list[int], Noise], TokenTree], seed: int, length: int) -> list[int]:
    """A decoding loop small enough to trust: text of ``length`` tokens after token 0."""
    text = [0]
    while len(text) <= length:
        noise = Noise(torch.tensor([seed]), torch.tensor([len(text) - 1]))
        tree = propose(text, noise)
        tree.check()
        rows = []
        for node in range(tree.num_nodes):
            path: list[int] = []
            at = node
            while at > 0:
                path.insert(0, int(tree.tokens[0, at]))
                at = int(tree.parent[0, at])
            rows.append(distribution_of([*text, *path]))
        verdict = draw(verifier, Evidence(tree, torch.stack(rows)[None], noise))
        assert bool(verdict.sound.all())
        text += [*tree.tokens[0, verdict.path[0, 1 : int(verdict.count[0])]].tolist(), int(verdict.bonus[0])]
    return text[1 : length + 1]


def proposals() -> dict[str, Callable[[list[int], Noise], TokenTree]]:
    """Drafters of every kind: none, perfect, useless, coupled with a wrong distribution, random trees, padded ones."""

    def perfect(text: list[int], noise: Noise) -> TokenTree:
        tokens = [text[-1]]
        for depth in range(4):
            tokens.append(
                int(race(distribution_of([*text, *tokens[1:]])[None], noise.coupled_keys(depth + 1)[:, depth]))
            )
        return chain_tree(torch.tensor([tokens]), drawn_by=C)

    def nearly(text: list[int], noise: Noise) -> TokenTree:
        tokens = [text[-1]]
        for depth in range(5):
            mixed = distribution_of([*text, *tokens[1:]]) + 0.5 * distribution_of([len(text)])
            tokens.append(int(race(mixed[None], noise.coupled_keys(depth + 1)[:, depth])))
        return pad_tree(chain_tree(torch.tensor([tokens]), torch.tensor([len(text) % 5 + 1]), drawn_by=F), 9)

    def bush(text: list[int], noise: Noise) -> TokenTree:
        parent = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 4, 4, -1]])
        generator = torch.Generator().manual_seed(len(text))
        tokens = torch.randint(0, 12, (1, 10), generator=generator)
        best = (distribution_of(text) / noise_module.exponentials(noise.coupled_keys(1), 12)[0, 0]).argsort(
            descending=True
        )
        tokens[0, 0], tokens[0, 1:4] = text[-1], best[[1, 0, 0]]  # the right one second, and doubled
        return TokenTree(tokens, parent, torch.zeros_like(tokens))

    return {
        "none": lambda text, noise: root_tree(torch.tensor(text[-1:])),
        "useless": lambda text, noise: chain_tree(torch.tensor([[text[-1], 11, 11, 11]])),
        "perfect": perfect,
        "nearly": nearly,
        "bush": bush,
    }


@pytest.mark.parametrize("seed", [0, 1, -5])
def test_the_text_is_the_same_for_every_drafter(seed: int) -> None:
    texts = {name: decode(Coupled(), propose, seed, 24) for name, propose in proposals().items()}
    assert len(set(texts["none"])) > 3
    for name, text in texts.items():
        assert text == texts["none"], name


def test_control_noise_keyed_by_depth_gives_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: noise that starts anew in each step makes the text depend on the drafter."""

    def keys(self: Noise, num_depths: int) -> Tensor:
        depth = torch.arange(1, num_depths + 1)
        return noise_module.stream_keys(self.seeds[:, None], depth[None], noise_module.Stream.COUPLED)

    monkeypatch.setattr(Noise, "coupled_keys", keys)
    monkeypatch.setattr(Noise, "coupled_key", lambda self, row, depth: int(keys(self, depth + 1)[row, depth]))
    texts = {name: decode(Coupled(), propose, 0, 24) for name, propose in proposals().items()}
    assert len({tuple(text) for text in texts.values()}) > 1


def test_greedy_is_the_argmax_with_ties_to_the_lowest_id() -> None:
    """Item 6.9: bf16 logits tie at the top; draft and target must break ties alike."""
    p = torch.zeros(1, 3, 4)
    p[0, 0, 2], p[0, 1, 1], p[0, 2, 3] = 1.0, 1.0, 1.0
    tree = chain_tree(torch.tensor([[0, 2, 1]]))
    noise = Noise(torch.tensor([3]), torch.tensor([10]))
    verdict = draw(Exact(), Evidence(tree, p, noise))
    assert verdict.count.tolist() == [3]
    assert verdict.bonus.tolist() == [3]


def test_equal_siblings_the_first_counts() -> None:
    p = torch.zeros(1, 6, 4)
    p[..., 2] = 1.0
    tree = TokenTree(
        torch.tensor([[0, 1, 2, 2, 2, 2]]), torch.tensor([[-1, 0, 0, 0, 2, 3]]), torch.zeros(1, 6, dtype=torch.int64)
    )
    walk = Exact().stops(Evidence(tree, p, Noise(torch.tensor([0]), torch.tensor([0]))))
    assert walk.stops.tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]


def test_rows_without_a_law_are_reported() -> None:
    """Item 6.5."""
    p = torch.full((3, 2, 4), 0.25)
    p[0, 0], p[1, 1] = float("nan"), float("nan")
    p[2, 0] = 0.0
    noise = Noise(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    wanted = Exact().stops(Evidence(chain_tree(torch.zeros(3, 1, dtype=torch.int64)), p[:, :1], noise)).carry
    wrong = (wanted[1, 0] + 1) % 4
    tree = chain_tree(torch.tensor([[0, 0], [0, int(wrong)], [0, 0]]))
    assert draw(Exact(), Evidence(tree, p, noise)).sound.tolist() == [False, True, False]
    tree = chain_tree(torch.tensor([[0, 0], [0, int(wanted[1, 0])], [0, 0]]))
    assert draw(Exact(), Evidence(tree, p, noise)).sound.tolist() == [False, False, False]


@pytest.mark.usefixtures("given_noise")
def test_inputs_are_not_mutated() -> None:
    """Item 6.6."""
    probs = markov(1, 3)
    rows, _ = all_noise(probs, 3)
    tree, p = coupled_tree((-1, 0, 0, 1), probs, rows)
    noise = GivenNoise(rows)
    before = [x.clone() for x in (tree.tokens, tree.parent, tree.drawn_by, p, noise.coupled_keys(3))]
    walk = Exact().stops(Evidence(tree, p, noise))
    Exact().residual(Evidence(tree, p, noise), walk, torch.zeros(len(p), dtype=torch.int64)).zero_()
    after = (tree.tokens, tree.parent, tree.drawn_by, p, noise.coupled_keys(3))
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_walk_on_the_host_is_the_walk_by_products() -> None:
    """Few rows are followed on the host, many by products of the ancestor relation."""
    generator = torch.Generator().manual_seed(3)
    parent = torch.full((40, 9), -1)
    for node in range(1, 9):
        above = torch.randint(-1, node, (40,), generator=generator)
        alive = (above <= 0) | (parent.gather(1, above.clamp(min=0)[:, None])[:, 0] >= 0)
        parent[:, node] = torch.where(alive, above, 0)
    at = torch.tensor([[node for node in range(9) if node == 0 or row[node] >= 0][-1] for row in parent.tolist()])
    path, count = follow(parent, at)
    for row in range(40):
        one, length = follow(parent[row : row + 1], at[row : row + 1])
        assert length[0] == count[row]
        assert one[0, : length[0]].tolist() == path[row, : count[row]].tolist()
        assert sorted(one[0].tolist()) == list(range(9))
