"""Text between texts: the prompts, what ends the text, its figures, and that guesses change none of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch

from foretell import Engine
from foretell.model.load import load_tokenizer
from foretell.server.routes.infill import NEAR as QUARTER
from foretell.server.texts.fill import SPELLINGS, Begun, Fill
from foretell.service.options import ServiceOptions
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, FakeService

NEAR = 4 * QUARTER
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
VIM: dict[str, Any] = {
    "input_extra": [], "n_predict": 128, "stop": [], "n_indent": 0, "top_k": 40, "top_p": 0.9, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
}  # fmt: skip
"""The fields of llama.vim's requests, beside the texts."""


IDS = {text: 300 + at for at, text in enumerate(QWEN)}


class Coder:
    """A token a byte, and tokens for gaps."""

    chat_template = None
    all_special_tokens = QWEN

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def get_vocab(self) -> dict[str, int]:
        return {**{"Ġ" if at == 32 else chr(at): at for at in range(128)}, **IDS}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def coder(text: str, **options: Any) -> FakeService:
    """A service that writes this."""
    service = FakeService(lambda _: [*text.encode(), EOS], **options)
    service.engine.tokenizer = Coder()
    model = service.engine.model
    model.spec = replace(model.spec, vocab_size=305)
    return service


def ask(client: httpx.Client, prefix: str = "a\n(", suffix: str = "c", **more: Any) -> Any:
    answer = client.post("/infill", json={"input_prefix": prefix, "input_suffix": suffix, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(service: FakeService) -> str:
    """The prompt of the last request, its tokens for gaps as the letters P, S, M, R and F in brackets."""
    return "".join(f"[{'PSMRF'[one - 300]}]" if one >= 300 else chr(one) for one in service.submitted[-1].prompt_ids)


def test_the_line_stands_behind_the_suffix_and_other_files_before_all(serve: Serve) -> None:
    client = serve(service := coder("x"))
    ask(client, "one\n  t", "\nend\n", prompt="wo =")
    assert told(service) == "[P]one\n[S]\nend\n[M]  two ="
    ask(client, "one\n", "", input_extra=[{"filename": "a.py", "text": "A", "time": [1]}, {"text": "B"}], prompt="t(")
    assert told(service) == "[R]repository\n[F]a.py\nA\n[F]filename\nB\n[F]filename\n[P]one\n[S][M]t("


def test_between_keystrokes_the_prompt_grows_at_its_end_alone(serve: Serve) -> None:
    client, line = serve(service := coder("")), "value = [one, two.three for x in y]"
    made = []
    for end in range(len(line)):
        ask(client, "x = 1\n" * 500, "\n" + "y = 2\n" * 300, prompt=line[:end])
        made.append(service.submitted[-1].prompt_ids)
    for before, after in pairwise(made):
        assert after[: len(before)] == before


def test_a_cut_prefix_begins_at_one_place_for_many_keystrokes(serve: Serve) -> None:
    client = serve(service := coder(""))
    starts = set()
    for lines in range(800, 840):
        prefix = "".join(f"{at:04d}\n" for at in range(lines))
        answer = client.post("/infill", json={"input_prefix": prefix, "input_suffix": ""})
        starts.add(told(service)[:9])
        size = len(service.submitted[-1].prompt_ids)
        assert 3 * NEAR // 4 - NEAR // 4 <= size <= 3 * NEAR // 4 + 3
        assert answer.headers["x-foretell-without-effect"].startswith("input_prefix.first-")
    assert len(starts) <= 2


def test_what_does_not_fit_is_named(serve: Serve) -> None:
    client = serve(service := coder("", max_model_len=NEAR + 300))
    files = [{"filename": f"{at}.py", "text": letter * 100} for at, letter in enumerate("xyz")]
    answer = client.post(
        "/infill", json={"input_prefix": "", "input_suffix": "s" * 600, "input_extra": files, "n_predict": 20}
    )
    assert [f"{at}.py" in told(service) for at in range(3)] == [False, True, True]
    assert told(service).count("s") >= NEAR // 4
    assert answer.headers["x-foretell-without-effect"] == "input_suffix.after-512-tokens, input_extra.first-1"
    assert answer.json()["truncated"] is True
    assert ask(client)["truncated"] is False


def test_the_word_before_the_cursor_is_written_again_and_is_no_part_of_the_answer(serve: Serve) -> None:
    client = serve(service := coder(" value = 1"))
    made = ask(client, "x", "", prompt="\nlet va", n_predict=20)
    assert told(service) == "[P]x\n[S][M]let"
    assert made["content"] == "lue = 1"
    processor = service.submitted[-1].params.logits_processor
    assert isinstance(processor, Begun)
    assert service.submitted[-1].params.max_new_tokens == 20 + len(" va")
    ask(client, "x", "", prompt="\nlet va", n_predict=0)  # nothing is written: the prompt is read, all of it
    assert told(service) == "[P]x\n[S][M]let va"
    assert service.submitted[-1].params.logits_processor is None


def test_what_begins_a_word_is_permitted_and_nothing_else() -> None:
    class Words(Coder):
        def get_vocab(self) -> dict[str, int]:
            return {text: at for at, text in enumerate(["v", "va", "val", "value", "valley", "vx", "x", "Ġ", "a", "("])}

    begun, names = Begun("val", Fill(Words(), 10), num_prompt=1), list(Words().get_vocab())
    permitted = begun(torch.tensor([9]), torch.zeros(10))
    assert {name for name, one in zip(names, permitted, strict=True) if one == 0} == {
        "v",
        "va",
        "val",
        "value",
        "valley",
    }
    after = begun(torch.tensor([9, 1]), torch.zeros(10))  # "va"
    assert torch.equal(after, torch.zeros(10))  # no token is "l...": better any text than none
    for done in (2, 3, 4):
        assert torch.equal(begun(torch.tensor([9, done]), torch.ones(10)), torch.ones(10))


def test_llamas_fields_are_taken(serve: Serve) -> None:
    client = serve(service := coder("x = 1\n  y = 2\nz"))
    made = ask(client, **VIM)
    assert made["content"] == "x = 1\n  y = 2\nz"
    last = service.submitted[-1]
    assert (last.params.temperature, last.always, last.speculative.method) == (0, True, "suffix")  # type: ignore[union-attr]
    assert (made["stop"], made["stop_type"], made["stopping_word"]) == (True, "eos", "")
    timings = made["timings"]
    assert timings["prompt_n"] == made["tokens_evaluated"] == len(service.submitted[-1].prompt_ids)
    assert timings["predicted_n"] == made["tokens_predicted"]
    chosen = ask(client, **VIM, response_fields=["content", "timings/predicted_n", "timings/none", "tokens_cached", ""])
    assert chosen == {
        "content": made["content"], "timings/predicted_n": timings["predicted_n"], "tokens_cached": 0
    }  # fmt: skip
    warm = {**VIM, "input_extra": [{"text": "a", "filename": "b", "time": [1, 2]}], "n_predict": 0, "samplers": []}
    assert ask(client, "", "", **warm, prompt="", response_fields=[""]) == {}


def test_what_the_plugin_of_vs_code_sends_and_reads(serve: Serve) -> None:
    """Without generation_settings its status bar raises, and it asks for no text ahead."""
    client = serve(coder("x = 1"))
    extra = {"text": "a", "time": 1_790_000_000_000, "filename": "b"}
    body = {**VIM, "n_cmpl": 3, "input_prefix": "def f():\n", "input_suffix": "\n", "input_extra": [extra]}
    answer = client.post("/infill", json=body)
    made = answer.json()
    assert (answer.status_code, made["content"], made["generation_settings"]) == (200, "x = 1", {"n_ctx": 4096})
    assert "n_cmpl" in answer.headers["x-foretell-without-effect"]
    read = {"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"}
    assert read <= made["timings"].keys()
    assert client.get("/health").json()["status"] == "ok"


def test_a_line_that_is_indented_by_less_ends_the_text(serve: Serve) -> None:
    text = "a\n\n    b\n  c\n    d"
    client = serve(coder(text))
    assert ask(client, "x(", n_indent=4)["content"] == "a\n\n    b"
    assert ask(client, "x(", n_indent=4)["stop_type"] == "limit"
    assert ask(client, "x(", n_indent=2)["content"] == text


@pytest.mark.parametrize("more", [{}, {"n_indent": 4}, {"n_predict": 3}, {"stop": ["b"]}])
def test_a_stream_is_the_whole_in_pieces(serve: Serve, more: dict[str, Any]) -> None:
    client = serve(coder(" ab\n    b\n  c"))
    body = {"input_prefix": "x = a", "input_suffix": "c", "seed": 1, **more}  # of the text, "a" is known
    whole = client.post("/infill", json=body).json()
    answer = client.post("/infill", json={**body, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "".join(one["content"] for one in events) == whole["content"]
    assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
    same = ("stop_type", "stopping_word", "tokens_evaluated", "model")
    assert {name: events[-1][name] for name in same} == {name: whole[name] for name in same}


def test_the_time_for_writing_ends_a_text_of_more_than_a_line(serve: Serve) -> None:
    client = serve(service := coder("ab\ncd", held=True))
    made = ask(client, "x(", t_max_predict_ms=0, n_predict=3)
    assert made["content"] == "ab\n"
    service.held = False
    service.script = lambda _: [*b"ab\n" * 300, EOS]
    made = ask(client, "x(", t_max_predict_ms=1, n_predict=900)
    assert made["content"].startswith("ab\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input_suffix": None}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "text"),
        ({"n": 2}, "n"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 3, "max_tokens": 4}, "one setting"),
        ({"input_prefx": "a"}, "input_prefix"),
        ({"mirostat": 1}, "mirostat"),
        ({"model": "other"}, "does not exist"),
        ({"allowed_token_ids": [1], "prompt": "ab"}, "exclude each other"),
    ],
)
def test_wrong_requests(serve: Serve, change: dict[str, Any], told: str) -> None:
    answer = serve(coder("")).post("/infill", json={"input_prefix": "", "input_suffix": "", **change})
    assert answer.status_code in (400, 404)
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/infill", "/v1/completions"])
def test_a_model_that_was_not_taught_it(fake: httpx.Client, path: str) -> None:
    body = {"input_prefix": "", "input_suffix": "b"} if path == "/infill" else {"prompt": "a", "suffix": "b"}
    answer = fake.post(path, json=body)
    assert answer.status_code == 400
    assert "was not taught to fill gaps" in answer.json()["error"]["message"]


