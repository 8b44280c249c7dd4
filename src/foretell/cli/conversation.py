"""A conversation of ``foretell chat``: its turns, and the commands that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.cli import settings
from foretell.cli.figures import held
from foretell.cli.options import OF_ONE_ANSWER
from foretell.cli.output import as_json, write
from foretell.cli.prose import tell
from foretell.core.errors import ConfigError, nearest
from foretell.core.params import SamplingParams
from foretell.core.settings import field_kinds, value_of_text

if TYPE_CHECKING:
    from foretell import Engine
    from foretell.engine.structured.parts import PartStream

SAMPLING = [one.name for one in fields(SamplingParams) if "help" in one.metadata and one.name not in OF_ONE_ANSWER]
SETTINGS = ["thoughts", *SAMPLING]
END_OF_PROMPT = 32
"""Tokens among which a template may open a thought, or close it."""


@dataclass
class Talk:
    """What was said so far, and how the next answer is made."""

    engine: "Engine"
    params: SamplingParams  # answer number i has its seed + i
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)  # of the user and the assistant
    number: int = 0  # of answers
    thoughts: bool = False  # whether they are shown
    last: str = ""  # all figures of the last answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that the model reads."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def parts(self, prompt: Sequence[int]) -> "PartStream | None":
        """What cuts the output to a prompt into thoughts and answer; None where all of it is the answer."""
        from foretell.engine.request.conversation import template_of
        from foretell.engine.structured.parts import PartStream
        from foretell.engine.structured.thoughts import Thinking, Thoughts, family_of

        tokenizer = self.engine.tokenizer
        family = family_of(template_of(tokenizer) or "")
        if family is None or tokenizer is None:
            return None
        try:
            thoughts = Thoughts(family, tokenizer, self.engine.model.spec.vocab_size)
        except ConfigError:  # it cannot write their marks
            return None
        start = thoughts.start_of(tokenizer.decode(prompt[-END_OF_PROMPT:]))
        return PartStream(Thinking(thoughts, start))

    def command(self, line: str) -> str | None:
        """Run a command; the message to be answered, where it asks for one. Raises ConfigError, and EOFError to leave."""
        name, rest = [*line.split(maxsplit=1), ""][:2]
        if name not in COMMANDS:
            raise ConfigError(
                f"unknown command {name!r}; known: {', '.join(COMMANDS)}; // sends a message that begins with /"
            )
        return COMMANDS[name][2](self, rest.strip())

    def _retry(self, _: str) -> str:
        if not self.turns:
            raise ConfigError("there is no answer yet that could be made again")
        asked, self.turns[-2:] = self.turns[-2]["content"], []
        return asked

    def _system(self, text: str) -> None:
        self.system = text or None

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        name, text = name.removeprefix("--").replace("-", "_"), text.strip()
        if name and name not in SETTINGS:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, SETTINGS)}")
        if name == "thoughts" and text:
            self.thoughts = value_of_text(text, bool, name)
        elif text:
            is_text = name in ("stop", "logit_bias")  # which ``sampling`` reads as they are
            value = text if is_text else value_of_text(text, field_kinds(SamplingParams)[name], name)
            self.params = replace(self.params, **{name: getattr(settings.sampling({name: value}), name)})
            self.number = 0 if name == "seed" else self.number
        values = {"thoughts": self.thoughts, **{one: getattr(self.params, one) for one in SAMPLING}}
        tell("\n".join(f"{one} = {value}" for one, value in values.items() if name in ("", one)))

    def _save(self, rest: str) -> None:
        file = str(Path(rest).expanduser())
        if not rest or Path(file).exists():
            raise ConfigError(f"{rest} exists: give another file" if rest else "/save FILE: FILE is missing")
        plain = "\n\n".join(f"## {one['role']}\n\n{one['content']}" for one in self.messages) + "\n"
        try:
            write(as_json({"messages": self.messages}, pretty=True) if file.endswith(".json") else plain, file)
        except OSError as error:
            raise ConfigError(f"{rest} cannot be written: {error.strerror}; give another file") from None
        tell(f"{len(self.messages)} messages in {rest}")

    def _model(self, _: str) -> None:
        runs, spec = self.engine.resolved(), self.engine.model.spec
        parts = [
            f"{runs['target']} ({runs['architecture']})",
            f"{runs['implementation']} {held(runs)} on {runs['device']}",
        ]
        parts += [f"a context of {spec.context()}", f"guesses: {runs['speculative']['method']} ({runs['speculation']})"]
        tell(" · ".join(parts))

    def _exit(self, _: str) -> None:
        raise EOFError

    def _help(self, _: str) -> None:
        tell("\n".join([f"{name + takes:<16} {about}" for name, (takes, about, _) in COMMANDS.items()] + [KEYS]))


KEYS = (
    "Enter sends; Alt-Enter, or \\ at the end of a line, begins another line; what is pasted is one message. Up: earlier "
    "messages. Tab completes commands. Ctrl-C stops an answer, Ctrl-D leaves. // sends a message that begins with /."
)
COMMANDS: dict[str, tuple[str, str, Callable[[Talk, str], str | None]]] = {
    "/help": ("", "this list", Talk._help),
    "/new": ("", "begin again; the system message stays", lambda talk, _: talk.turns.clear()),
    "/retry": ("", "another answer to the last message", Talk._retry),
    "/system": (" TEXT", "the system message; without TEXT none", Talk._system),
    "/set": (" NAME VALUE", "how answers are made; without NAME all settings", Talk._set),
    "/save": (" FILE", "the conversation, as JSON where FILE ends in .json", Talk._save),
    "/model": ("", "what runs", Talk._model),
    "/speed": ("", "all figures of the last answer", lambda talk, _: tell(talk.last or "no answer yet")),
    "/exit": ("", "leave", Talk._exit),
}
"""What each takes, what it does, and its function."""
