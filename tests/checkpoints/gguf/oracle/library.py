"""What llama.cpp's library computes from a GGUF file: logits, tokens of texts, ends. ``python library.py REQUEST OUT``

Needs llama-cpp-python alone (no module of this repository), and runs as a process of its own: one process has one build of
the library, that of ``LLAMA_CPP_LIB_PATH``. REQUEST is a JSON object: ``file``, ``sequences`` (lists of token ids),
``texts``, and ``ways``: for each name how to run (``threads``, ``ubatch``, ``repack``, ``flash``, ``cache``: "f32" or
"f16"). With ``quantise`` (a path) and ``kind`` ("Q4_K_M"; "ALL_F32" takes blocks apart) it only writes that file. OUT is an
npz: for each way and sequence ``NAME/I`` float32 [n, V], ``ends`` the ids that end a text, ``texts/I`` the tokens of a
text, and ``system`` what the build says of itself.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as library
import numpy as np
from numpy.typing import NDArray

WAY: dict[str, Any] = {"threads": 1, "ubatch": 512, "repack": True, "flash": False, "cache": "f32"}
_CACHE = {"f32": 0, "f16": 1}  # ggml_type


_said: list[str] = []


@library.llama_log_callback
def _log(level: int, text: bytes, _data: object) -> None:
    if level == 4:  # errors
        _said.append(text.decode(errors="replace").strip())


def load(path: str, *, repack: bool) -> Any:
    """The model of a file. Raises ValueError where the library refuses it, in its own words."""
    params = library.llama_model_default_params()
    params.use_extra_bufts = repack
    params.n_gpu_layers = 0
    model = library.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise ValueError("; ".join(_said[:2]))
    return model


def logits(model: Any, sequences: list[list[int]], way: dict[str, Any]) -> list[NDArray[np.float32]]:
    """[n, V] of each sequence, each in a context of its own."""
    width = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    found = []
    for tokens in sequences:
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = 256
        params.n_ubatch = way["ubatch"]
        params.n_threads = params.n_threads_batch = way["threads"]
        params.flash_attn_type = int(way["flash"])
        params.type_k = params.type_v = _CACHE[way["cache"]]
        context = library.llama_init_from_model(model, params)
        if not context:
            raise ValueError("llama.cpp makes no context")
        batch = library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, index, 1
            batch.seq_id[index][0], batch.logits[index] = 0, 1
        code = library.llama_decode(context, batch)
        if code:
            raise ValueError(f"llama_decode says {code}")
        rows = [np.ctypeslib.as_array(library.llama_get_logits_ith(context, i), (width,)) for i in range(len(tokens))]
        found.append(np.stack(rows).astype(np.float32))
        library.llama_batch_free(batch)
        library.llama_free(context)
    return found


def tokens_of(model: Any, text: str) -> list[int]:
    """The tokens of a text, special ones as themselves, the first one (BOS) where the file asks for it."""
    vocab, data = library.llama_model_get_vocab(model), text.encode()
    room = (ctypes.c_int32 * (len(data) + 8))()
    count = library.llama_tokenize(vocab, data, len(data), room, len(room), True, True)
    return list(room[:count])


def quantise(path: str, out: str, kind: str) -> None:
    """Write a file of another kind."""
    params = library.llama_model_quantize_default_params()
    params.nthread, params.allow_requantize = 1, True
    params.ftype = 0 if kind == "ALL_F32" else getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = library.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params))
    if code:
        raise ValueError(f"llama_model_quantize says {code}")


def main() -> None:
    """Answer one request."""
    request = json.loads(Path(sys.argv[1]).read_text())
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    if "quantise" in request:
        quantise(request["file"], request["quantise"], request["kind"])
        return
    answer: dict[str, Any] = {"system": np.array(library.llama_print_system_info().decode())}
    for name, changes in request["ways"].items():
        way = {**WAY, **changes}
        model = load(request["file"], repack=way["repack"])
        for index, array in enumerate(logits(model, request["sequences"], way)):
            answer[f"{name}/{index}"] = array
        vocab = library.llama_model_get_vocab(model)
        width = library.llama_vocab_n_tokens(vocab)
        answer["ends"] = np.array([i for i in range(width) if library.llama_vocab_is_eog(vocab, i)], np.int32)
        for index, text in enumerate(request.get("texts", ())):
            answer[f"texts/{index}"] = np.array(tokens_of(model, text), np.int32)
        library.llama_model_free(model)
    np.savez(sys.argv[2], **answer)


if __name__ == "__main__":
    try:
        main()
    except ValueError as refused:
        sys.exit(str(refused))
