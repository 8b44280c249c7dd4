"""What is wrong with a request, found when it is handed in: later it would fail on the engine's thread."""

from foretell.core.errors import ConfigError, PromptError
from foretell.engine.engine import Engine
from foretell.engine.request.submission import Submission
from foretell.engine.speculation import Speculation


def check_submission(submission: Submission, choice: Speculation, engine: Engine, max_model_len: int) -> None:
    """Raises ConfigError and PromptError. max_model_len: tokens of prompt and output together."""
    width, model = engine.width, engine.model
    if 0 < width < choice.config.max_nodes:
        raise ConfigError(
            f"{choice.config.method!r} may guess {choice.config.max_nodes - 1} tokens a step, and every pass here has "
            f"width {width}: ask for at most {width - 1}"
        )
    if model.is_shared and submission.params.logits_processor is not None:  # a format is one by now
        raise ConfigError(
            "a logits processor or a grammar cannot be sent to the other processes of a tensor-parallel service: "
            "leave it out, or serve with device_map"
        )
    if model.is_shared and submission.watch is not None:
        raise ConfigError("the steps of a tensor-parallel service cannot be watched: serve with device_map")
    count = len(submission.prompt_ids)
    if count > max_model_len - submission.write:
        left = ", of which at least one must be left for the output" if submission.write else ""
        raise PromptError(
            f"the prompt has {count} tokens, and this service takes texts of {model.spec.context(max_model_len)}{left}: "
            "shorten the prompt"
        )
    size = model.spec.vocab_size
    for token in (*submission.params.logit_bias, *submission.params.banned_token_ids):
        if not 0 <= token < size:
            raise ConfigError(f"token id {token} in logit_bias or banned_token_ids: ids are 0 to {size - 1}")
    if (given := submission.num_prompt_logprobs) is not None and given < 0:
        raise ConfigError(f"num_prompt_logprobs = {given} must be at least 0")
