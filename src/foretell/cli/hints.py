"""What is said of options and commands as other programs spell them (llama.cpp, vLLM, Ollama), and of those that another
command has.

``hints.json`` has their spellings by ours, why a command does without an option (or where that is said), and commands.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from foretell.core.errors import nearest

TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SPELLINGS = {theirs: own for own, others in TABLES["spellings"].items() for theirs in others}


def of_command(name: str, known: Iterable[str]) -> str:
    """What is said of a command that there is not."""
    here = TABLES["commands"].get(name)
    return nearest(name, known) if here is None else f": here it is {here}"


def of_option(option: str, ctx: Any, args: Sequence[str]) -> str:
    """What is said of an option that a command does not have. ctx: of the command; args: all that was typed."""
    whole = next((one for one in args if one.startswith(option) and one in SPELLINGS), option)
    commands = {**getattr(getattr(ctx.parent, "command", None), "commands", {}), ctx.info_name: ctx.command}
    having = {name: {form for each in command.params for form in each.opts} for name, command in commands.items()}
    own, wanted, serves = having.pop(ctx.info_name), SPELLINGS.get(whole, whole), ctx.info_name == "serve"
    name = wanted.partition("=")[0]
    near, others = nearest(option, own), [f"'foretell {one}'" for one, names in having.items() if name in names]
    if name in own or name == "PROMPT":
        said = f"here it is {wanted}"
    elif serves and name == "--target":
        said = "here the model is the argument: foretell serve TARGET"
    elif name in TABLES["missing"]:
        said = f"there is none for it here: {TABLES['missing'][name]}"
    elif serves and name in having["chat"] - {"--system", "--quiet"}:
        said = f"each request says it: its field {name[2:].replace('-', '_').replace('_new_', '_')}"
    elif others:
        said = f"{name} is of {', '.join(others[:4])}"
    else:
        said = near[2:] if "did you mean" in near else f"see '{ctx.command_path} --help'"
    return f"unknown option {whole!r}; {said}"
