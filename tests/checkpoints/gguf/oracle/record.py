"""Writes ``data/``: files by llama.cpp's converter and quantiser, and its logits.

    python -m tests.checkpoints.gguf.oracle.record --source DIR --native DIR --portable DIR [NAME ...]

Needs what README.md in ``data/`` says. Each file is run in several ways by several builds; how far their logits lie apart
is the tolerance that is stored with them.
"""

import argparse
import json
import lzma
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from tests.checkpoints.gguf.oracle import FILTERS, FOLDER
from tests.checkpoints.gguf.oracle.table import ARCHITECTURES, VOCAB, tiny
from tests.checkpoints.gguf.oracle.tokens import SPECIAL, TEXTS, pieces, tokenizer_of

HERE = Path(__file__).parent
LENGTHS = (24, 72)
COLUMNS = range(0, VOCAB, 10)
NATIVE: dict[str, dict[str, Any]] = {
    "one": {}, "two": {"threads": 2}, "alone": {"ubatch": 1}, "plain": {"repack": False},
    "default": {"flash": True, "cache": "f16", "threads": 2},
}  # fmt: skip
"""Ways to run the build for this machine; "default" is as a user runs it, with a cache of float16: said, not tolerated."""
PLAIN: dict[str, dict[str, Any]] = {"portable": {}, "portable alone": {"ubatch": 1}}


def sequences() -> list[list[int]]:
    """Token ids of two texts, none of them special."""
    draw = random.Random(34)
    return [[draw.randrange(len(SPECIAL), VOCAB - 4) for _ in range(length)] for length in LENGTHS]


def positions(length: int) -> range:
    """The positions of a text whose logits are kept: all of a short one, the last eight of a long one."""
    return range(length) if length <= 24 else range(length - 8, length)


def save(name: str, folder: Path) -> None:
    """Save a checkpoint with its tokenizer as published ones are."""
    entry = ARCHITECTURES[name]
    tiny(name).save_pretrained(folder)
    tokenizer_of(entry.pre).save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **entry.published}
    path.write_text(
        json.dumps({key: value for key, value in config.items() if value is not None or key not in entry.published})
    )
    # The converter asks for a file of sentencepiece otherwise; ERNIE's tokenizer puts no space in front of a text.
    more = {"Phi3Config": {"tokenizer_class": "GPT2Tokenizer"}}
    if wanted := more.get(entry.config, {"add_prefix_space": False} if entry.config.startswith("Ernie") else None):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **wanted}))
    if entry.pre == "gemma":
        (folder / "tokenizer.model").write_bytes(_sentencepiece())


def _sentencepiece() -> bytes:
    """The vocabulary of pieces as a file of sentencepiece."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = SPECIAL.index("<unk>")
    model.normalizer_spec.add_dummy_prefix = False
    kinds = proto.ModelProto.SentencePiece
    for index, piece in enumerate(pieces()):
        kind = kinds.UNKNOWN if piece == "<unk>" else kinds.CONTROL if index < len(SPECIAL) else kinds.NORMAL
        kind = kinds.BYTE if piece.startswith("<0x") else kind
        model.pieces.add(piece=piece, score=-float(index), type=kind)
    data: bytes = model.SerializeToString()
    return data


class Refused(Exception):
    """llama.cpp does not take it: its last words."""


def run(arguments: list[str], **environment: str) -> None:
    """Run a script of this folder. Raises Refused with the last lines of its error stream."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1", **environment},
        check=False,
    )
    if done.returncode:
        raise Refused("\n".join(done.stderr.strip().splitlines()[-4:]))


def convert(arguments: list[str]) -> None:
    """Run convert.py in a fork of this process, which has torch and transformers already. Raises Refused like ``run``."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = 1
            try:
                sys.argv = [str(HERE / "convert.py"), *arguments]
                runpy.run_path(sys.argv[0], run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            said.seek(0)
            raise Refused("\n".join(said.read().strip().splitlines()[-4:]))


def theirs(request: dict[str, Any], build: Path, folder: Path) -> dict[str, Any]:
    """library.py's answer by a build."""
    (folder / "request.json").write_text(json.dumps(request))
    out = folder / "answer.npz"
    where = {"LLAMA_CPP_LIB_PATH": str(build), "LD_LIBRARY_PATH": str(build), "OMP_WAIT_POLICY": "passive"}
    run([str(HERE / "library.py"), str(folder / "request.json"), str(out)], **where)
    return dict(np.load(out)) if "ways" in request else {}


