"""The Jinja environment: strict about undefined names, reading the templates that ship with the package."""

import functools
import sys

import jinja2
from jinja2.bccache import Bucket

from flashgen.store.cache import Cache, key_of
from flashgen.store.gallery import shipped

_EXTENSIONS = ("jinja2.ext.do",)
_FILE = "template.bin"


class _Compiled(jinja2.BytecodeCache):
    """Compiled templates in the cache: Jinja takes longer to read a template than to fill it."""

    def load_bytecode(self, bucket: Bucket) -> None:
        """Take what is stored."""
        content = Cache.of_compiler().read(_key(bucket), _FILE)
        if content is not None:
            bucket.bytecode_from_string(content)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store what was compiled."""
        Cache.of_compiler().write(_key(bucket), _FILE, bucket.bytecode_to_string())


def _key(bucket: Bucket) -> str:
    """Over the template's path and text, what compiles it and how."""
    versions = (jinja2.__version__, str(sys.implementation.cache_tag), *_EXTENSIONS)
    return key_of("template", bucket.key, bucket.checksum, *versions)


@functools.cache
def environment() -> jinja2.Environment:
    """Templates render the same bytes for the same context: no autoescape, no trailing blanks, no silent names."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=False,
        lstrip_blocks=False,
        keep_trailing_newline=True,
        extensions=_EXTENSIONS,
        bytecode_cache=_Compiled(),
    )
