"""The page docs/help.md, made from the commands: ``python docs/site/helpdoc.py > docs/help.md``.

An option that several commands have alike stands once, in the first section. So the page is a third as long as all
``--help`` texts together, which stay whole.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import typer.main

HEAD = """# Every command and option

What does a command take, and what does an option do? Options that several commands have alike stand once, by topic, in
[the last section](#shared-options): *Models* after a command means all of that topic. `foretell COMMAND --help` shows all
of one command.

A default stands in brackets; `NAME=` is an environment variable that sets the option. An option with *several* may be
given more than once. `python docs/site/helpdoc.py` makes this page.
"""
SHARED = "Shared options"
ELSEWHERE = {
    "bench": "suites.md",
    "certify": "certify.md",
    "doctor": "doctor.md",
    "explain": "doctor.md",
    "learn": "learn.md",
    "train": "train.md",
}
"""Pages that say more of a command than its help does: here its first paragraph and a link are enough."""


def page() -> str:
    """The whole page."""
    from foretell.cli.app import app

    root = typer.main.get_command(app)
    commands = list(walk("foretell", root))
    shared = shared_options([option for _, command in commands for option in options(command)])
    parts = [HEAD, *contents(root), *(section(name, command, shared) for name, command in commands), f"## {SHARED}"]
    parts += [
        f"### {panel}\n\n" + "\n".join(f"- {text}{agreed}" for text, agreed in texts.items())
        for panel, texts in shared.items()
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def shared_options(found: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Of every name the meaning that most commands give it, if that is more than one command: by panel, each with its
    default where all commands have the same."""
    counts = Counter((names_of(option)[0], meaning(option)) for option in found)
    most = {name: (text, count) for (name, text), count in reversed(counts.most_common())}
    texts = {text for text, count in most.values() if count > 1}
    shared: dict[str, dict[str, str]] = {}
    for option in found:
        if (text := meaning(option)) in texts:
            of_panel = shared.setdefault(option.rich_help_panel or "Options", {})
            of_panel[text] = default(option) if of_panel.get(text, default(option)) == default(option) else ""
    return shared


def shares(command: Any, shared: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """What a command has of each panel's shared options: all, all but a few, or these; and its defaults, where others
    have others."""
    here = {meaning(option): option for option in options(command)}
    for panel, texts in shared.items():
        own = {text: default(here[text]) for text in texts if text in here and default(here[text]) != texts[text]}
        lacks = [first_name(text) for text in texts if text not in here]
        if 2 * len(lacks) < len(texts):
            but = f" but {', '.join(lacks)}" if lacks else ""
            defaults = ", ".join(first_name(text) + value for text, value in own.items() if value)
            yield f"*{panel}*{but}" + (f" ({defaults})" if defaults else "")
        elif len(lacks) < len(texts):
            yield ", ".join(first_name(text) + own.get(text, "") for text in texts if text in here)


def first_name(text: str) -> str:
    """The name that an option's line begins with, as code."""
    return re.sub(r"^(`[\w-]+).*", r"\1`", text)


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command and those below it, each with its name ("foretell bench"), by groups."""
    yield name, command
    for below, inner in grouped(command):
        yield from walk(f"{name} {below}", inner)


def grouped(command: Any) -> list[tuple[str, Any]]:
    """The commands of a command and their names, those of one group beside each other, as ``--help`` lists them."""
    below = getattr(command, "commands", {})
    groups = list(dict.fromkeys(inner.rich_help_panel for inner in below.values()))
    return sorted(below.items(), key=lambda item: groups.index(item[1].rich_help_panel))


def contents(root: Any) -> Iterator[str]:
    """The commands of each group."""
    for group, below in groupby(grouped(root), lambda item: item[1].rich_help_panel):
        yield f"**{group}**: " + ", ".join(f"[`{name}`](#foretell-{name})" for name, _ in below)


def section(name: str, command: Any, shared: Mapping[str, Mapping[str, str]]) -> str:
    """One command: its usage, its help, its own options, and which ones it shares."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    own = [option for option in options(command) if not any(meaning(option) in texts for texts in shared.values())]
    listed = [f"- `{argument_name(param)}`: {escaped(param.help)}{default(param)}" for param in arguments]
    listed += [f"- {meaning(option)}{default(option)}" for option in own]
    usage = " ".join([name, *map(argument_name, arguments)])
    elsewhere = ELSEWHERE.get(name.removeprefix("foretell "))
    told = paragraphs(command.help) if elsewhere is None else summary(command.help, elsewhere)
    parts = [f"## `{name}`", f"`{usage}`" if arguments else "", told, "\n".join(listed)]
    several = "; ".join(shares(command, shared))
    return "\n\n".join(filter(None, [*parts, several and f"Shared: {several}."]))


def options(command: Any) -> list[Any]:
    """A command's options in their order."""
    return [param for param in command.params if param.param_type_name == "option" and not param.hidden]


def meaning(option: Any) -> str:
    """An option without its default: names, what it takes, its environment variable, its help."""
    takes = "" if option.is_flag else f" {option.metavar or kind(option)}"
    several = " (several)" if option.multiple else ""
    variable = f" `{option.envvar}=`" if option.envvar else ""
    told = escaped(option.help).replace("; may be repeated", "")  # "several" says so
    return f"`{', '.join(names_of(option))}{takes}`{several}: {told}{limits(option)}{variable}"


def names_of(option: Any) -> list[str]:
    """The names of an option, long ones first."""
    return sorted([*option.opts, *option.secondary_opts], key=lambda name: not name.startswith("--"))


def kind(option: Any) -> str:
    """What an option takes that has no metavar, by its default."""
    return {int: "N", float: "X"}.get(type(option.default), "TEXT")


def limits(option: Any) -> str:
    """The least and greatest number."""
    if option.max is not None:
        return f" From {option.min} to {option.max}."
    return "" if option.min is None else f" At least {option.min}."


def default(param: Any) -> str:
    """A default in brackets, where there is one to show."""
    value = param.default
    if not param.show_default or value is None or value is False or value == "" or callable(value):
        return ""
    shown = names_of(param)[0] if value is True else str(value).encode("unicode_escape").decode()
    return f" [`{shown}`]"


def argument_name(param: Any) -> str:
    """An argument as usage lines show it."""
    name = (param.metavar or param.name.upper()) + ("..." if param.nargs != 1 else "")
    return name if param.required or name.startswith("[") else f"[{name}]"


def paragraphs(text: str) -> str:
    """Help text, a line each paragraph."""
    return "\n\n".join(escaped(paragraph) for paragraph in text.split("\n\n"))


def summary(text: str, where: str) -> str:
    """The first paragraph of a help text, and where more is said."""
    first, *_ = text.split("\n\n")
    return f"{escaped(first)} More: [{where}]({where})."


def escaped(text: str) -> str:
    """Help in one line, with what Markdown would take for marks shown as it is."""
    line = " ".join((text or "").split()).replace("\\[", "[")  # as rich escapes it
    for mark in ("\\", "*", "_", "<", "[", "]"):
        line = line.replace(mark, f"\\{mark}")
    return line


if __name__ == "__main__":
    sys.stdout.write(page())