def record(label: str, file: Path, name: str, builds: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    """Run a file in every way and keep it. Returns what the table of README.md says of it."""
    texts = list(TEXTS)
    ask = {"file": str(file), "sequences": sequences(), "texts": texts}
    answer = theirs({**ask, "ways": NATIVE}, builds[0], folder)
    portable = theirs({**ask, "ways": PLAIN}, builds[1], folder)
    kept: dict[str, Any] = {"columns": np.array(COLUMNS, np.int16), "ends": answer["ends"].astype(np.int16)}
    largest = max(float(np.abs(answer[f"one/{i}"]).max()) for i in range(len(LENGTHS)))
    noise = rounding = default = float("-inf")
    quantised = label != name
    if quantised:
        whole = folder / "whole.gguf"
        theirs({"file": str(file), "quantise": str(whole), "kind": "ALL_F32"}, builds[0], folder)
        exact = theirs({**ask, "file": str(whole), "ways": {"one": {}}}, builds[0], folder)
    with torch.no_grad():
        module = tiny(name)
        ours = [module(input_ids=torch.tensor([tokens])).logits[0].numpy() for tokens in sequences()]
    apart = 0.0
    for index, tokens in enumerate(sequences()):
        places = positions(len(tokens))
        one = answer[f"one/{index}"]
        others = [answer[f"{way}/{index}"] for way in NATIVE if way not in ("one", "default")]
        others += [portable[f"{way}/{index}"] for way in PLAIN]
        noise = max(noise, *(float(np.abs(other - one).max()) for other in others))
        default = max(default, float(np.abs(answer[f"default/{index}"] - one).max()))
        apart = max(apart, float(np.abs(ours[index] - one).max()))
        kept[f"tokens/{index}"] = np.array(tokens, np.int16)
        kept[f"positions/{index}"] = np.array(places, np.int16)
        kept[f"logits/{index}"] = np.ascontiguousarray(one[places][:, COLUMNS])
        kept[f"last/{index}"] = one[-1]
        if quantised:
            rounding = max(rounding, float(np.abs(exact[f"one/{index}"] - one).max()))
            kept[f"exact/{index}"] = np.ascontiguousarray(exact[f"one/{index}"][places][:, COLUMNS])
    for index in range(len(texts)):
        kept[f"texts/{index}"] = answer[f"texts/{index}"].astype(np.int16)
    said = {"largest": largest, "noise": noise, "default": default, "transformers": apart}
    said |= {"rounding": rounding} if quantised else {}
    save_file(
        kept, FOLDER / f"{label}.safetensors", {"name": name, **{key: f"{value:.3g}" for key, value in said.items()}}
    )
    packed = lzma.compress(file.read_bytes(), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=FILTERS)
    (FOLDER / f"{label}.gguf.xz").write_bytes(packed)
    size = (FOLDER / f"{label}.safetensors").stat().st_size
    return {**said, "bytes": file.stat().st_size, "packed": len(packed), "kept": size}


def make(name: str, source: Path, builds: tuple[Path, Path], keep: Path | None) -> None:
    """Every file of one architecture; prints a line for each."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save(name, folder / "checkpoint")
        entry = ARCHITECTURES[name]
        files = {}
        for kind in ("F32", *entry.kinds):
            label = name if kind == "F32" else f"{name}-{kind.lower()}"
            file = files[kind] = folder / f"{label}.gguf"
            try:
                if kind in ("F32", "F16", "BF16"):
                    convert([str(source), entry.pre, str(folder / "checkpoint"), str(file), kind.lower(), *entry.flags])
                else:
                    ask = {"file": str(files["F32"]), "quantise": str(file), "kind": kind}
                    theirs(ask, builds[0], folder)
                said = record(label, file, name, builds, folder)
            except Refused as refused:
                print(f"{label}: refused: {refused}", flush=True)
                continue
            print(
                label,
                " ".join(
                    f"{key}={value:.3g}" if key not in ("bytes", "packed", "kept") else f"{key}={value}"
                    for key, value in said.items()
                ),
                flush=True,
            )
            if keep is not None:
                shutil.copy(file, keep)


def main() -> None:
    """Record all architectures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="llama.cpp's directory, with convert_hf_to_gguf.py")
    parser.add_argument("--native", type=Path, required=True, help="directory of libllama.so built for this machine")
    parser.add_argument("--portable", type=Path, required=True, help="directory of libllama.so without AVX")
    parser.add_argument("--keep", type=Path, help="copy the files to this directory too")
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    chosen = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # a fork would have none of its threads
    for name in chosen.names:
        make(name, chosen.source, (chosen.native, chosen.portable), chosen.keep)


if __name__ == "__main__":
    main()
