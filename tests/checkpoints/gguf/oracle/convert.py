"""llama.cpp's converter for a checkpoint with a tiny tokenizer. ``python convert.py SOURCE PRE DIR OUT KIND [OPTIONS]``

SOURCE is llama.cpp's directory. The converter knows how a tokenizer splits text (``tokenizer.ggml.pre``) by a hash of some
tokens; a tiny vocabulary gives others, so PRE says it. All else is the converter's. With
--as-written it reads ``config.json`` as it does where its transformers does not know the model's type.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Convert."""
    source, pre, folder, out, kind, *options = sys.argv[1:]
    sys.path.insert(0, source)
    import convert_hf_to_gguf
    from conversion.base import ModelBase, TextModel

    if "--as-written" in options:
        options.remove("--as-written")
        ModelBase.load_hparams = staticmethod(
            lambda folder, *_, **__: json.loads((Path(folder) / "config.json").read_text())
        )
    TextModel.get_vocab_base_pre = lambda *_: pre
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", kind, *options]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
