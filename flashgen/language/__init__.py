"""The front end: text of a `.attn` file in, typed ``AttentionSpec``s out, or every error at once.

``parse_file`` and ``parse_text`` are the way in; the rest of the package is theirs alone.
"""

from flashgen.language.front import SpecFile, parse_file, parse_text

__all__ = ["SpecFile", "parse_file", "parse_text"]
