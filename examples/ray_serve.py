"""Two replicas of the server on this machine, and sessions that stay with their replica. Needs ``foretell[ray]``."""

import json
import logging
import urllib.request

import foretell.ray
import ray
from ray import serve

PORT = 8321
PROMPTS = ("def fibonacci(n):\n", "class Point:\n", "import os\n")


def complete(prompt: str, session: str) -> str:
    """One request of a session."""
    body = {"model": "bundled", "prompt": prompt, "max_tokens": 24, "seed": 1, "temperature": 0.7}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-session-id": session},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def main() -> None:
    """Deploy, send requests, and shut everything down."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(
            foretell.ray.app(
                "bundled",
                speculative="draft_model",
                service_options={"max_num_seqs": 8, "speculation": "on"},
                server_options={"served_model_name": "bundled"},
                num_replicas=2,
            )
        )
        for session, prompt in enumerate(PROMPTS):
            texts = {complete(prompt, f"session-{session}-{turn}") for turn in range(3)}
            print(prompt + texts.pop(), "\n---")
            assert not texts, "the same seed gave another text on another replica"
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
