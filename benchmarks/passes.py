"""Target passes of the same requests through ``Engine.generate_batch`` and ``Service``.

Both refill a row as soon as its request ends, so they should need the same number. Counts, not times: any machine will do.

    python benchmarks/passes.py --method draft_model
"""

import argparse
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission, Update
from foretell.engine.event import StepEvent
from foretell.model.target import CausalModel


def requests(count: int, seed: int) -> list[Request]:
    """Prompts of 4 to 100 tokens, outputs of 8 to 128: no two of the same length."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0.7, ignore_eos=True)
    made = []
    for index in range(count):
        prompt, output = (int(torch.randint(*limits, (1,), generator=generator)) for limits in ((4, 100), (8, 128)))
        ids = torch.randint(0, 1000, (prompt,), generator=generator).tolist()
        made.append(Request(ids, replace(params, seed=index, max_new_tokens=output)))
    return made


class Passes:
    """Counts decode steps (an observer) and all passes of the target (its forward)."""

    def __init__(self, model: CausalModel) -> None:
        self.steps = self.all = 0
        forward = model.forward

        def counted(*args: object, **options: object) -> object:
            self.all += 1
            return forward(*args, **options)  # type: ignore[arg-type]

        model.forward = counted  # type: ignore[method-assign, assignment]

    def __call__(self, event: StepEvent) -> None:
        self.steps += 1


def served(engine: Engine, asked: Sequence[Request], rows: int) -> dict[int, list[int]]:
    """The tokens of each request through a service."""
    tokens: dict[int, list[int]] = {}
    done = threading.Event()

    def sink(update: Update) -> None:
        if update.completion is not None:
            tokens[int(update.request_id)] = update.completion.token_ids
        if len(tokens) == len(asked):
            done.set()

    service = Service(engine, ServiceOptions(max_num_seqs=rows, speculation="on", prefix_reuse=False))
    service.start()
    service.measure()
    for index, request in enumerate(asked):
        assert not isinstance(request.prompt, str)
        service.submit(Submission(str(index), request.prompt, request.params), sink)
    done.wait()
    service.close()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--method", default="none")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked = requests(args.requests, args.seed)
    found = {}
    for door in ("generate_batch", "Service"):
        engine = Engine.load(args.target, speculative=args.method, dtype="float32")
        passes = Passes(engine.model)
        engine.observers.append(passes)
        if door == "Service":
            tokens = served(engine, asked, args.rows)
        else:
            tokens = {
                index: completion.token_ids for index, completion in engine.completions(asked, batch_size=args.rows)
            }
        found[door] = (passes, tokens)
        print(
            f"{door:>15}: {passes.steps} decode steps, {passes.all} target passes, {sum(map(len, tokens.values()))} tokens"
        )
    (batch, one), (service, two) = found["generate_batch"], found["Service"]
    print(f"passes, generate_batch / Service: {batch.all / service.all:.3f}; the same tokens: {one == two}")


if __name__ == "__main__":
    main()
