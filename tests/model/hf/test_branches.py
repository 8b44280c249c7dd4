"""Recurrent and hybrid models over trees of guesses: every node's logits are those of a fresh forward of its path, however
the tree is read and whatever of it is kept."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.tree import Plan, chain_tree, layout
from foretell.draft.growing.frontier import pick
from foretell.model.hf import reading
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.recurrent import rewind
from foretell.model.hf.recurrent.branches import Branches
from foretell.model.hf.recurrent.branching import Branching
from foretell.model.target import Target
from tests.model.recurrent import FAMILIES, UNKNOWN, assert_states, family_model, family_module
from tests.model.survey import EXACT
from tests.model.tiny import Rows, path_to, plain_logits
from tests.model.zoo import zoo_module

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed

FEW = ("qwen3_5", "mamba2", "mamba", "lfm2")
"""One of each scan (Kimi's is slow), and convolutions alone."""
OTHERS = tuple(name for name in FAMILIES if name not in (*UNKNOWN, *FEW))


def build(family: str) -> TransformersModel:
    return TransformersModel(zoo_module(family) if family == "kimi_linear" else family_module(family), name=family)


def slow(family: str) -> Any:
    return pytest.param(family, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=(*FEW, slow("kimi_linear"), *map(slow, OTHERS)))
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return build(request.param)


@pytest.fixture(scope="module", params=(*FEW, slow("kimi_linear")))
def one(request: pytest.FixtureRequest) -> TransformersModel:
    return build(request.param)


class Grove(Rows):
    """Rows of text behind a target, and random trees of guesses behind them; ``worst`` is the largest error of a logit."""

    def __init__(self, model: TransformersModel, lengths: tuple[int, ...] = (3, 9, 6), seed: int = 0) -> None:
        super().__init__(model, model.module, lengths)
        self.rng, self.worst, self.known = random.Random(seed), 0.0, dict[tuple[int, ...], Tensor]()
        self.capacity, self.target = 72, Target(model, len(lengths), 72)

    def guesses(self, size: int = 7) -> tuple[Tensor, Tensor]:
        """Tokens and parents [B, size] of random trees, ragged; the first row's branches for certain."""
        parents = []
        for row in range(len(self.texts)):
            count = size if row == 0 else self.rng.randint(1, size)
            parent = [-1, 0, 0][:count] + [self.rng.randrange(max(0, i - 4), i) for i in range(3, count)]
            parents.append(parent + [-1] * (size - count))
        return self.tree(parents)

    def check(self, logits: Tensor | None, tokens: Tensor, plan: Plan, parent: Tensor) -> None:
        """Logits [B, n, V] of a pass over some nodes of a tree."""
        assert logits is not None
        assert bool(logits.isfinite().all()), "padding is finite"
        for row, (ids, parents) in enumerate(zip(tokens.tolist(), parent.tolist(), strict=True)):
            text = self.texts[row]
            paths = [tuple(ids[i] for i in path_to(parents, node)) for node in range(len(parents))]
            for path in sorted(
                paths, key=len, reverse=True
            ):  # a plain run over a path has the logits of all nodes on it
                if (row, *text, *path) not in self.known:
                    plain = plain_logits(self.module, [*text, *path])[len(text) :]
                    self.known |= {(row, *text, *path[: at + 1]): line for at, line in enumerate(plain)}
            for place, slot in enumerate((plan.slots - plan.length[:, None])[row].tolist()):
                if slot == 0 or parents[slot] >= 0:
                    wanted = self.known[row, *text, *paths[slot]]
                    self.worst = max(self.worst, float((logits[row, place] - wanted).abs().max() / wanted.std()))

    def read(self, tokens: Tensor, plan: Plan, parent: Tensor) -> Tensor:
        """One pass over the nodes of a plan, compared."""
        nodes = tokens.gather(1, plan.slots - plan.length[:, None])
        logits = self.target.forward(nodes, plan).logits
        self.check(logits, tokens, plan, parent)
        assert logits is not None
        return logits.clone()

    def keep_some(self, tokens: Tensor, parent: Tensor) -> None:
        """Commit the way to a random node of each row."""
        ends = [self.rng.choice([0, *(i for i, above in enumerate(row) if above >= 0)]) for row in parent.tolist()]
        self.accept(tokens, [path_to(row, end) for row, end in zip(parent.tolist(), ends, strict=True)])

    def line(self) -> None:
        """A line of guesses, of which some are kept."""
        self.step([[-1, 0, 1, 2]] * len(self.texts))

    def step(self, parents: list[list[int]] | None = None) -> None:
        """A tree, read at once."""
        tokens, parent = self.guesses() if parents is None else self.tree(parents)
        self.read(tokens, self.plan(parent), parent)
        self.keep_some(tokens, parent)


def levels(parent: Tensor, plan: Plan) -> Iterator[Plan]:
    """Nodes of one depth at a time, which lie side by side in no row; rows with fewer read padding or others again."""
    depth = (plan.positions - plan.length[:, None]).where((parent >= 0) | (torch.arange(parent.shape[1]) == 0), -1)
    for at in range(int(depth.max()) + 1):
        wide = int((depth == at).sum(1).max())
        chosen = (depth == at).byte().argsort(dim=1, descending=True, stable=True)[:, :wide]
        if bool((depth.gather(1, chosen) == at).all()) or at == 0:
            yield _chosen(plan, chosen)
            continue
        for node in sorted({i for row in (depth == at).nonzero().tolist() for i in row[1:]}):
            yield plan.nodes(node, node + 1)


def _chosen(plan: Plan, chosen: Tensor) -> Plan:
    rows = torch.arange(len(chosen))[:, None]
    return replace(
        plan,
        ancestry=plan.ancestry[rows, chosen],
        slots=plan.slots.gather(1, chosen),
        positions=plan.positions.gather(1, chosen),
        real=None,
    )


def test_random_trees_and_ragged_commits(model: TransformersModel) -> None:
    """Trees and lines in turn, rows that leave and rows that join."""
    assert model.spec.chains_only == ""
    grove = Grove(model)
    grove.prefill(5)
    for _ in range(2):
        grove.step()
    grove.line()
    grove.keep([2, 0])
    grove.step()
    other = Grove(model, (4,), seed=1)
    other.prefill()
    other.step()
    grove.target.cache.join(other.target.cache, grove.capacity)
    grove.texts += other.texts
    grove.pending += other.pending
    grove.step()
    assert max(grove.worst, other.worst) < EXACT


def test_read_in_parts(one: TransformersModel) -> None:
    """At once, node by node, level by level, and in passes of several nodes that lie anywhere."""
    grove = Grove(one, (3, 8))
    grove.prefill()
    for step in range(4):
        tokens, parent = grove.guesses(6)
        plan = grove.plan(parent)
        parts = [
            [plan],
            [plan.nodes(node, node + 1) for node in range(6)],
            [plan.nodes(0, 1), *levels(parent, plan)],
            [plan.nodes(0, 1), plan.nodes(1, 3), plan.nodes(3, 6)],
        ]
        for part in parts[step]:
            grove.read(tokens, part, parent)
        whole = grove.read(tokens, plan, parent)  # again: nothing has changed
        assert whole.shape[1] == 6
        grove.keep_some(tokens, parent)
    assert grove.worst < EXACT


def test_nodes_read_again_in_any_order(one: TransformersModel) -> None:
    """As a self-drafter fills up rows with fewer leaves: other nodes, in front of which leaves stand."""
    grove = Grove(one, (3, 8))
    grove.prefill()
    for _ in range(2):
        tokens, parent = grove.tree([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 1, 1, 2]])
        plan = grove.plan(parent)
        grove.read(tokens, plan.nodes(0, 3), parent)
        grove.read(tokens, plan.nodes(4, 5), parent)
        grove.read(tokens, _chosen(plan, torch.tensor([[5, 3, 0], [5, 3, 1]])), parent)
        grove.read(tokens, plan.nodes(1, 2), parent)
        grove.accept(tokens, [[0, 2, 4, 5], [0, 1, 2, 5]])
    grove.line()
    assert grove.worst < EXACT


