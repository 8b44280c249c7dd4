"""OpenVINO GenAI's continuous batching as a server, for ``benchmarks.servers``: it has none among its Python packages.

    PYTHON_WITH_OPENVINO_GENAI benchmarks/openvino_server.py MODEL [--port 8090] [--kv-gib 2]

MODEL: a GGUF file or an exported folder. One thread computes; a request's tokens go out as they come, each as an update.
Only what ``benchmarks.servers`` asks for is taken.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai


class Batch:
    """The pipeline, and the thread that steps it while requests are there."""

    def __init__(self, model: str, kv_gib: int) -> None:
        config = openvino_genai.SchedulerConfig()
        config.cache_size, config.max_num_seqs, config.dynamic_split_fuse = kv_gib, 64, True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU")
        self.tokenizer = self.pipeline.get_tokenizer()
        self.changed = threading.Condition()
        self.coming: list[tuple[str, Any, list[Any]]] = []
        self.number = 0
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, prompt: str, config: Any) -> list[Any]:
        """A box that gets the request's handle."""
        box: list[Any] = []
        with self.changed:
            self.coming.append((prompt, config, box))
            self.changed.notify_all()
            while not box:
                self.changed.wait()
        return box

    def wait(self) -> None:
        """Until a step has ended."""
        with self.changed:
            self.changed.wait(1.0)

    def work(self) -> None:
        while True:
            with self.changed:
                while not self.coming and not self.pipeline.has_non_finished_requests():
                    self.changed.wait()
                for prompt, config, box in self.coming:
                    box.append(self.pipeline.add_request(self.number, prompt, config))
                    self.number += 1
                self.coming.clear()
                self.changed.notify_all()
            self.pipeline.step()
            with self.changed:
                self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    batch: Batch
    model: str

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": self.model}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = body["max_tokens"], True
        config.do_sample = body["temperature"] > 0
        if config.do_sample:
            config.temperature, config.rng_seed = body["temperature"], body["seed"]
        prompt = self.batch.tokenizer.apply_chat_template(body["messages"], True)
        (handle,) = self.batch.submit(prompt, config)
        self.send_response(200)
        self.end_headers()
        count = 0
        while count < body["max_tokens"]:
            if not handle.can_read():
                self.batch.wait()
                continue
            for output in handle.read().values():
                count += len(output.generated_ids)
                self.tell(
                    {"choices": [{"delta": {"content": self.batch.tokenizer.decode(output.generated_ids) or " "}}]}
                )
        self.tell({"choices": [], "usage": {"completion_tokens": count}})

    def tell(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--kv-gib", type=int, default=2)
    args = parser.parse_args()
    Handler.batch, Handler.model = Batch(args.model, args.kv_gib), args.model
    print("ready", flush=True)
    ThreadingHTTPServer.request_queue_size = 128  # five, the library's own, resets the sixth client that comes at once
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
