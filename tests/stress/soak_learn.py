"""Half an hour of mixed traffic to a service that learns: memory flat, counters that add up, texts as without learning.

    python -m tests.stress.soak_learn --minutes 30

Honest prompts, noise, cancelled requests, ``store: false``, two tenants and rarely a third, four at once. Every minute:
resident memory of the server and the trainer process, texts, swaps. Ends with status 1 where memory of the last quarter
lies more than 10 % above that of the second, where the engine's invariants are violated, where captured bytes do not return
to 0, where nothing was learned, or where a sampled text differs from the one that plain decoding writes.
"""

import argparse
import random
import sys
import threading
import time

import psutil

from foretell import Engine, LearnOptions, SamplingParams, Service, ServiceOptions, Submission, Update
from foretell.engine.request.request import token_ids
from foretell.learn import adapters
from tests.engine.integrity import check_service


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--method", default="draft_model")
    args = parser.parse_args()
    engine = Engine.load("bundled", speculative={"method": args.method, "num_speculative_tokens": 3})
    plain = Engine.load("bundled", speculative="none")
    # As much learning as the machine can, and now and then a client too many, whose weights take another's place.
    adapters.MAX_TENANTS = 2
    options = LearnOptions(learn_memory_mib=64, learn_busy_share=1.0)
    service = Service(engine, ServiceOptions(speculation="on", max_num_seqs=4, max_model_len=400), learn=options)
    service.start()
    learner = service._learning
    r, room, wrong = random.Random(0), threading.Semaphore(4), list[str]()
    lock = threading.Lock()
    sizes: list[float] = []
    checked: list[tuple[list[int], SamplingParams, list[int]]] = []
    end, tick, number = time.monotonic() + 60 * args.minutes, 0.0, 0

    def sink(ids: list[int], params: SamplingParams, *, check: bool) -> object:
        def take(update: Update) -> None:
            if not update.is_last:
                return
            if update.error is not None:
                wrong.append(str(update.error))
            elif check and update.completion is not None and update.completion.finish_reason != "cancelled":
                with lock:
                    checked.append((ids, params, update.completion.token_ids))
            room.release()

        return take

    while time.monotonic() < end:
        room.acquire()
        number += 1
        honest = r.random() < 0.7
        text = f"def function_{r.randrange(50)}(value):\n    return"
        ids = token_ids(text, engine.tokenizer) if honest else [r.randrange(5, 8000) for _ in range(r.randrange(2, 60))]
        params = SamplingParams(max_new_tokens=r.randrange(4, 96), temperature=r.choice((0.0, 0.7, 1.0)), seed=number)
        tenant = "key-2" if r.random() < 0.002 else r.choice((None, "key-0", "key-1"))
        submission = Submission(f"s{number}", ids, params, tenant=tenant, store=r.random() < 0.9)
        service.submit(submission, sink(ids, params, check=number % 40 == 0))  # type: ignore[arg-type]
        if r.random() < 0.05:
            service.cancel(submission.request_id)
        if time.monotonic() > tick:
            tick = time.monotonic() + 60.0
            own = psutil.Process()
            sizes.append(sum(one.memory_info().rss for one in (own, *own.children())) / 2**20)
            check_service(service)
            figures = learner.figures()
            print(f"{number} requests, {sizes[-1]:.0f} MiB, {figures}", flush=True)
    for _ in range(4):
        room.acquire()
    check_service(service)
    service._call(learner.capture.sweep)
    if learner.capture.held_bytes:
        wrong.append(f"{learner.capture.held_bytes} captured bytes of requests that have ended")
    for ids, params, found in checked:
        if plain.generate(ids, params).token_ids != found:
            wrong.append(f"seed {params.seed}: another text than plain decoding writes")
    quarter = max(1, len(sizes) // 4)
    second, last = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
    if max(last) > 1.1 * max(second):
        wrong.append(f"memory grew from {max(second):.0f} to {max(last):.0f} MiB")
    figures = learner.figures()
    if args.minutes >= 5 and not figures.num_updates:
        wrong.append("nothing was learned, so this shows nothing")
    service.close()
    print(f"{number} requests, {len(checked)} texts compared, {figures}")
    for line in wrong:
        print(f"WRONG: {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
