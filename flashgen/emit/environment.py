"""The Jinja environment: strict about undefined names, reading the templates that ship with the package."""

import functools
from pathlib import Path

import jinja2


def templates_folder() -> Path:
    """Where the templates are: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


@functools.cache
def environment() -> jinja2.Environment:
    """Templates render the same bytes for the same context: no autoescape, no trailing blanks, no silent names."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=False,
        lstrip_blocks=False,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
    )
