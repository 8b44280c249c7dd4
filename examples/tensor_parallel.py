"""A target divided over several devices: ``torchrun --nproc-per-node 2 examples/tensor_parallel.py``.

Every process runs this whole script: each holds its part of the target and all of the draft model, all write the same
text, and process 0 prints it. Without arguments the bundled pair is divided, on CPUs or GPUs.
"""

import argparse

import torch

import foretell

PROMPTS = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n",
    "Installation\n============\n\nTo install the package, run\n",
)


def main() -> None:
    """Complete a few prompts together."""
    accelerator = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled", help="hub id or directory")
    parser.add_argument("--draft", default="bundled/draft", help="hub id or directory")
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()

    engine = foretell.Engine.load(
        given.target,
        tensor_parallel=True,
        device=given.device,
        speculative={"method": "draft_model", "model": given.draft, "num_speculative_tokens": 5},
    )
    # A seed for each prompt, the same in every process.
    requests = [
        foretell.Request(
            prompt, foretell.SamplingParams(max_new_tokens=given.max_new_tokens, temperature=0.7, seed=seed)
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    completions = engine.generate_batch(requests)

    together = torch.distributed.is_initialized()  # not where torchrun started a single process
    if not together or torch.distributed.get_rank() == 0:
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            print(f"{prompt}{completion.text}\n")
            print(f"[{completion.num_tokens} tokens in {completion.num_steps} passes]\n")
    if together:
        torch.distributed.barrier()  # no process exits while another still communicates
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
