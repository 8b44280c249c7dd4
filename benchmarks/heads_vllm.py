"""A head in vLLM and here: the same guesses at the same places of the same greedy texts, and as many of them kept.

    python benchmarks/heads_vllm.py TARGET HEAD --vllm PYTHON_WITH_VLLM --out build/heads [--layouts eagle3,speculators]
                                    [--guesses 4] [--dtype float32] [--prompts 16] [--tokens 64]

HEAD is written in each layout, and vLLM gets it as ``--speculative-config`` names it; each run is a process. Prompts are
short messages of the bundled suite, as token ids. Printed are the guesses that both made behind the same text, and for
each guess of a chain how often it was kept where all before it were (kept/tried), in each engine's own text.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Step = tuple[int, int, list[int]]
"""The prompt's number, how many tokens of its text were there, and what was guessed next."""
MAX_CHARACTERS = 400


NAMES = {
    "eagle3": "eagle3", "speculators": "eagle3", "eagle1": "eagle", "medusa_vllm": "medusa",
    "dflash": "dflash", "dflash_speculators": "dflash", "dspark": "dspark", "dspark_speculators": "dspark",
}  # fmt: skip
"""Layouts, and vLLM's method for each."""


def run_ours(target: str, head: str, config: dict[str, Any], dtype: str, count: int, tokens: int) -> dict[str, Any]:
    """Prompts, texts and steps of this library."""
    from foretell import Engine, StepEvent
    from foretell.bench import load_suite

    engine = Engine.load(target, speculative={**config, "model": head}, dtype=dtype)
    items = [item for item in load_suite() if item.format == "chat" and len(item.prompt) <= MAX_CHARACTERS]
    stride = len(items) // count
    prompts = [
        list(engine.chat_prompt([{"role": "user", "content": item.prompt}]))
        for item in items[: stride * count : stride]
    ]
    steps: list[Step] = []

    def observe(event: StepEvent) -> None:
        for row, one in enumerate(event.rows):
            guesses = event.commit.tree.tokens[row, 1:].tolist()
            steps.append((one.index, len(event.text(row)) - len(prompts[one.index]), guesses))

    engine.observers.append(observe)
    done = engine.generate_batch(prompts, batch_size=1, temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return {"prompts": prompts, "texts": [one.token_ids for one in done], "steps": steps}


def run_vllm(target: str, config: dict[str, Any], prompts: list[list[int]], dtype: str, tokens: int) -> dict[str, Any]:
    """Texts and steps of vLLM, and its own counts of guesses kept by position."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.reader import Vector

    steps: list[Step] = []
    take = Scheduler.update_draft_token_ids

    def observe(self: Any, drafts: Any) -> None:
        for name, guesses in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if request is not None and request.num_output_tokens:
                steps.append((int(name.split("-")[0]), request.num_output_tokens, list(guesses)))
        take(self, drafts)

    Scheduler.update_draft_token_ids = observe
    llm = LLM(
        model=target, dtype=dtype, max_model_len=1024, enforce_eager=True, disable_log_stats=False, max_num_seqs=1,
        async_scheduling=False, enable_prefix_caching=False, speculative_config=config,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    kept = [one.values for one in llm.get_metrics() if isinstance(one, Vector) and "per_pos" in one.name]
    return {"texts": [list(one.outputs[0].token_ids) for one in done], "steps": steps, "kept": kept[0] if kept else []}


def acceptance(texts: Sequence[Sequence[int]], steps: Sequence[Step], most: int) -> list[tuple[int, int]]:
    """(kept, tried) of each guess of a chain; guesses past a text's end count as not tried."""
    counts = [[0, 0] for _ in range(most)]
    for index, at, guesses in steps:
        for count, guess, token in zip(counts, guesses, texts[index][at:], strict=False):
            count[1] += 1
            if guess != token:
                break
            count[0] += 1
    return [(kept, tried) for kept, tried in counts]


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int, int, int]:
    """Steps behind equal texts; of them those with equal guesses; and with as many kept; and equal texts."""
    known = {(index, at): guesses for index, at, guesses in ours["steps"] if guesses}
    both = equal = kept = 0
    for index, at, guesses in theirs["steps"]:
        mine, text = known.get((index, at)), ours["texts"][index]
        if mine is None or text[:at] != theirs["texts"][index][:at]:
            continue
        rates = [acceptance([text], [(0, at, one)], len(one)) for one in (mine, guesses[: len(mine)])]
        both, equal, kept = both + 1, equal + (mine == guesses[: len(mine)]), kept + (rates[0] == rates[1])
    return both, equal, kept, sum(a == b for a, b in zip(ours["texts"], theirs["texts"], strict=True))


def told(rates: Sequence[tuple[int, int]]) -> str:
    return " | ".join(f"{kept}/{tried} ({kept / max(1, tried):.3f})" for kept, tried in rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--vllm", required=True, help="a Python that imports vLLM")
    parser.add_argument("--out", type=Path, required=True, help="a folder; runs that are in it are not repeated")
    parser.add_argument("--layouts", default="eagle3,speculators")
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    for hidden, count in (("--part", 2), ("--served", None)):
        parser.add_argument(hidden, nargs=count, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        config, file = json.loads(args.part[0]), Path(args.part[1])
        if "shape" in config:
            found = run_ours(args.target, args.head, config, args.dtype, args.prompts, args.tokens)
        else:
            prompts = json.loads(file.with_name("ours.json").read_text())["prompts"]
            found = run_vllm(args.served, config, prompts, args.dtype, args.tokens)
        file.write_text(json.dumps(found))
        return
    from foretell.checkpoints.directories import resolve
    from foretell.heads import formats
    from foretell.model.load import load_model

    path = resolve(args.head)
    head, about, asked = formats.load(path), formats.describe_target(path), args.guesses
    if head.lent:
        head.borrow(load_model(args.target, dtype="float32"))
    folder = args.out
    folder.mkdir(parents=True, exist_ok=True)

    def part(config: Any, name: str) -> dict[str, Any]:
        file, target = folder / f"{name}.json", str(resolve(args.target))
        if not file.exists():
            python = sys.executable if "shape" in config else args.vllm
            with (folder / f"{name}.log").open("w") as log:
                own = [python, __file__, *sys.argv[1:], "--served", target, "--part", json.dumps(config), str(file)]
                if subprocess.run(own, stdout=log, stderr=subprocess.STDOUT).returncode:
                    sys.exit(f"{folder / name}.log: {(folder / f'{name}.log').read_text()[-2000:]}")
        return dict(json.loads(file.read_text()))

    ours = part({"method": head.method, "num_speculative_tokens": asked, "shape": "chain"}, "ours")
    print(f"here: {told(acceptance(ours['texts'], ours['steps'], asked))}", flush=True)
    for layout in args.layouts.split(","):
        formats.save(head, folder / layout, layout, target=about)
        config = {"method": NAMES[layout], "model": str(folder / layout), "num_speculative_tokens": asked}
        theirs = part(config, f"vllm-{layout}")
        both, equal, kept, texts = compare(ours, theirs)
        print(f"{layout}: {told(acceptance(theirs['texts'], theirs['steps'], asked))}; its counts {theirs['kept']}")
        print(
            f"    {texts} of {len(ours['texts'])} texts equal; of {both} steps behind equal texts {equal} with equal "
            f"guesses, {kept} with as many kept",
            flush=True,
        )


if __name__ == "__main__":
    main()
