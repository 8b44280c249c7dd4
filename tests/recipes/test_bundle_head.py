"""The bundled heads' folders: weights as they were trained, a card whose numbers are the record's, no local path."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from recipes.bundle_head import cut, loss_table, put

from foretell.checkpoints.catalogue import CATALOGUE
from foretell.checkpoints.directories import resolve
from foretell.heads import formats
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.train.responses import pack


@pytest.mark.parametrize("method", ["medusa", "acceptance", "judge"])
def test_a_head_is_put_where_it_is_found(method: str, tmp_path: Path) -> None:
    source = Path(resolve(f"bundled/{method}"))
    run, bundled = tmp_path / "run", tmp_path / "bundled"
    run.mkdir()
    bundled.mkdir()
    weights = [file for file in source.iterdir() if file.suffix == ".safetensors"]
    assert weights
    for file in [*weights, source / "config.json"]:
        (run / file.name).write_bytes(file.read_bytes())
    if method != "judge":
        record = json.loads((source / "record.json").read_text())
        (run / "record.json").write_text(json.dumps({**record, "argv": ["foretell", "--data", "/somewhere/else"]}))
        (run / "log.jsonl").write_text("".join(json.dumps({"step": n, "loss": 1.0 / n}) + "\n" for n in range(1, 21)))
    (run / "checkpoints").mkdir()
    folder = put(run, bundled)
    for file in weights:
        assert (folder / file.name).read_bytes() == file.read_bytes()
    card = (folder / "README.md").read_text()
    assert "/somewhere" not in card
    if method != "judge":
        kept = json.loads((folder / "record.json").read_text())
        assert "argv" not in kept
        assert f"{kept['learned']['num_texts']:,} answers" in card
        assert "| up to step |" in card
    if method == "medusa":
        assert f"| {kept['result']['conditional'][0]:.3f} |" in card
    assert {file.name for file in folder.iterdir()} - {file.name for file in run.iterdir()} == {"README.md"}


def test_an_output_head_that_was_not_trained_may_be_left_out(tmp_path: Path) -> None:
    source, run = Path(resolve("bundled/eagle3")), tmp_path / "run"
    shutil.copytree(source, run)
    folder = put(run, tmp_path, target="some-target", blocks="Q8_0", lend_output=True)
    head, whole = formats.load(folder / "head.gguf"), formats.load(source)
    assert head.lent == ("lm_head.weight",)
    assert torch.equal(head.get_buffer("d2t"), whole.get_buffer("d2t"))
    assert {matrix.kind for matrix in head.packed.values()} == {"Q8_0"}
    assert json.loads((folder / "record.json").read_text())["output_of_target"] is True
    card = (folder / "README.md").read_text()
    assert "its rows are the target's" in card
    assert f"{head.num_parameters:,} parameters" in card
    record = json.loads((run / "record.json").read_text())
    record["options"]["train_lm_head"] = True
    (run / "record.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="was trained"):
        put(run, tmp_path, target="some-target", blocks="Q8_0", lend_output=True)


def test_losses_are_means_of_parts(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"loss": float(n)}) + "\n" for n in range(5)))
    assert loss_table(log, rows=2).splitlines() == [
        "| up to step | 3 | 5 |",
        "| --- | ---: | ---: |",
        "| mean loss | 1.000 | 3.500 |",
    ]


def test_a_head_that_goes_on_from_the_one_it_replaces_keeps_that_ones_record(tmp_path: Path) -> None:
    """Put once or twice: its record holds each training once, and its card tells them in order."""
    source = Path(resolve("bundled/medusa"))
    earlier = json.loads((source / "record.json").read_text())
    assert earlier.get("init") is None
    bundled = tmp_path / "bundled"
    bundled.mkdir()
    folder = bundled / "medusa"
    shutil.copytree(source, folder)
    run = tmp_path / "run"
    shutil.copytree(source, run)
    later = {"init": str(folder), "data": "f" * 64, "time": "2026-12-01T00:00:00+00:00", "steps": 4321}
    (run / "record.json").write_text(json.dumps({**earlier, **later}))
    for _ in range(2):
        assert put(run, bundled) == folder
        kept = json.loads((folder / "record.json").read_text())
        assert kept["steps"] == 4321
        assert kept["init"] == earlier
        card = (folder / "README.md").read_text()
        assert card.count("Then, from there:") == 1
        assert card.index(f"{earlier['steps']:,} steps") < card.index("Then, from there:") < card.index("4,321 steps")


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_a_head_of_another_target_is_what_its_record_says(name: str) -> None:
    file = Path(resolve(f"bundled/{name}/eagle3"))
    record = json.loads((file.parent / "record.json").read_text())
    head = formats.load(file)
    assert isinstance(head, Eagle3Head)
    assert file.stat().st_size < 17e6
    assert (head.lent == ("lm_head.weight",)) is record["output_of_target"] is (not record["options"]["train_lm_head"])
    card = (file.parent / "README.md").read_text()
    assert f"{head.num_parameters:,} parameters, {file.stat().st_size / 1e6:.1f} MB" in card
    assert "its rows are the target's" in card
    kept = record.get("bundled_draft_vocab_size", record["options"]["draft_vocab_size"])  # where it was cut
    assert head.config.draft_vocab_size == kept == int(head.t2d.sum())
    assert {matrix.kind for matrix in head.packed.values()} == {record["blocks"]}
    assert head.trained_length == record["config"]["max_length"]
    assert CATALOGUE[name].drafts == {"eagle3": f"bundled/{name}/eagle3"}


def test_a_head_that_is_cut_guesses_as_before_among_the_tokens_that_are_left() -> None:
    generator = torch.Generator().manual_seed(2)
    config = Eagle3HeadConfig(16, 40, 32, 2, 1, 8, draft_vocab_size=30, layer_ids=(0, 1))
    head = Eagle3Head.fresh(config, generator, vocabulary=draft_vocabulary(torch.arange(40), 30))
    answers = pack([([39, 12, 12, 38, 3, 3, 3, 3], 1), ([1, 12, 20, 38], 2)])  # 3 is none of the head's tokens
    small = cut(head, answers, 4)
    ids = small.target_ids
    assert {12, 20, 38} < set(ids.tolist())
    assert bool(small.t2d[ids].all())
    read = torch.randn(1, 3, 16, generator=generator)
    columns = [head.target_ids.tolist().index(token) for token in ids.tolist()]
    torch.testing.assert_close(small.lm_head(read), head.lm_head(read)[..., columns])
