"""The entry point of ``foretell``: handles an interrupt during the import of the rest."""

import io
import sys


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks, not an error
    try:
        from foretell.cli.app import app

        app(prog_name="foretell")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
