"""Every memo of the package, listed from its source: it gives what would be made anew, whatever was asked before.

A memo whose key leaves something out answers with another's value, and no test of one input sees it. So each that the
walk finds is asked here about inputs that could be taken for one another, or by the test that ``SEEN`` names.
"""

import ast
import dataclasses
import importlib
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foretell import SamplingParams
from foretell.bench.answers import AnswerCheck
from foretell.bench.quality import Judge
from foretell.core.probs import Processors
from foretell.core.tree import DrawnBy
from foretell.costs.table import PASS, CostTable, Surface, TextCosts
from foretell.draft.shapes import Chain, Sequoia, Static
from foretell.engine.request.text import TextStream
from foretell.engine.structured.thoughts import Thoughts
from foretell.heads.modules import RopeScaling
from foretell.planner.acceptance import Acceptance
from foretell.planner.corrections import Corrections
from foretell.planner.observations import RowView
from foretell.planner.offers import Offers
from foretell.planner.shares import LightShares
from tests.engine.harness import PIECES, ToyTokenizer
from tests.structure import PACKAGE, ROOT

CPU = torch.device("cpu")
YARN = RopeScaling("yarn", 4.0, 64)

ASKED: dict[str, Sequence[tuple[Any, ...]]] = {
    "certify.endpoint.statistics.needed_noncentrality": [(3, 0.01, 0.9), (4, 0.01, 0.9), (3, 0.02, 0.9), (3, 0.01, 0.8)],
    "core.noise._depth_offsets": [(3, CPU), (4, CPU)],
    "core.noise._number": [(3, CPU), (4, CPU), (-3, CPU)],
    "core.noise.token_table": [(5, CPU), (6, CPU)],
    "core.settings._plain": [(int | None,), (float | None,), (tuple[int, ...],)],
    "core.tree._chain_ancestors": [(3, CPU), (4, CPU)],
    "core.tree._chain_labels": [(3, DrawnBy.IID, CPU), (3, DrawnBy.FIXED, CPU), (4, DrawnBy.IID, CPU)],
    "core.tree._roots": [(2, CPU), (3, CPU)],
    "core.tree.chain_parent": [(3, CPU), (4, CPU)],
    "draft.growing.children._greedy_labels": [(2, CPU), (3, CPU)],
    "draft.growing.children._label": [(DrawnBy.IID, CPU), (DrawnBy.FIXED, CPU)],
    "draft.growing.children._ranks": [(2, CPU), (3, CPU)],
    "draft.growing.template.compiled": [
        ((-1, 0, 0, 1), 2, False, CPU), ((-1, 0, 0, 1), 2, True, CPU), ((-1, 0, 0, 1), 1, False, CPU),
        ((-1, 0, 1), 2, False, CPU),
    ],
    "draft.growing.template.parent_of": [
        (Static(branching=(2, 1)),), (Static(branching=(1, 2)),), (Sequoia(depth=3, size=6),), (Sequoia(depth=3, size=7),),
    ],
    "engine.request.text._borders": [("abab",), ("abba",)],
    "heads.modules._frequency": [
        (4, 1e4, None, CPU), (4, 1e5, None, CPU), (3, 1e4, None, CPU), (4, 1e4, YARN, CPU),
    ],
    "heads.modules.rotations": [(9, 4, 1e4), (8, 4, 1e4), (9, 6, 1e4), (9, 4, 1e5), (9, 4, 1e4, YARN)],
    "methods.hybrid.drafter.shape_of": [
        (Sequoia(depth=4, size=9), 3, 1), (Sequoia(depth=4, size=9), 3, 2), (Sequoia(depth=4, size=9), 2, 1),
        (Sequoia(depth=4, size=8), 3, 1), (Chain(4), 3, 1),
    ],
    "model.llama.run.native._numbers": [((1, 2),), ((2, 1),), ((1,),)],
    "server.unsupported.near": [
        ("temprature", frozenset({"temperature"})), ("temprature", frozenset()), ("sede", frozenset({"seed"})),
    ],
    "verify.selection.gauss": [(3, CPU), (5, CPU)],
}  # fmt: skip
"""Arguments of which no two give the same."""

