"""``python -m foretell``: the command line."""

from foretell.cli.main import main

if __name__ == "__main__":
    main()