def test_slots_change_while_a_tree_is_grown(one: TransformersModel) -> None:
    """A drafter brings what it has read into the tree's order, then reads its leaves: slots change places."""
    grove = Grove(one, (3, 8))
    grove.prefill()
    grown = torch.tensor([[-1, 0, 0, 2, 1]] * 2)
    order = torch.tensor([[0, 2, 3, 1, 4]] * 2)  # the slots of the nodes of the tree below
    settled = torch.tensor([[-1, 0, 1, 0, 3, 4]] * 2)
    for _ in range(2):
        tokens, _ = grove.tree(grown.tolist())
        for node in range(5):
            grove.read(tokens, grove.plan(grown).nodes(node, node + 1), grown)
        base = grove.length[:, None]
        grove.target.commit(base + order, base + torch.arange(5))
        tokens = torch.cat([tokens.gather(1, order), torch.tensor([[7], [9]])], 1)
        grove.read(tokens, grove.plan(settled).nodes(5, 6), settled)
        grove.accept(tokens, [[0, 3, 4, 5], [0, 1, 2]])
    # The node that was read last comes after all leaves.
    tokens, grown = grove.tree([[-1, 0, 0]] * 2)
    grove.read(tokens, grove.plan(grown), grown)
    base, place = grove.length[:, None], torch.tensor([[0, 1, 4]])
    grove.target.commit(base + torch.arange(3), base + place)
    tokens = torch.cat([tokens[:, :2], torch.tensor([[7, 8]] * 2), tokens[:, 2:]], 1)
    settled = torch.tensor([[-1, 0, 1, 1, 0]] * 2)
    grove.read(tokens, grove.plan(settled).nodes(2, 4), settled)
    grove.accept(tokens, [[0, 4], [0, 1, 3]])
    grove.step()
    assert grove.worst < EXACT