SEEN: dict[str, str] = {
    "bench.quality.Judge.right:self._known": "::test_answers_are_judged_by_their_own_question",
    "certify.endpoint.report.Session.greedy:self._greedy": "tests/certify/test_endpoint.py",
    "certify.recorder.VisitRecorder.__call__:self._last": "tests/certify/test_draws.py",
    "engine.loop.Loop._move:self.running": "tests/engine/test_traffic.py",
    "core.graphs.Graphs.processors:self._processors": "tests/device/test_graphs.py",
    "core.graphs.Graphs.run:self._kinds": "tests/device/test_graphs.py",
    "core.probs.Processors.part:self._parts": "::test_parts_of_processors_are_their_rows",
    "core.registry.Registry.__getitem__:self._values": "tests/extend/test_registry.py",
    "core.registry.Registry.__iter__:self._values": "tests/extend/test_registry.py",
    "core.registry.Registry._refuse:self._refused": "tests/extend/test_registry.py",
    "core.settings._adapter": "tests/core/test_settings.py",
    "core.settings._declared": "tests/core/test_settings.py",
    "core.shelf.Shelf.put:self.entries": "tests/core/test_shelf.py",
    "costs.table.Surface.__call__:self._points": "::test_costs_are_those_of_a_table_that_was_asked_nothing",
    "costs.table.CostTable.verdict:self._verdicts": "::test_costs_are_those_of_a_table_that_was_asked_nothing",
    "costs.table.Surface.curve:self._curves": "::test_costs_are_those_of_a_table_that_was_asked_nothing",
    "draft.automaton.Automaton._point:self.next[at]": "tests/draft/test_suffix.py",
    "engine.calibrate.Bench._open:self._batches": "tests/engine/test_calibrate.py",
    "engine.methods.Methods.choice:self._choices": "tests/engine/drafters/test_groups.py",
    "engine.methods.Methods.tokenizers:self._tokenizers": "tests/methods/draft_model/test_translation.py",
    "engine.request.text.TextStream._text_of_one:self._known": "::test_texts_of_tokens_are_their_own_tokenizers",
    "engine.selfcheck._PassReader._read:self._known": "tests/engine/test_selfcheck.py",
    "engine.structured.compiling.CompileCheck._asked:self._refused": "tests/server/test_compiling.py",
    "core.probs.History.tensor:self._tensors": "tests/core/test_deferred.py",
    "doctor.examine.Predicted._lane:self._lanes": "tests/doctor/test_checkup.py",
    "engine.prefix_files.PrefixFiles.load:self._ahead": "tests/engine/test_prefix_files.py",
    "engine.structured.constraint.ConstraintProcessor._permitted:self._memo": "tests/server/test_constraint.py",
    "engine.structured.constraint.Constraints._compile:self._made": "tests/server/test_constraint.py",
    "engine.structured.enforceable._reduced": "tests/server/test_constraint.py",
    "engine.structured.thoughts.Thoughts.text:self._texts": "::test_texts_of_tokens_are_their_own_tokenizers",
    "kernels.build._load": "tests/kernels/test_build.py",
    "kernels.build._target": "tests/kernels/test_build.py",
    "kernels.build._version": "tests/kernels/test_build.py",
    "kernels.dequantise.can_dequantise": "tests/kernels/test_dequantise.py",
    "kernels.dequantise.grid_of": "tests/kernels/test_dequantise.py",
    "kernels.gpu.ops.ops": "tests/device/test_triton.py",
    "kernels.gpu.ops.register": "tests/device/test_triton.py",
    "kernels.heads._library": "tests/methods/test_native.py",
    "kernels.native._library": "tests/model/llama/test_native.py",
    "learn.adapters.Adapters.find:self.by_tenant": "tests/learn/test_service.py",
    "learn.adapters.ServedAdapter.within:self._wholes": "tests/learn/test_hybrid.py",
    "learn.training.trainer.AdapterTrainer._gate:self._scores": "tests/learn/test_trainer.py",
    "heads.stored_outputs.OutputKeeper._text:self._kept": "tests/train/test_kept.py",
    "heads.native.Memory.__init__:self._matrices": "tests/methods/test_native.py",
    "methods.hybrid.config.size_for:_known": "tests/engine/test_hybrid.py",
    "checkpoints.gguf.file._open": "tests/checkpoints/gguf/test_load.py",
    "checkpoints.gguf.values.say": "tests/checkpoints/gguf/test_config.py::test_every_key_is_read_or_said",
    "model.hf.own.Positions.during.put:self._tables": "tests/model/hf/test_own.py",
    "model.llama.run.native.NativeModel._threads:self._threads_for": "tests/model/llama/test_native.py",
    "checkpoints.templates._compiled": "tests/engine/request/test_conversation.py",
    "model.trained._entry_of_files": "tests/model/test_trained.py",
    "planner.acceptance.Acceptance._lent_to:self._lent": "tests/planner/test_acceptance.py",
    "planner.acceptance.Acceptance._pool_of:self._pool_places": "tests/planner/test_acceptance.py",
    "planner.acceptance.Acceptance._slot:self._slots": "tests/planner/test_acceptance.py",
    "planner.acceptance.Acceptance.curves_of_one:self._pool_rates": "tests/planner/test_acceptance.py",
    "planner.budget.Budget.covers:self._asked": "tests/planner/test_budget.py",
    "planner.budget.Budget.open:self._credit": "tests/planner/test_budget.py",
    "planner.offers.Offers._grid:self._grids": "::test_offers_are_those_of_who_was_asked_nothing",
    "planner.offers.Offers._may_guess:self._able": "::test_offers_are_those_of_who_was_asked_nothing",
    "planner.offers.Offers.single:self._columns": "::test_offers_are_those_of_who_was_asked_nothing",
    "server.protocol.fields.names_of": "tests/server/test_fields.py",
    "server.backend.Backend.thoughts:self._thoughts": "tests/server/test_thoughts.py",
    "server.texts.tokens.TokenTexts.__init__:partial(_decodes_to_nothing, tokenizer)": "tests/server/test_echo.py",
    "server.texts.tokens.TokenTexts.__init__:partial(_text, tokenizer)": "tests/server/test_echo.py",
    "service.drift.Drifts.__call__:self._watches": "tests/service/test_drift.py",
    "service.processors.StepBudget.spend:self._spent": "tests/service/test_processors.py",
    "service.tenants.Tenants.choice:self._stores": "tests/service/test_tenants.py",
    "verify.selection.race_table": "tests/verify/test_multidraft.py",
}
"""Those whose test asks in another way: here, or in a file, of which several do."""


