"""``python -m flashgen``: the same as the ``flashgen`` command."""

from flashgen.cli import main

if __name__ == "__main__":
    main(prog_name="flashgen")