def test_completions_with_a_suffix(serve: Serve) -> None:
    client = serve(service := coder("xyz"))
    made = client.post("/v1/completions", json={"prompt": ["a\nb", "c"], "suffix": "\nd", "echo": True}).json()
    assert [one["text"] for one in made["choices"]] == ["a\nbxyz", "cxyz"]
    assert told(service) == "[P]c[S]\nd[M]"
    assert set(IDS.values()) <= set(service.submitted[-1].params.stop_token_ids)
    client.post("/v1/completions", json={"prompt": [97, 98], "suffix": "d"})
    assert told(service) == "[P]ab[S]d[M]"
    client.post("/v1/completions", json={"prompt": "a", "suffix": ""})
    assert told(service) == "a"
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "suffix": "b"})
    assert "/infill" in chat.json()["error"]["message"]


def test_ollamas_generate_with_a_suffix(serve: Serve) -> None:
    client = serve(service := coder("xyz"))
    body: dict[str, Any] = {"prompt": "a\nb", "suffix": "\nd", "stream": False}
    for more, prompt in (
        ({}, "[P]a\nb[S]\nd[M]"),
        ({"raw": True}, "[P]a\nb[S]\nd[M]"),
        ({"prompt": ""}, "[P][S]\nd[M]"),
    ):
        made = client.post("/api/generate", json={**body, **more}).json()
        assert (made["response"], made["done_reason"]) == ("xyz", "stop")
        assert told(service) == prompt
        assert set(IDS.values()) <= set(service.submitted[-1].params.stop_token_ids)
    for field, value in (("system", "Be brief."), ("format", "json"), ("think", True)):
        answer = client.post("/api/generate", json={**body, field: value})
        assert (answer.status_code, answer.json()["error"].startswith("raw or suffix: ")) == (400, True)
    assert "insert" in client.post("/api/show", json={}).json()["capabilities"]