def test_a_root_that_a_long_pass_has_read(one: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft model reads its prompt, and the pending token too: the tree begins behind its root, which is not held."""
    for module in (reading, rewind):
        monkeypatch.setattr(module, "HELD_LIMIT", 5)
    grove = Grove(one, (9, 14))
    for row, text in enumerate(grove.texts):
        text.append(grove.pending[row])
    grove.prefill()
    for text in grove.texts:
        text.pop()
    tokens, parent = grove.tree([[-1, 0, 0, 1, 2, 1], [-1, 0, 0, 2, 2, -1]])
    plan = grove.plan(parent)
    for part in (pick(plan, torch.tensor([2])), plan.nodes(1, 2), plan.nodes(3, 6)):
        grove.read(tokens, part, parent)
    grove.accept(tokens, [[0, 2, 4], [0, 2, 3]])
    grove.step()
    assert grove.worst < EXACT


def test_layers_in_two_ranges(one: TransformersModel) -> None:
    """A self-drafter runs the lower layers level by level, the step the upper ones over all."""
    grove, last = Grove(one, (3, 8)), one.spec.num_layers
    grove.prefill()
    for path in ([0, 2, 4], [0, 1], [0, 2, 3]):
        tokens, parent = grove.tree([[-1, 0, 0, 2, 2]] * 2)
        plan = grove.plan(parent)
        lower = [
            grove.target.forward(tokens[:, a:b], plan.nodes(a, b), layers=(0, 1), head=False).hidden.clone()
            for a, b in ((0, 1), (1, 3), (3, 5))
        ]
        out = grove.target.forward(tokens, plan, layers=(1, last), hidden=torch.cat(lower, 1))
        grove.check(out.logits, tokens, plan, parent)
        grove.accept(tokens, [path, [0]])
    assert grove.worst < EXACT


@pytest.mark.parametrize("family", [slow("qwen3_5"), "mamba2", slow("mamba"), "lfm2"])
def test_a_kept_branch_leaves_the_states_of_its_text(family: str) -> None:
    """Those of the slow twin, which reads the text token by token."""
    grove = Grove(build(family), (2,))
    twin, read = Target(family_model(family + "/again"), 1, grove.capacity), 0
    grove.prefill()
    for path in ([0, 2, 4], [0, 1, 5, 6]):
        tokens, parent = grove.tree([[-1, 0, 0, 0, 2, 1, 5]])
        grove.target.forward(tokens, grove.plan(parent), head=False)
        grove.accept(tokens, [path])
        while read < len(grove.texts[0]):
            token = torch.tensor([[grove.texts[0][read]]])
            twin.forward(token, layout(torch.tensor([[-1]]), torch.tensor([read]), grove.capacity), head=False)
            read += 1
        cache, other = grove.target.cache, twin.cache
        mine, theirs = cache.save(len(grove.texts[0])), other.save(len(grove.texts[0]))
        assert mine.position == theirs.position == len(grove.texts[0])
        assert_states(mine, theirs)


@pytest.mark.parametrize("family", [slow("qwen3_5"), "mamba2", slow("mamba"), "lfm2"])
def test_in_bfloat16_a_tree_is_as_near_to_float32_as_its_lines(family: str) -> None:
    model = TransformersModel(family_module(family, dtype=torch.bfloat16), name=family)
    assert model.spec.chains_only == ""
    exact = family_module(family, dtype=torch.bfloat16).float()
    grove, errors = Grove(model, (9,)), torch.zeros(2)
    grove.prefill()
    for path in ([0, 2, 4], [0, 1, 3], [0, 2, 5, 6]):
        tokens, parent = grove.tree([[-1, 0, 0, 1, 2, 2, 5]])
        tree = grove.target.forward(tokens, grove.plan(parent)).logits
        assert tree is not None
        for node in (3, 4, 6):
            ids = [int(tokens[0, i]) for i in path_to(parent[0].tolist(), node)]
            line, text = Target(model, 1, grove.capacity), grove.texts[0]
            for part, at in ((text, 0), (ids, len(text))):
                plan = layout(chain_tree(torch.tensor([part])).parent, torch.tensor([at]), grove.capacity)
                out = line.forward(torch.tensor([part]), plan).logits
            assert out is not None
            wanted = plain_logits(exact, text + ids)[-1]
            errors += torch.stack([(x[0, at].float() - wanted).pow(2).sum() for x, at in ((tree, node), (out, -1))])
        grove.accept(tokens, [path])
    mine, lines = errors.sqrt().tolist()
    assert 0 < mine < 1.25 * lines, (mine, lines)


def test_lines_are_read_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form with a mask of ancestors is taken where a plan branches alone."""
    grove, passes = Grove(build("lfm2"), (3, 8)), []
    go_on = Branching._go_on
    monkeypatch.setattr(Branching, "_go_on", lambda self, hidden: (passes.append(1), go_on(self, hidden))[1])
    grove.prefill()
    grove.line()
    tokens, parent = grove.tree([[-1, 0, 1, -1], [-1, 0, 1, 2]])
    for node in range(4):
        grove.read(tokens, grove.plan(parent).nodes(node, node + 1), parent)
    assert not passes
    grove.step()
    assert passes


def test_trees_are_refused_where_inputs_are_read_again() -> None:
    model = family_model("mamba2/again")
    assert "recurrent state" in model.spec.chains_only
    assert "read accepted guesses again" in model.spec.chains_only
    target = Target(model, 1, 32)
    with pytest.raises(ConfigError, match=r"read accepted guesses again.*choose shape 'chain'"):
        target.forward(torch.tensor([[3, 4, 5]]), layout(torch.tensor([[-1, 0, 0]]), torch.tensor([0]), 32))
    with pytest.raises(RuntimeError, match="reads lines"):
        target.commit(torch.tensor([[2]]), torch.tensor([[1]]))


def test_a_model_that_fails_over_trees_reads_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at loading: a tree behind a side branch of another."""
    windows = Branches.windows
    with monkeypatch.context() as patch:
        patch.setattr(Branches, "windows", lambda self, before, whole: windows(self, before, whole.roll(1, 1)))
        model = TransformersModel(family_module("qwen3_next"), name="odd")
    assert model.spec.reads_again == ""
    assert "a check at loading failed: odd: logits of Qwen3NextForCausalLM over a tree differ" in model.spec.chains_only
    ours = [record for record in caplog.records if record.name.startswith("foretell")]
    (told,) = [record for record in ours if record.levelname == "WARNING"]
    assert "odd: lines of guesses are read, and no trees: odd: logits" in told.getMessage()
    grove = Grove(model, (3, 8))
    grove.prefill()
    for _ in range(2):
        grove.line()
    assert grove.worst < EXACT
    tokens, parent = grove.guesses()
    with pytest.raises(ConfigError, match="a check at loading failed"):
        grove.target.forward(tokens, grove.plan(parent))
