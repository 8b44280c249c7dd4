"""What each causal type of transformers can do here, seen on a tiny random instance of it; the page that lists it.

``python -m tests.model.survey > docs/model-types.md`` runs every type and writes the page; with names of types it runs
those and prints their lines. ``test_types.py`` holds the page to what a run says.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from foretell.checkpoints.gguf.families.architectures import ARCHITECTURES
from foretell.core.errors import ModelError
from foretell.core.tree import Plan
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.refusals import check_config
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.load import unsupported
from foretell.model.target import CausalModel
from tests.model.tiny import ACCEPTED, BUSHY, Rows, largest_error
from tests.model.zoo import NOT_MADE, TYPES, WHY, zoo_config, zoo_module

EXACT = 5e-4  # of the logits' standard deviation, in float32
CHAINS = [[-1, 0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, -1, -1, -1], [-1, 0, 1, 2, 3, -1, -1]]
KEPT = [[[0, 1, 2], [0, 1, 2, 3], [0]], [[0], [0, 1], [0, 1, 2, 3]], [[0, 1, 2, 3, 4], [0], [0, 1]]]
"""Lines of guesses, and of each row's how many are kept with the root, in each of three steps: the ragged commits."""
FAST: dict[str, Any] = {"native": NativeModel, "lean": LeanModel}
GGUF_TYPES = frozenset(architecture.model_type for architecture in ARCHITECTURES.values()) | {
    "deepseek_v2",
    "glm4_moe_lite",
}
"""Files of the last two are deepseek2's."""


@dataclass(frozen=True)
class Support:
    """What is true of one type."""

    kind: str
    implementation: str = ""  # the fastest of "native", "lean", "transformers"; empty where the type is refused
    trees: bool = False
    chains: bool = False
    heads: bool = False  # taps, embedding, final norm and head can be used by a trained head
    lean: bool = False  # runs in lean too
    note: str = ""

    @property
    def group(self) -> str:
        """The beginning of the page's line that lists this type beside those of which the same is true."""
        if not self.implementation:
            return f"- {self.note}: "
        quantised, in_gguf = self.implementation == "native", self.kind in GGUF_TYPES
        has = (self.trees, self.chains, self.heads, quantised, in_gguf)
        runs = f"{self.implementation}{' and lean' if self.lean and self.implementation != 'lean' else ''}"
        marks = " | ".join("yes" if mark else "–" for mark in has)
        return f"| {runs}{f', {self.note}' if self.note else ''} | {marks} | "


def survey(kind: str) -> Support:
    """Run a tiny instance of a type through trees or chains. Raises AssertionError where a model that was not refused gives
    other logits than a plain forward of the same text."""
    if kind in NOT_MADE:
        return Support(kind, note=NOT_MADE[kind])
    config = zoo_config(kind)
    try:
        check_config(config, name=kind)
        module = zoo_module(kind)
        model = TransformersModel(module, name=kind)
    except ModelError as error:
        return Support(kind, note=WHY.get(kind) or _reason(kind, str(error)))
    branches = not model.spec.chains_only
    check_logits(model, module, branches=branches)
    heads = can_carry_heads(model, module)
    note = "as decoder" if getattr(config, "is_decoder", False) else ""
    note = "recurrent states" if model._mixers else note
    found = Support(kind, "transformers", branches, True, heads, note=note)
    runs = [name for name in FAST if unsupported(name, module.config, torch.float32, torch.device("cpu")) is None]
    if not runs:
        return found
    check_logits(FAST[runs[0]].from_hf(module), module, branches=True)
    return replace(found, implementation=runs[0], trees=True, lean="lean" in runs)


def check_logits(model: CausalModel, module: PreTrainedModel, *, branches: bool) -> None:
    """Every node's logits are those of a plain forward of its path, over three steps with ragged commits."""
    rows = Rows(model, module)
    rows.prefill()
    for paths in ACCEPTED if branches else KEPT:
        tokens, parent = rows.tree(BUSHY if branches else CHAINS)
        plan = rows.plan(parent)
        if branches and paths is ACCEPTED[0]:  # the negative control: a tree that is read as a chain must be seen
            wrong = rows.target.forward(tokens, _as_chain(plan))
            assert largest_error(wrong, rows.expected(tokens, parent)) > 40 * EXACT, "attention does not matter"
        output = rows.target.forward(tokens, plan)
        assert output.logits.isfinite().all(), "padding nodes must stay finite"
        error = largest_error(output, rows.expected(tokens, parent))
        assert error < EXACT, f"{model.spec.name} ({model.spec.implementation}): logits differ by {error:.1e}"
        rows.accept(tokens, paths)