def test_markers_in_a_file_are_text(serve: Serve) -> None:
    client = serve(service := coder(""))
    ask(client, "<|fim_suffix|>\n", "<|fim_middle|>")
    assert told(service).count("[S]") == told(service).count("[M]") == 1


@pytest.mark.parametrize("row", SPELLINGS)
def test_known_spellings(row: tuple[str, ...]) -> None:
    class Spelling:
        def get_vocab(self) -> dict[str, int]:
            return {text: at for at, text in enumerate(row) if text}

    found, wanted = Fill(Spelling(), 5), {text: at for at, text in enumerate(row) if text}
    assert (found.prefix, found.suffix, found.middle) == (0, 1, 2 if len(row) > 2 else None)
    assert (found.repository, found.file) == tuple(wanted.get(text) for text in (*row[3:], "-", "-")[:2])
    made = found.prompt([9], [7], [8], [6])
    assert made == ([9, 0, 7, 1, 8, 2, 6] if len(row) > 2 else [9, 1, 8, 0, 7, 6])


def test_tokens_that_a_file_names_come_first() -> None:
    tokenizer: Any = Coder()
    assert Fill(tokenizer, 301).prefix is None  # the tokenizer has more tokens than the model
    tokenizer.fill_ids = {"pre": 1, "suf": 2, "mid": 3}
    found = Fill(tokenizer, 305)
    assert (found.prefix, found.suffix, found.middle, found.repository) == (1, 2, 3, 303)


