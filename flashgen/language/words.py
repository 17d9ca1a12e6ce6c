"""The reserved words of the language, by the part that they play in the grammar."""

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
