"""``python -m foretoken``: the command line."""

from foretoken.cli.main import main

if __name__ == "__main__":
    main()