# -- the walk --------------------------------------------------------------------------------------------------------


def sources(pattern: str) -> list[tuple[str, ast.Module]]:
    """The package's files in which a pattern stands, by module: reading all of them into trees takes seconds."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(pattern, text):
            parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
            found.append((".".join(parts), ast.parse(text)))
    return found


def is_cache(node: ast.expr) -> bool:
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return name.rsplit(".", maxsplit=1)[-1] in ("cache", "lru_cache")


def own(node: ast.AST) -> list[ast.AST]:
    """What stands in a module, class or function, but not in those within it."""
    found, todo = list[ast.AST](), list(ast.iter_child_nodes(node))
    while todo:
        one = todo.pop()
        found.append(one)
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo += ast.iter_child_nodes(one)
    return found


def kept_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Mappings that a function looks into by a key, and writes to: those that outlive it."""
    looked, written = set(), set()
    for node in nodes:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            looked.add(ast.unparse(node.comparators[0]))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            looked.add(ast.unparse(node.func.value))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            written |= {ast.unparse(one.value) for one in targets if isinstance(one, ast.Subscript)}
    return {name for name in looked & written if name.startswith(("self.", "_"))}


def memos() -> dict[str, int]:
    """All of them by name, with how many parameters tell one value from another (methods: one at least)."""
    found: dict[str, int] = {}

    def visit(scope: ast.AST, name: str) -> None:
        nodes = own(scope)
        if isinstance(scope, ast.FunctionDef):
            found.update({f"{name}:{kept}": 1 for kept in kept_in(nodes)})
            if any(map(is_cache, scope.decorator_list)):
                found[name] = len(scope.args.args) + len(scope.args.kwonlyargs)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(node, f"{name}.{node.name}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Call) and is_cache(node.func):
                found[f"{name}:{ast.unparse(node.args[0])}"] = 1

    for name, tree in sources(r"cache\b|\bin (self\.|_)\w|(self\.|\b_)[\w.]+\.(get|pop)\("):
        visit(tree, name)
    return found


def test_every_memo_is_asked() -> None:
    """One without parameters holds what is the same for the whole process."""
    found = {name for name, count in memos().items() if count}
    assert found - set(ASKED) - set(SEEN) == set(), "a new memo: give it inputs that could be taken for one another"
    assert set(ASKED) | set(SEEN) == found, "one that is gone"
    names = cache(lambda path: set(re.findall(r"^def (test_\w+)\(", (ROOT / path).read_text(), re.MULTILINE)))
    for seen in SEEN.values():
        path, _, test = seen.partition("::")
        path = path or "tests/test_memos.py"
        assert names(path), path
        assert not test or test in names(path), seen


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors, arrays and arrays of C among them."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "_length_"):
        return list(one) == list(other)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and same(
            *([getattr(x, each.name) for each in dataclasses.fields(one)] for x in (one, other))
        )
    return bool(one == other)


@pytest.mark.parametrize("name", ASKED)
def test_a_function_that_remembers_gives_what_it_would_make(name: str) -> None:
    """Also to who asks after others have used what it gave: it is shared, and nobody may write to it."""
    module, _, function = name.rpartition(".")
    asked = getattr(importlib.import_module(f"foretell.{module}"), function)
    cases = list(ASKED[name])
    fresh = [asked.__wrapped__(*case) for case in cases]
    for order in (cases, cases[::-1]):
        assert all(same(asked(*case), fresh[cases.index(case)]) for case in order)
    pairs = [(one, other) for place, one in enumerate(fresh) for other in fresh[:place]]
    assert pairs
    assert not any(same(one, other) for one, other in pairs)


def properties() -> list[tuple[str, str, str]]:
    """(class, cached property, attribute that it reads and another method assigns)."""
    found = []
    for _, tree in sources(r"cached_property"):
        for kind in ast.walk(tree):
            if not isinstance(kind, ast.ClassDef):
                continue
            methods = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
            changed = {
                node.attr
                for method in methods
                if method.name not in ("__init__", "__post_init__")
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
            for method in methods:
                if any(ast.unparse(one).endswith("cached_property") for one in method.decorator_list):
                    read = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
                    found += [(kind.name, method.name, name) for name in sorted(read & changed) or [""]]
    return found


def test_no_property_that_is_made_once_reads_what_changes() -> None:
    found = properties()
    assert len(found) > 20
    assert [one for one in found if one[2]] == []


# -- asked ------------------------------------------------------------------------------------------------------------


def test_answers_are_judged_by_their_own_question() -> None:
    judge = Judge()
    first, second = AnswerCheck("number", "12"), AnswerCheck("number", "13")
    assert [judge.right(check, text) for check in (first, second, first) for text in ("It is 12.", "It is 13.")] == [
        True, False, False, True, True, False,
    ]  # fmt: skip


def test_parts_of_processors_are_their_rows() -> None:
    rows = [SamplingParams(temperature=0.1 * row, top_k=row, logit_bias={row: 1.0}) for row in range(6)]
    whole = Processors(rows, vocab_size=9, end_token_ids=[1], device=CPU)
    parts = [(start, stop) for start in range(6) for stop in range(start + 1, 7)] * 2
    random.Random(1).shuffle(parts)
    for start, stop in parts:
        part, fresh = whole.part(start, stop), whole.keep(range(start, stop))
        assert part.params == tuple(rows[start:stop])
        assert same([part.bias, part.top_ks, part.scales], [fresh.bias, fresh.top_ks, fresh.scales])


def test_texts_of_tokens_are_their_own_tokenizers() -> None:
    """Two of one length, and one after another at the same place in memory."""
    for turn in range(4):
        pieces = PIECES[turn:] + PIECES[:turn]
        tokenizer = ToyTokenizer(pieces, special=())
        for token in (0, 5, 14, 0):
            stream = TextStream(tokenizer)
            stream.push(token)
            stream.finish()
            assert stream.take() == pieces[token].decode(errors="replace")
            thoughts = Thoughts.__new__(Thoughts)
            thoughts._tokenizer, thoughts._texts = tokenizer, {}
            assert [thoughts.text(token), thoughts.text(token)] == [tokenizer.decode([token])] * 2


def table() -> CostTable:
    verify = {(b, b * (1 + d)): 1.0 + 0.01 * b + 0.02 * b * (1 + d) for b in (1, 2, 4, 8) for d in (0, 1, 2, 4)}
    draft = {
        name: {(b, d): cost * (0.5 + b) * d for b in (1, 2, 4, 8) for d in (1, 2, 4)}
        for name, cost in {"cheap": 0.01, "dear": 0.6, "middling": 0.08}.items()
    }
    texts = {PASS: TextCosts(1e-4, 1e-5), "cheap": TextCosts(1e-5, 1e-3), "middling": TextCosts(0.0, 2e-3)}
    return CostTable(verify, draft, {"cheap": 0.001, "dear": 0.002}, texts, length=20.0)


def test_costs_are_those_of_a_table_that_was_asked_nothing() -> None:
    used, rng = table(), random.Random(3)
    cells = {(batch, size): 1.0 + 0.1 * batch + 0.3 * size * batch for batch in (1, 3, 8) for size in (0, 2, 5)}
    surface = Surface(cells)
    for _ in range(200):
        batch, size, method = rng.randint(1, 12), rng.randint(0, 9), rng.choice(("cheap", "dear", "middling"))
        fresh = table()
        assert used.verify(batch, batch + size, 50.0 * size) == fresh.verify(batch, batch + size, 50.0 * size)
        assert used.draft(method, batch, size) == fresh.draft(method, batch, size)
        assert same(used.verify_curve(batch), fresh.verify_curve(batch))
        assert used.verdict(method) == fresh.verdict(method)
        assert surface(batch, size) == Surface(cells)(batch, size)


def test_offers_are_those_of_who_was_asked_nothing() -> None:
    """Of rows of any methods, temperatures, lengths, batches, before and after what is known of their guesses changes."""
    rng, acceptance, costs = random.Random(5), Acceptance(4), table()
    corrections, shares = Corrections(costs.methods), LightShares()
    used, differ = Offers(costs, acceptance, corrections, shares), set()
    for step in range(150):
        fresh = Offers(costs, acceptance, corrections, shares)
        rows = [
            RowView(
                str(row), rng.choice(("cheap", "dear", "middling")), rng.randint(1, 4), rng.randint(0, 9),
                rng.choice((0, 3)), heat=rng.randint(0, 3), length=rng.choice((1, 30, 200, 5000)),
            )
            for row in range(rng.randint(1, 9))
        ]  # fmt: skip
        plain = fresh.plain_of(rows)
        mine, its = used.several(rows, plain), fresh.several(rows, plain)
        assert same(mine, its), step
        one, other = used.single(rows[0], plain), fresh.single(rows[0], plain)
        assert same(one, other), step
        if one is not None:
            differ.add((rows[0].method, len(one.kept)))
        row = rng.choice(rows)
        acceptance.tick()
        acceptance.observe(row.request_id, row.method, 3, 3, rng.randint(0, 3), 3, row.heat)
    assert len(differ) > 4
