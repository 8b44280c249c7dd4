"""lm-eval's model ``foretell``: lm-evaluation-harness over an engine that guesses.

::

    python -m foretell.adapters.lm_eval run --model foretell --tasks ... \\
        --model_args pretrained=DIR,method=suffix,verify=coupled --batch_size 8

The command is lm-eval's own, with the model known to it: lm-eval finds no models of other packages by itself. A program
that calls ``lm_eval.simple_evaluate`` imports this module first. Needs the extra "lm-eval".
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from foretell.adapters.evaluation import Evaluation
from foretell.core.errors import ConfigError
from foretell.engine.engine import Engine
from foretell.engine.request.conversation import render, template_of

logger = logging.getLogger(__name__)
LOADED = ("draft", "dtype", "device", "implementation", "weights", "kv", "trust_remote_code")
"""Options that ``Engine.load`` takes as they are; what is in no list is a key of the speculative configuration."""


@register_model("foretell")
class ForetellLM(TemplateLM):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(
        self,
        pretrained: str = "bundled",
        *,
        method: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """pretrained: a name, directory or file that ``Engine.load`` reads. method and further options: as in
        ``--speculative-config``; without any there are no guesses. max_batch_size is for "auto", which is 8 here.

        Raises ConfigError."""
        super().__init__()
        loaded = {name: options.pop(name) for name in LOADED if options.get(name) is not None}
        if str(loaded.get("device")).startswith("cuda") and not torch.cuda.is_available():
            logger.warning("no CUDA device here, which lm-eval takes for granted: running on the CPU")
            loaded["device"] = "cpu"
        options = {name: value for name, value in options.items() if value is not None}
        if options and method is None and "draft" not in loaded:
            raise ConfigError(f"{sorted(options)[0]!r} is a setting of a method: give method=..., or leave it out")
        speculative = {"method": method, **options} if method is not None else options or None
        engine = Engine.load(pretrained, speculative=speculative, **loaded)
        size = (max_batch_size or 8) if str(batch_size).startswith("auto") else int(batch_size)
        self.evaluation = Evaluation(
            engine,
            batch_size=size,
            max_length=max_length,
            max_gen_toks=max_gen_toks,
            add_bos_token=add_bos_token,
            seed=seed,
        )
        self.tokenizer = engine.tokenizer
        self.batch_size = size

    # -- what TemplateLM asks for ------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The model's end token."""
        return self.evaluation.end_token_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows."""
        return self.evaluation.prefix_token_id

    @property
    def max_length(self) -> int:
        """Most tokens of context and output."""
        return self.evaluation.max_length

    @property
    def tokenizer_name(self) -> str:
        """For the names of cached requests."""
        return self.evaluation.tokenizer_name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        return self.evaluation.encode(string, special=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's template writes it. The harness joins such texts: a marker in a message counts."""
        if template_of(self.tokenizer) is None:
            raise ConfigError("this model's tokenizer has no chat template: leave --apply_chat_template out")
        name, goes_on = self.evaluation.engine.model.spec.name, not add_generation_prompt
        return render(chat_history, self.tokenizer, name, generate=add_generation_prompt, goes_on=goes_on).text

    def get_model_info(self) -> dict[str, Any]:
        """What ran, for the results' record."""
        return {"foretell": self.evaluation.engine.resolved()}

    # -- requests ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self.evaluation.token_scores([(context, ids) for _, context, ids in requests])
        found = [(score.logprob, score.is_greedy) for score in scores]
        for (given, _, _), one in zip(requests, found, strict=True):
            if given is not None:
                self.cache_hook.add_partial("loglikelihood", given, one)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of each whole text."""
        found = self.evaluation.rolling([request.args[0] for request in requests])
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, one)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each request up to its stop texts."""
        given: list[tuple[str, Mapping[str, Any]]] = [request.args for request in requests]
        found = [""] * len(given)
        with tqdm(total=len(given), desc="Texts", disable=disable_tqdm) as bar:
            for index, text in self.evaluation.texts(given):
                found[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update(1)
        return found


def main() -> None:
    """lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
