"""Words about a spec for headers and docstrings of generated files."""

import hashlib
import json

from flashgen.ir.spec import AttentionSpec


def spec_lines(spec: AttentionSpec) -> tuple[str, ...]:
    """The attention block, one statement a line, with the constants in force where they were overridden."""
    body = tuple(f"    {statement.text}" for statement in spec.statements)
    constants = tuple(f"constants in force: {name} = {value}" for name, value in spec.constants)
    return (f"attention {spec.name} {{", *body, "}", *constants)


def pascal_case(name: str) -> str:
    """``gemma2_local`` as ``Gemma2LocalAttention``: no word of Python and nothing that the module imports ends so."""
    joined = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{'_' if joined[:1].isdigit() else ''}{joined}Attention"


def spec_digest(spec: AttentionSpec) -> str:
    """sha256 of what the spec says: its text, its imports' texts and the constants in force."""
    content = {
        "name": spec.name,
        "sources": [source.text for source in spec.sources],
        "constants": [[name, repr(value)] for name, value in spec.constants],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
