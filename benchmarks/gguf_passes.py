"""Passes of a GGUF file beside llama.cpp's library on the same file, interleaved: plain, a prompt, and trees of guesses.

    python benchmarks/gguf_passes.py FILE.gguf ... [--llama-python PATH] [--dtype bfloat16] [--threads 2] [--rounds 5]

PATH is a Python with llama-cpp-python (0.3.36). Both time passes alone after a text of 64 tokens. Trees are binary, and in
units of this file's plain pass: give a dense file of about the same bytes for comparison. Last line: JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

LENGTH, PROMPT, WIDTHS, STEPS = 64, 512, (2, 4, 8, 16), 24


def theirs(path: str, threads: int) -> None:
    """For each line of stdin, print the seconds of a plain pass (median) and of a prompt by llama.cpp."""
    import llama_cpp.llama_cpp as library

    quiet = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(quiet, None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    params = library.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 2 * PROMPT, PROMPT, PROMPT
    params.n_threads = params.n_threads_batch = threads
    context = library.llama_init_from_model(model, params)

    def read(count: int, start: int) -> float:
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = 5 + (7 * (start + i)) % 2000, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == count - 1
        begun = perf_counter()
        if library.llama_decode(context, batch):
            raise SystemExit(f"llama.cpp cannot decode {path}")
        return perf_counter() - begun

    for _ in sys.stdin:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        read(LENGTH, 0)
        plain = statistics.median(read(1, LENGTH + i) for i in range(STEPS))
        library.llama_memory_clear(library.llama_get_memory(context), True)
        print(json.dumps({"plain": plain, "prompt": read(PROMPT, 0)}), flush=True)


def ours(path: str, dtype: str) -> tuple[Callable[[], dict[str, float]], Any]:
    """A function that times one round, and what the model says of itself."""
    import torch

    from foretell.core.tree import chain_parent, layout
    from foretell.model.load import load_model
    from foretell.model.target import Target

    model = load_model(path, dtype=getattr(torch, dtype))

    def read(target: Target, parent: torch.Tensor, start: int, **more: Any) -> float:
        tokens = (5 + 7 * (start + torch.arange(parent.shape[1])) % 2000)[None]
        plan = layout(parent, torch.tensor([start]), target.cache.capacity)
        begun = perf_counter()
        target.forward(tokens, plan, **more)
        return perf_counter() - begun

    def fresh() -> Target:
        target = Target(model, 1, LENGTH + 4 * STEPS)
        read(target, chain_parent(LENGTH, torch.device("cpu"))[None], 0, head=False)
        return target

    def one_round() -> dict[str, float]:
        found = {}
        target = fresh()
        found["plain"] = statistics.median(read(target, torch.tensor([[-1]]), LENGTH + i) for i in range(STEPS))
        for width in WIDTHS:
            target, parent = fresh(), torch.tensor([[-1, *((i - 1) // 2 for i in range(1, width))]])
            found[str(width)] = statistics.median(read(target, parent, LENGTH) for _ in range(STEPS // 2))
        target = Target(model, 1, PROMPT)
        found["prompt"] = read(target, chain_parent(PROMPT, torch.device("cpu"))[None], 0, head=False)
        return found

    return one_round, model.spec


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-python")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.theirs:
        theirs(options.files[0], options.threads)
        return
    import torch

    torch.set_num_threads(options.threads)
    report = {}
    for path in options.files:
        one_round, spec = ours(path, options.dtype)
        command = [options.llama_python, __file__, path, "--theirs", "--threads", str(options.threads)]
        peer = None
        if options.llama_python:
            peer = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        rounds: list[dict[str, float]] = []
        others: list[dict[str, float]] = []
        for _ in range(options.rounds):
            rounds.append(one_round())
            if peer is not None and peer.stdin is not None and peer.stdout is not None:
                peer.stdin.write("\n")
                peer.stdin.flush()
                others.append(json.loads(peer.stdout.readline()))
        if peer is not None:
            peer.communicate()
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        row = {"plain_ms": 1e3 * middle["plain"], "prompt_s": middle["prompt"]}
        row |= {f"tree_{width}": middle[str(width)] / middle["plain"] for width in WIDTHS}
        for key in ("plain", "prompt") if others else ():
            row[f"{key}_over_llamacpp"] = statistics.median(
                b[key] / a[key] for a, b in zip(rounds, others, strict=True)
            )
        report[path] = row
        print(f"{path} ({spec.implementation}, {spec.weights}, {spec.weight_bytes / 1e6:.0f} MB a pass)")
        print("  " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
