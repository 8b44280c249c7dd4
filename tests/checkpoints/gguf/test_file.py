"""The header: equal to the gguf library's reading of it, and every damage said in one line."""

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from gguf.constants import GGUFValueType

from foretell.checkpoints.directories import check_files, resolve
from foretell.checkpoints.gguf.file import _Reader, is_gguf, open_gguf
from foretell.core.errors import ModelError
from foretell.model.load import load_config
from tests.checkpoints.gguf.make import write
from tests.model.tiny import tiny_module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that no test changes."""
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    texts = ["", "one", "zwei \u00e9", "x" * 300]
    metadata = {"x.texts": texts, "x.numbers": [1, 2, 3], "x.flag": True, "x.float": 0.1, "x.text": "\u2581"}
    return write(
        path, tiny_module("llama"), kind=lambda name: "Q8_0" if "ffn_gate" in name else "F16", metadata=metadata
    )


def test_equals_the_library(whole: Path) -> None:
    """All metadata, and name, kind, shape and bytes of every tensor."""
    file, reader = open_gguf(whole, name="whole"), GGUFReader(whole)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        if field.types[0] == GGUFValueType.FLOAT32:
            assert file.metadata[key] == pytest.approx(field.contents(), rel=0)
        else:
            assert file.metadata[key] == field.contents()
    assert len(file.tensors) == len(reader.tensors) > 30
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.kind == tensor.tensor_type.name
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert np.array_equal(file.raw(tensor.name), tensor.data.reshape(-1).view(np.uint8))


def test_strings_in_one_loop_are_those_one_by_one(tmp_path: Path) -> None:
    """Or the same error at the same place."""
    random, expected = Random(5), ["", "one", "zwei \u00e9", "x" * 300, "\u2581" * 9]
    good = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in expected)
    for change in range(300):
        data, ends = bytearray(good), []
        for _ in range(min(change, 2)):
            data[random.randrange(len(data))] = random.choice((0, 1, 255, random.randrange(256)))
        for method in (_Reader.texts, lambda reader, count: [reader.text() for _ in range(count)]):
            reader = _Reader(tmp_path / "x", "x", np.frombuffer(bytes(data), np.uint8))
            try:
                ends.append((method(reader, len(expected)), reader.at))
            except ModelError as error:
                ends.append(str(error))
        assert ends[0] == ends[1]
        assert change or ends[0] == (expected, len(good))


def test_the_data_is_mapped_not_copied(whole: Path) -> None:
    file = open_gguf(whole, name="whole")
    assert isinstance(file.data, np.memmap)
    assert np.shares_memory(file.raw("token_embd.weight"), file.data)


def test_recognised_by_content_or_suffix(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes(whole.read_bytes())
    text = tmp_path / "notes.txt"
    text.write_text("GGU")
    assert is_gguf(other)
    assert not is_gguf(text)
    assert not is_gguf(tmp_path)
    assert resolve(str(other)) == other
    with pytest.raises(ModelError, match="is a file; expected a GGUF file, or the directory"):
        resolve(str(text))
    with pytest.raises(ModelError, match=r"file .*absent\.gguf does not exist"):
        resolve(str(tmp_path / "absent.gguf"))


def test_cut_short_anywhere(whole: Path, tmp_path: Path) -> None:
    """At every place of the header and in the data: one line, quickly, and never a tensor beyond the end."""
    data = whole.read_bytes()
    header = min(info.offset for info in open_gguf(whole, name="x").tensors.values())
    cuts = [*range(4, header, 61), header, header + 1, len(data) - 1]
    assert len(cuts) > 40
    for cut in cuts:
        path = tmp_path / f"cut{cut}.gguf"
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"cut short|too few") as caught:
            check_files(path, name="cut")
        assert "\n" not in str(caught.value)
        assert "download it again" in str(caught.value)


def changed(at: int, format_: str, value: object) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into(format_, data, at, value)

    return change


def renamed(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        at = data.index(old)
        data[at : at + len(old)] = new

    return change


def retyped(name: bytes, number: int) -> Callable[[bytearray], None]:
    """The kind of a tensor of two dimensions."""

    def change(data: bytearray) -> None:
        struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 16, number)

    return change


def resized(name: bytes, columns: int) -> Callable[[bytearray], None]:
    """The length of a tensor's rows."""

    def change(data: bytearray) -> None:
        struct.pack_into("<Q", data, data.index(name) + len(name) + 4, columns)

    return change


