"""The entry point of ``foretell``: handles an interrupt during the import of the rest."""

import os
import sys

from foretell.cli.starting import command, let_idle_threads_sleep, uncollected
from foretell.core.platform import forgiving


def main() -> None:
    """Run the command line and exit."""
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        forgiving(stream, "replace")  # a terminal without UTF-8 gets question marks, not an error
    let_idle_threads_sleep()
    try:
        with command():
            with uncollected():
                from foretell.cli.app import app

            app(prog_name="foretell")
    except KeyboardInterrupt:
        sys.exit(130)


def open_streams() -> None:
    """Put the null device in place of each standard stream that the caller has closed (``foretell ... >&-``): Python has
    None there, and the next file to be opened, whichever it is, would be standard output."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(descriptor)  # somebody's file by now, or the null device by the line above
        except OSError:
            os.dup2(opened, descriptor)
            os.close(opened)
            opened = descriptor
        setattr(sys, name, open(opened, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
