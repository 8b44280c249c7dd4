"""A target divided over two processes writes what one process writes. The processes are started by torchrun, once, and
leave what they found in files: a process group may end badly after all is said, so their exit codes are not asked.

This file is also what those processes run: see ``main``.
"""

import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine, Request
from foretell.engine.request.result import Update
from foretell.engine.request.row import Submission
from foretell.model.load import load_model
from foretell.model.parallel import Launch, ShardedModel, check_divides
from foretell.model.target import CausalModel
from foretell.service.options import ServiceOptions
from foretell.service.service import Service
from tests.engine.harness import started
from tests.model.tiny import ACCEPTED, BUSHY, VOCAB, Rows, tiny_config, tiny_module
from tests.processes import run_group, torchrun

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("llama", "qwen3")
PROCESSES = 2
PROMPTS = ([5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [8])
# What is written: method options, temperature. Verifier "coupled" must write the text of plain decoding; rejection at a
# temperature writes its own, the same in one process as in two.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "chain greedy": ({}, 0.0),
    "chain": ({}, 1.0),
    "tree": ({"shape": "sequoia/size=6"}, 1.0),
    "dynamic tree": ({"shape": "eagle2/size=6"}, 0.7),
    "rejection greedy": ({"verify": "rejection"}, 0.0),
    "rejection": ({"verify": "rejection"}, 1.0),
}
OF_KIND = {"llama": tuple(CASES), "qwen3": ("chain greedy", "chain", "tree")}


def engine_for(folder: Path, kind: str, speculative: dict[str, Any] | None, **options: Any) -> Engine:
    """The target ``kind`` in float32 with its draft."""
    given = None if speculative is None else {"method": "draft_model", "model": str(folder / f"{kind}-draft")}
    given = given and {**given, "num_speculative_tokens": 4, **(speculative or {})}
    return Engine.load(
        str(folder / kind), speculative=given, dtype="float32", **{"implementation": "transformers", **options}
    )


def sampled(temperature: float) -> list[SamplingParams]:
    """Of each of PROMPTS, its own seed."""
    return [SamplingParams(max_new_tokens=14, temperature=temperature, seed=n, ignore_eos=True) for n in range(3)]


def written(engine: Engine, temperature: float) -> list[dict[str, Any]]:
    """Token ids and passes of PROMPTS decoded together, a seed each."""
    params = sampled(temperature)
    done = engine.generate_batch([Request(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)])
    return [{"tokens": one.token_ids, "passes": one.num_steps} for one in done]


def case(engine: Engine, name: str) -> list[dict[str, Any]]:
    """What an engine with a draft writes in one of CASES."""
    options, temperature = CASES[name]
    return written(engine.with_method({**engine.speculative.resolved(), **options}), temperature)


def tree_logits(model: CausalModel) -> torch.Tensor:
    """[3 steps, B, N, V]: trees behind ragged rows, branches of them committed in between."""
    rows, found = Rows(model, None), []  # type: ignore[arg-type]  # the module is only asked for what is expected
    rows.prefill(chunk=4)
    for accepted in ACCEPTED:
        tokens, parent = rows.tree(BUSHY)
        output = rows.target.forward(tokens, rows.plan(parent))
        found.append(output.logits.clone())
        rows.accept(tokens, accepted)
    return torch.stack(found)