def counted(key: bytes, value: int) -> Callable[[bytearray], None]:
    """A number of 32 bits of the metadata."""

    def change(data: bytearray) -> None:
        struct.pack_into("<I", data, data.index(key) + len(key) + 4, value)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(0, "<4s", b"GGML"), "is no GGUF file: it begins with b'GGML'"),
        (changed(0, "<4s", b"tjgg"), "a GGML file of before GGUF: convert the model again"),
        (retyped(b"blk.0.ffn_gate.weight", 31), "as Q4_0_4_4, which llama.cpp reads no more"),
        (renamed(b"llama.rope.freq_base", b"llama.context_length"), "states 'llama.context_length' twice"),
        (changed(4, "<I", 1), "GGUF version 1; versions 2 and 3"),
        (changed(4, ">I", 3), "big-endian"),
        (changed(8, "<Q", 1 << 60), "damaged|cut short"),
        (changed(16, "<Q", 1 << 60), "damaged|cut short"),
        (changed(24, "<Q", 1 << 60), "cut short"),
        (renamed(b"\xe2\x96\x81", b"\xff\xff\xff"), "is not UTF-8"),
        (retyped(b"blk.0.ffn_gate.weight", 250), "unknown quantisation 250"),
        (
            retyped(b"blk.0.ffn_gate.weight", 12),
            "rows of tensor 'blk.0.ffn_gate.weight' have 32 values, not a multiple",
        ),
        (retyped(b"blk.0.ffn_gate.weight", 26), "is I32, which cannot be dequantised"),
        (renamed(b"blk.1.attn_q.weight", b"blk.1.attn_k.weight"), "named twice"),
        (resized(b"blk.1.ffn_up.weight", 0), r"tensor 'blk\.1\.ffn_up\.weight' has shape \(48, 0\)"),
        (resized(b"blk.1.ffn_up.weight", (1 << 64) - 1), "is cut short"),
        (counted(b"llama.attention.head_count", 7), "has 32 rows, which are not 7 heads of an even size"),
        (
            renamed(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
            r"lacks 1 of its 38 tensors \(the first: blk.1.attn_q",
        ),
        (renamed(b"\0output.weight", b"\0absurd.weight"), "has 1 tensors that no llama model has here"),
        (renamed(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba"), "'mamba'"),
    ],
)
def test_damage_is_one_line(whole: Path, tmp_path: Path, change: Callable[[bytearray], None], said: str) -> None:
    data = bytearray(whole.read_bytes())
    change(data)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as caught:
        check_files(path, name="damaged")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("damaged: ")


@pytest.mark.parametrize("which", ["big", "split"])
def test_what_the_library_writes_otherwise(tmp_path: Path, which: str) -> None:
    """A big-endian file, and one part of several."""
    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG if which == "big" else GGUFEndian.LITTLE)
    if which == "split":
        writer.add_uint16("split.no", 1)
        writer.add_uint16("split.count", 3)
    writer.add_tensor("x", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match={"big": "big-endian", "split": "part 2 of 3"}[which]):
        check_files(path, name="other")


def test_flipped_bytes_are_said_in_one_line_or_change_no_shape(whole: Path, tmp_path: Path) -> None:
    """Bits, bytes and extreme numbers anywhere in the header: each is a model, or one line."""
    data, file = whole.read_bytes(), open_gguf(whole, name="x")
    header = min(info.offset for info in file.tensors.values())
    random, path = Random(5), tmp_path / "flipped.gguf"
    extremes = [0, 1, 31, 255, 1 << 16, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    said = []
    for _ in range(400):
        damaged, at = bytearray(data), random.randrange(4, header)
        if random.random() < 0.5:
            damaged[at] ^= 1 << random.randrange(8)
        else:
            struct.pack_into("<Q", damaged, min(at, header - 8), random.choice(extremes))
        path.write_bytes(damaged)
        try:
            check_files(path, name="flipped")
            load_config(path, name="flipped")
        except ModelError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all("\n" not in line and len(line) < 600 for line in said)