def can_carry_heads(model: CausalModel, module: PreTrainedModel) -> bool:
    """Whether taps are what the layers return, and norm and head apart give the logits of the pass."""
    rows = Rows(model, module)
    rows.prefill()
    tokens, parent = rows.tree(CHAINS)
    plan = rows.plan(parent)
    last = model.spec.num_layers - 1
    try:
        output = rows.target.forward(tokens, plan, taps=(last, 0))
        assert output.taps is not None
        assert output.logits is not None
        logits = model.head(model.normed(output.hidden))
        embedded = model.embed(tokens)
    except Exception:
        return False
    size = model.spec.hidden_size
    same = partial(torch.allclose, atol=1e-4, rtol=1e-4)
    return (
        same(output.taps[..., :size], output.hidden)
        and same(logits, output.logits)
        and embedded.shape == output.hidden.shape
    )


def _as_chain(plan: Plan) -> Plan:
    size = plan.ancestry.shape[2]
    return replace(plan, ancestry=torch.ones(size, size, dtype=torch.bool).tril().expand_as(plan.ancestry))


def _reason(kind: str, message: str) -> str:
    said = message.removeprefix(f"{kind}: ").removeprefix(f"{kind} ").partition("; expected")[0].partition("; known")[0]
    return " ".join(said.replace("|", "/").split()).removesuffix(f" ({kind})")


_HEADER = """# Model types

Does foretell run your model, and how well? This page lists every type (`model_type` in `config.json`) that
transformers {version} has a causal language model for. Where models come from: [models.md](models.md).

{working} of {total} types work: {native} natively, {lean} in lean, {others} through transformers; {trees} of them over
trees.

- **runs on**: the fastest implementation. `native` (one C call a pass) runs on x86-64 CPUs, `lean` (plain torch) on every
  device, and `transformers` is the unmodified model with our masks, positions and cache.
- **trees**, **chains**: the shapes of guesses. Without a tree every method still guesses a chain.
- **heads**: whether a head trained on hidden states (EAGLE-3, Medusa, ...) has what it needs: taps, embedding, norm, head.
- **quantised**: matrices in 8 or 4 bits, and packed as a GGUF file holds them. **GGUF**: files of this type can be read.
- *as decoder*: the type with `is_decoder: true` (and, of encoder-decoder types, the decoder alone).

Each type is made as a tiny random instance. The logits of every node of a batch of trees (of chains, where a model reads no
trees) are compared with a plain forward of the same text, before and after ragged commits; a tree read as a
chain must be seen as wrong. `python -m tests.model.survey` writes this page, and the tests hold it to what a run says.

| runs on | trees | chains | heads | quantised | GGUF | types |
| --- | --- | --- | --- | --- | --- | --- |
"""


def page(rows: Sequence[Support]) -> str:
    """The whole page."""
    runs = [row.implementation for row in rows]
    header = _HEADER.format(
        version=transformers.__version__, working=sum(map(bool, runs)), total=len(rows), native=runs.count("native"),
        lean=runs.count("lean"), others=runs.count("transformers"), trees=sum(row.trees for row in rows),
    )  # fmt: skip
    kinds: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: (row.implementation != "native", not row.trees, row.note)):
        kinds.setdefault(row.group, []).append(f"`{row.kind}`")
    lines = {group: f"{group}{', '.join(kinds[group])}" for group in kinds}
    works = [f"{line} |" for group, line in lines.items() if group.startswith("|")]
    refused = [line for group, line in lines.items() if not group.startswith("|")]
    return header + "\n".join(works) + "\n\n## Types that are refused, and why\n\n" + "\n".join(refused) + "\n"


def groups(text: str) -> dict[str, str]:
    """Of every type that a page lists the beginning of its line. Raises ValueError for a type that is listed twice."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(\| .* \| |- .*: )(`[^`]+`(?:, `[^`]+`)*)(?: \|)?", line):
            for kind in match[2].replace("`", "").split(", "):
                if kind in found:
                    raise ValueError(f"{kind} is listed twice")
                found[kind] = match[1]
    return found


def main(kinds: Sequence[str]) -> None:
    """Print the lines of the given types, or the page."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if not kinds:
        sys.stdout.write(page([survey(kind) for kind in TYPES]))
    for kind in kinds:
        found = survey(kind)
        print(f"{found.group}`{kind}`", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