CODE = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n\n\n"


def test_guesses_change_nothing(bundled: Service, serve: Serve) -> None:
    tokenizer = load_tokenizer("bundled")
    size = len(tokenizer)  # this model was not taught gaps: any tokens stand for those around them
    tokenizer.fill_ids = dict(zip(("pre", "suf", "mid", "rep", "sep"), range(size - 5, size), strict=True))
    engine = Engine(bundled.engine.model, tokenizer)
    service = Service(engine, ServiceOptions(max_num_seqs=2, kv_memory_gib=0.25, speculation="on"))
    service.start()
    try:
        client = serve(service)
        for prompt in ("def total(val", "    ret", "", "for value in va"):
            sent = {"prompt": prompt, "n_predict": 24, "input_extra": [{"text": CODE}]}
            speculative: tuple[Any, ...] = (None, False, {"method": "suffix"}, {"method": "ngram", "always": True})
            made = [ask(client, CODE, "\n    return result\n" + CODE, speculative=one, **sent) for one in speculative]
            assert len({one["content"] for one in made}) == 1
            assert made[1]["timings"]["draft_n"] == 0
        fill, enc = Fill(tokenizer, size), lambda text: tokenizer.encode(text, add_special_tokens=False)
        assert fill.ends
        plain = Engine(bundled.engine.model, tokenizer).generate(
            fill.prompt([], enc(CODE), enc("b"), []), temperature=0, max_new_tokens=24, stop_token_ids=fill.ends
        )
        assert ask(client, CODE, "b", n_predict=24)["content"] == plain.text
    finally:
        service.close()


def test_a_service_without_guesses(bundled: Service, serve: Serve) -> None:
    tokenizer = load_tokenizer("bundled")
    tokenizer.fill_ids = {"pre": 5, "suf": 6, "mid": 7}
    options = ServiceOptions(max_num_seqs=1, kv_memory_gib=0.25, speculation="off")
    service = Service(Engine(bundled.engine.model, tokenizer), options)
    service.start()
    try:
        assert ask(serve(service), CODE, "b", n_predict=4)["timings"]["draft_n"] == 0
    finally:
        service.close()