def main(folder: Path) -> None:
    """What each of the processes does; the results go to folder/NUMBER.{json,pt}."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"weight_bytes": {}, "kv_bytes": {}, "written": {}}
    logits = {}
    for kind in KINDS:
        engine = engine_for(folder, kind, {}, tensor_parallel=True, implementation="auto")
        found["weight_bytes"][kind] = engine.model.spec.weight_bytes
        found["kv_bytes"][kind] = engine.model.new_cache(1, 16).num_bytes
        with torch.inference_mode():
            logits[kind] = tree_logits(engine.model)
        found["written"][kind] = {}
        for name in OF_KIND[kind]:
            found["written"][kind][name] = case(engine, name)
    assert isinstance(engine.model, ShardedModel)
    found["seeds"] = [engine.model.fresh_seed() for _ in range(3)]
    try:
        engine.generate([5 + rank, 6], max_new_tokens=4)
    except ConfigError as error:
        found["disagreement"] = str(error)
    found["afterwards"] = engine.generate(PROMPTS[0], temperature=0.0, max_new_tokens=4, ignore_eos=True).token_ids
    found["served"] = served(engine, rank)
    torch.save(logits, folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # gloo's own end hung once in hundreds of runs, long after all was said


def served(engine: Engine, rank: int) -> list[list[int]]:
    """What a service over both processes writes: process 0 takes the requests, one of which is cut short and one late."""
    service = Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=64, speculation="on"))
    service.start()
    if rank:
        service.follow()
        return []
    ended: queue.Queue[Update] = queue.Queue()
    try:
        endless = SamplingParams(max_new_tokens=50, ignore_eos=True, seed=9)
        service.submit(Submission("endless", PROMPTS[0], endless), lambda u: ended.put(u) if u.is_last else None)
        service.submit(
            Submission("late", PROMPTS[1], endless, timeout_s=0.0), lambda u: ended.put(u) if u.is_last else None
        )
        for index, (prompt, params) in enumerate(zip(PROMPTS, sampled(1.0), strict=True)):
            service.submit(Submission(str(index), prompt, params), lambda u: ended.put(u) if u.is_last else None)
        service.cancel("endless")
        found = {update.request_id: update.completion for update in (ended.get(timeout=60) for _ in range(5))}
    finally:
        service.close()
    reasons = [completion.finish_reason for completion in (found["endless"], found["late"]) if completion is not None]
    assert reasons == ["cancelled", "timeout"]
    return [completion.token_ids for index in range(3) if (completion := found[str(index)]) is not None]


class Made:
    """The models, and what two processes said of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({f"t{n}": n for n in range(VOCAB)})))
        for kind in KINDS:
            module = tiny_module(kind)
            module.save_pretrained(folder / kind)
            generator = torch.Generator().manual_seed(1)
            for weight in module.parameters():  # a draft that is often right, and often wrong
                weight.data += 0.03 * torch.randn(weight.shape, generator=generator)
            module.save_pretrained(folder / f"{kind}-draft")
            for name in (kind, f"{kind}-draft"):
                tokenizer.save_pretrained(folder / name)
        done = run_group(
            [*torchrun(PROCESSES), "-m", "tests.model.test_tensor_parallel", str(folder)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=240,
        )  # fmt: skip
        files = [folder / f"{rank}.{suffix}" for rank in range(PROCESSES) for suffix in ("json", "pt")]
        assert all(file.is_file() for file in files), done.stderr[-6000:]
        self.found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
        self.logits = [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_over_trees(made: Made, kind: str) -> None:
    """Within rounding those of one process, and in every process the same bits: nothing need be broadcast."""
    expected = tree_logits(load_model(str(made.folder / kind), implementation="transformers"))
    for logits in made.logits:
        torch.testing.assert_close(logits[kind], expected, rtol=0, atol=1e-4)
        assert torch.equal(logits[kind], made.logits[0][kind])
    assert not torch.equal(made.logits[0][kind], expected), "no sum was divided, so nothing was compared"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_process(made: Made, kind: str) -> None:
    """Speculative text of both processes: plain decoding's where guesses are matched, rejection's own where not."""
    one = engine_for(made.folder, kind, {})
    plain = one.with_method(None)
    for name in OF_KIND[kind]:
        first, second = (found["written"][kind][name] for found in made.found)
        assert first == second == case(one, name), name
        tokens = [row["tokens"] for row in first]
        if name != "rejection":
            assert tokens == [row["tokens"] for row in written(plain, CASES[name][1])], name
        passes = sum(row["passes"] for row in first)
        assert passes < sum(map(len, tokens)), f"{name}: no guess was ever accepted"
        assert 5 * passes > sum(map(len, tokens)) + 15, f"{name}: no guess was ever refused"


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_divided(made: Made, kind: str) -> None:
    """Weights and cache that lie in each process: half of all but the norms."""
    whole = load_model(str(made.folder / kind), implementation="transformers")
    for found in made.found:
        assert found["weight_bytes"][kind] < 0.55 * whole.spec.weight_bytes
        assert 2 * found["kv_bytes"][kind] == whole.new_cache(1, 16).num_bytes


def test_fresh_seeds_are_agreed_on(made: Made) -> None:
    """Different each time, the same in both processes."""
    first, second = (found["seeds"] for found in made.found)
    assert first == second
    assert len(set(first)) == 3


def test_a_service_over_both_processes_writes_the_same(made: Made) -> None:
    """Arrivals, a cancellation and a time-out are decided in process 0, and both processes make the same passes."""
    plain = engine_for(made.folder, KINDS[-1], None)
    assert made.found[0]["served"] == [row["tokens"] for row in written(plain, 1.0)]


def test_unlike_calls_are_refused_in_every_process(made: Made) -> None:
    """Neither a hang nor a text of nobody's; and the processes can go on together."""
    for rank, found in enumerate(made.found):
        assert f"in process {rank}: 1 rows" in found["disagreement"]
        assert "same prompts" in found["disagreement"]
        expected = made.found[0]["written"][KINDS[-1]]["chain greedy"][0]["tokens"][:4]
        assert found["afterwards"] == expected


def test_a_process_started_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"started alone .*torchrun --nproc-per-node N"):
        Engine.load("bundled", tensor_parallel=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "lean"}, "needs implementation='transformers', not 'lean'"),
        ({"implementation": "native"}, "needs implementation='transformers', not 'native'"),
        ({"device_map": "auto"}, "give one of them"),
        ({"device": "cuda:1"}, "takes the device of its own number"),
        ({"device": "gpu"}, "device 'gpu' is unknown"),
    ],
)
def test_options_that_contradict_it(launched: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.load("bundled", tensor_parallel=True, **options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts one process."""
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "x"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))


def test_variables_that_are_no_numbers(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="must be numbers"):
        Launch.find()


def test_one_process_is_the_whole_model(launched: None, tmp_path: Path) -> None:
    """A script for several devices runs on one, without any process group."""
    tiny_module("llama").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), tensor_parallel=True)
    assert isinstance(model, ShardedModel)
    assert not torch.distributed.is_initialized()
    whole = load_model(str(tmp_path), implementation="transformers")
    assert model.spec == whole.spec
    assert torch.equal(tree_logits(model), tree_logits(whole))
    assert model.fresh_seed() != model.fresh_seed()


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("llama", 3, r"4 attention heads and 2 key-value heads do not divide among 3 processes; start 1 or 2 "),
        ("llama", 4, r"start 1 or 2 "),
        ("gpt_neox", 3, r"4 attention heads do not divide .* start 1 or 2 or 4 "),
        ("gpt2", 2, "no plan .* 'gpt2'.*device_map='auto'"),
        ("gpt_oss", 2, "no plan"),  # transformers divides its experts only, by another scheme
    ],
)
def test_models_that_do_not_divide(kind: str, count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divides(tiny_config(kind), count, name="mine")


def test_models_that_divide() -> None:
    for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "mixtral", "deepseek_v3"):
        check_divides(tiny_config(kind), 2, name="mine")
    check_divides(tiny_config("gpt2"), 1, name="mine")


def test_layers_spread_by_device_map(tmp_path: Path) -> None:
    """The other way to run a large target: one process, layers on several devices; as far as one device shows it;
    in a batch, and in a service whose rows come and go."""
    module = tiny_module("llama")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({f"t{n}": n for n in range(VOCAB)})))
    for name in ("llama", "llama-draft"):
        module.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    plain = engine_for(tmp_path, "llama", None)
    spread = engine_for(tmp_path, "llama", {}, device_map={"": "cpu"}, implementation="auto")
    for temperature in (0.0, 1.0):
        expected = [row["tokens"] for row in written(plain, temperature)]
        assert [row["tokens"] for row in written(spread, temperature)] == expected
    ended: queue.Queue[Update] = queue.Queue()
    service = Service(spread, ServiceOptions(max_num_seqs=3, max_model_len=64))
    with started(service):
        for index, (prompt, params) in enumerate(zip(PROMPTS, sampled(1.0), strict=True)):
            service.submit(Submission(str(index), prompt, params), lambda u: ended.put(u) if u.is_last else None)
        found = {update.request_id: update.completion for update in (ended.get(timeout=60) for _ in PROMPTS)}
    assert [getattr(found[str(index)], "token_ids", None) for index in range(3)] == expected


if __name__ == "__main__":
    main(Path(sys.argv[1]))
