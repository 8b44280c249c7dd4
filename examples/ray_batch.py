"""A file of prompts, completed by two actors; a second run continues where the first stopped. Needs
``foretell[ray]``."""

import json
import logging
import tempfile
from pathlib import Path

import ray.data

import foretell
import foretell.ray
import ray


def main() -> None:
    """Write prompts, complete them, and complete a few more."""
    params = foretell.SamplingParams(max_new_tokens=16, temperature=0.7, seed=1)
    prompts = [{"id": f"f{i}", "prompt": f"def f{i}(x):\n"} for i in range(40)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder, "prompts.jsonl"), Path(folder, "completions.jsonl")
            for count in (30, 40):
                source.write_text("".join(json.dumps(row) + "\n" for row in prompts[:count]))
                print(
                    foretell.ray.generate_files(
                        source, out, speculative="draft_model", params=params, batch_size=8, concurrency=2
                    )
                )
            rows = [json.loads(line) for line in out.read_text().splitlines()]
    finally:
        ray.shutdown()
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in prompts)
    print(prompts[0]["prompt"] + next(row["text"] for row in rows if row["id"] == "f0"))


if __name__ == "__main__":
    main()
