"""The ``flashgen`` command: reads arguments, calls the library, prints what it returns."""

from flashgen.cli.app import main

__all__ = ["main"]
