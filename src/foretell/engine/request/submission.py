"""A request to a service: what is asked, for whom, and how it is to be served."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.core.params import SamplingParams
from foretell.core.places import keyed
from foretell.draft.config import MethodConfig
from foretell.engine.structured.thoughts import Thinking

Watcher = Callable[[Any, int], None]
"""Called on the engine's thread after every step of a request, with the ``StepEvent`` and the request's row in it. It
delays all requests that share the thread, so it must be short. An exception that it raises ends the decoding."""


@keyed
@dataclass(frozen=True)
class Submission:
    """One request to a ``Service``."""

    request_id: str  # unique among the requests that have not ended
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction_ids: Sequence[int] = ()  # the caller's guess of the output, for the method ``prediction``
    speculative: MethodConfig | None = None  # from ``Service.method``; None: the service's own choice
    always: bool = False  # guess in every step that no other request shares, whether that pays or not
    num_prompt_logprobs: int | None = (
        None  # ``params.logprobs`` of the prompt's tokens, in ``Completion.prompt_pieces``
    )
    write: bool = True  # False: nothing is written, whatever ``params`` allow: the prompt is only scored
    prepares: bool = False  # its prompt is read for the prefix store, while nobody else is there; nothing is written
    trace: bool = False  # updates carry the tree of each step
    watch: Watcher | None = None  # told every step; with the draft's logits in those that no other request shares
    timeout_s: float | None = None  # from submission on; the output until then is returned
    note: str = ""  # why guesses that were asked for cannot be made: told in ``Completion.plain_reason``
    store: bool = True  # False: nothing of it is kept to learn from
    lora: str | None = None  # the target's adapter, a name of ``CausalModel.loras``; None: the engine's own choice
    thinking: Thinking | None = None  # how it thinks, where thoughts stand apart: see ``GOVERNS``; None: not at all
    tenant: str | None = None  # who sent it: a name, or a hash of a key; see ``ServiceOptions.shared_drafts``

    @property
    def owner(self) -> tuple[str | None, str | None]:
        """Whose keys and values its text's are: another sender may not see them, another adapter would compute others."""
        return self.tenant, self.lora
