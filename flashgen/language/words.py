"""The reserved words of the language, by the part that they play in the grammar."""

from collections.abc import Mapping

STATEMENTS = (
    "head_dim",
    "dtype",
    "const",
    "param",
    "tensor",
    "let",
    "scale",
    "score",
    "mask",
    "layout",
    "select",
    "weights",
    "dropout",
    "schedule",
)
TOP_LEVEL = ("attention", "def", "import")
OPERATORS = ("and", "or", "not", "if", "else")
LITERALS = ("true", "false")
RESERVED = frozenset((*STATEMENTS, *TOP_LEVEL, *OPERATORS, *LITERALS))

# The terminals of attn.lark that spell these words.
STATEMENT_TERMINALS = frozenset(word.upper() for word in STATEMENTS)
TOP_LEVEL_TERMINALS = frozenset(word.upper() for word in TOP_LEVEL)
RESERVED_TERMINALS = frozenset(word.upper() for word in RESERVED)
DECLARING_TERMINALS = frozenset({"CONST", "PARAM", "TENSOR", "LET", "DEF", "ATTENTION"})

# How statements are written that have signs and names of their own; ``{}`` is the name that is declared.
WRITTEN: Mapping[str, str] = {
    "HEAD_DIM": "'head_dim 64, 128', or 'head_dim 192/128' where values have 128",
    "DTYPE": "'dtype f16, bf16'",
    "CONST": "'const {} = …': its type follows",
    "PARAM": "'param {}: f32', with a default 'param {}: f32 = 1.0'",
    "TENSOR": "'tensor {}: f32[H, Nk]', with the sizes of its dimensions; one number is a 'param {}: f32'",
    "LET": "'let {} = …': its type follows; a function is a 'def', outside of the block",
    "LAYOUT": "'layout block 64: I >= J'",
    "SELECT": "'select 64: list[b, hkv, i, :]', with a 'tensor list: i32[B, Hkv, Nq, 16]'",
    "SCHEDULE": "'schedule { Br = 64 Bc = 64 }'",
    "ATTENTION": "'attention {} { head_dim 64 }'",
    "DEF": "'def {}(x) = …'",
    "IMPORT": "'import \"masks.attn\"'",
}

# What a comma is told, where it stands between what would be separate.
LISTING: Mapping[str, str] = {
    "MASK": "conditions are joined by 'and' and 'or'",
    "LAYOUT": "conditions are joined by 'and' and 'or'",
    **{word: f"write {WRITTEN[word]}" for word in ("HEAD_DIM", "DTYPE")},
    **dict.fromkeys(("CONST", "PARAM", "TENSOR", "LET"), "each name has a statement of its own"),
}
