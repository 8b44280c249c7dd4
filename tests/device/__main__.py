"""``python -m tests.device [METHOD[:N][:VERIFY][:SHAPE] ...] [--places|--triton|--graphs]``: what a step costs a device.

Counted on the pretend device: launches of the draft, of the target (with its layout and moves), of the verifier (with the
probabilities and the verdict), reads by the host and blocking uploads, means over the steps in which no request comes or
ends. --places says where each read and upload is asked for; --triton runs Triton's kernels, by its interpreter: slowly.
--graphs launches captured graphs.
"""

import os
import sys
from collections import Counter
from functools import partial
from statistics import fmean, median

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from foretell import SamplingParams
from foretell.core.graphs import RECORDERS
from foretell.core.spec import method_words
from foretell.kernels.gpu.ops import DISPATCH_KEYS
from tests.device.counting import Step, engine_on, requests, run
from tests.device.pretend import METER, NAME, PretendRecorder

USUAL = (
    "none", "draft_model:5", "eagle3:5", "eagle3:eagle2/size=15", "draft_model:dyspec/size=15", "hybrid", "kangaroo",
    "medusa", "ngram", "draft_model:5:rejection", "draft_model:traversal:static", "draft_model:transport:static",
)  # fmt: skip


def middle(steps: list[Step], of: str, key: str | None = None, *, graphs: bool = False) -> float:
    """A step's mean count, all of it or that of one phase; of graphs the median, since some steps are captured."""
    counters = [getattr(step, of) for step in steps]
    counts = [counter.total() if key is None else counter[key] for counter in counters]
    return median(counts) if graphs else fmean(counts)


def main(words: list[str]) -> None:
    """Print the table."""
    METER.places = "--places" in words
    if "--triton" in words:
        DISPATCH_KEYS[NAME] = "CPU"
    if graphs := "--graphs" in words:
        RECORDERS[NAME] = PretendRecorder
    params = SamplingParams(max_new_tokens=100 if graphs else 12 if "--triton" in words else 40, ignore_eos=True)
    print("| one row, T = 1 | launches | draft / target / verify | reads | uploads |\n| --- | --- | --- | --- | --- |")
    for word in [word for word in words if not word.startswith("--")] or USUAL:
        steps = run(engine_on(NAME, method_words(word)[0]), requests([params])).steady
        count = partial(middle, steps, graphs=graphs)
        parts = " / ".join(f"{count('launches', phase):.0f}" for phase in ("draft", "target", "verify"))
        figures = f"{count('launches'):.0f}", parts, *(f"{count(of):.2g}" for of in ("reads", "uploads"))
        print(f"| {word} | {' | '.join(figures)} |", flush=True)
        if METER.places:
            for of in ("reads", "uploads"):
                total: Counter[str] = sum((getattr(step, of) for step in steps), Counter())
                for place, count in total.most_common():
                    print(f"    {of} {count / len(steps):.2f} {place}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
