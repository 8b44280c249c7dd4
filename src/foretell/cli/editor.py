"""The line that a person edits in ``foretell chat``: with a history on the disk, several lines, and completion."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from foretell.core.cachedir import cache_directory

KEYS = KeyBindings()


def editor(words: Sequence[str]) -> Callable[[], str]:
    """What reads a message. It raises EOFError for Ctrl-D, and KeyboardInterrupt for Ctrl-C, both without a text. words:
    beginnings of lines, which Tab completes."""
    session: PromptSession[str] = PromptSession(
        "> ", multiline=True, prompt_continuation="  ", key_bindings=KEYS, history=_history(), complete_while_typing=False,
        completer=WordCompleter(words, sentence=True), complete_style=CompleteStyle.READLINE_LIKE, enable_suspend=True,
        output=create_output(always_prefer_tty=True),
    )  # fmt: skip
    return session.prompt


@KEYS.add("enter")
def _enter(event: KeyPressEvent) -> None:
    buffer = event.current_buffer
    if buffer.document.text_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


@KEYS.add("escape", "enter")
def _alt_enter(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


@KEYS.add("c-c")
def _ctrl_c(event: KeyPressEvent) -> None:
    if event.current_buffer.text:
        event.current_buffer.reset()
    else:
        event.app.exit(exception=KeyboardInterrupt)


class _Kept(FileHistory):
    """One that a full disk, or a message that is no text, does not end the chat for."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):
            super().store_string(string)


def _history() -> History:
    file = cache_directory() / "history" / "chat"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return _Kept(file)
