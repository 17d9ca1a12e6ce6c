"""What people write who come from FlexAttention, PyTorch or NumPy, and what stands for it here.

In: a name, a function or a statement that the language does not have. Out: the hint that names the way. Pure data; a
misspelt name of the language's own is ``report.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.diagnostics import spoken_list
from flashgen.ir.weights import FORMS

ROW = "an expression is of one pair (i, j), and sums over keys are those of 'weights'; pass other ones as a 'tensor'"
OTHER_PAIRS = "write 's', the score of the pair (i, j): no expression sees those of other pairs"
_FORMS = [each.format("E") for form in FORMS.values() for each in form.written]
_WEIGHTS = f"the weights are {spoken_list(_FORMS, 'and')} of one pair: a row is never sorted"
_QUERY, _KEY = "the position of the query is 'i'", "the position of the key is 'j'"
_BATCH, _HEAD = "the index of the batch is 'b'", "the query head is 'h', its key/value head 'hkv'"
_LENGTHS, _D = "the lengths are 'Nq' and 'Nk'", "the head dimension is 'D', that of values 'Dv'"
_PRODUCT = "'s' is τ · (q_i · k_j), 'dot' the product without τ"
_SCALE = "'scale' states τ; 's' has it already"
_LOWER, _UPPER = "write 'j <= i', which is 'causal'", "write 'j >= i'"
_ROTARY = "rotate q and k before the call: no expression sees their elements"
_OUTPUT = "multiply what the op returns: a spec says how scores become weights, and o is the sum of values by these"
_SIZE = "leave it out: sizes are those of q, k and v at each call"
_OFF_BY_ONE = "write 'softmax(sink = 0.0)', whose denominator has one more exp(0)"
_NO_LOOP = "there are no loops: write the terms out, or pass their sum as a 'tensor'"
_RANDOM = "'hash(b, h, i, j)' is an int that looks random; 'dropout' drops weights"

_OVER_KEYS = """
    sum mean prod cumsum cumprod logsumexp log_softmax std var norm amax amin argmax argmin topk sort any all median
"""

NAMES: Mapping[str, str] = {
    "q": _PRODUCT,
    "k": _PRODUCT,
    **dict.fromkeys(("qk", "scores", "logits", "attn", "attn_weights", "sim"), _PRODUCT),
    **dict.fromkeys(("v", "value", "values"), "the values enter after the weights; no expression sees them"),
    **dict.fromkeys(("q_idx", "query_idx", "q_pos"), _QUERY),
    **dict.fromkeys(("kv_idx", "k_idx", "key_idx", "k_pos", "kv_pos"), _KEY),
    **dict.fromkeys(("batch", "batch_idx", "b_idx"), _BATCH),
    **dict.fromkeys(("head", "head_idx", "h_idx"), _HEAD),
    **dict.fromkeys(("N", "L", "S", "T", "seq_len", "seqlen", "sequence_length", "n_ctx", "max_seq_len"), _LENGTHS),
    **dict.fromkeys(("q_len", "Q_LEN", "M"), "the number of queries is 'Nq'"),
    **dict.fromkeys(("kv_len", "KV_LEN", "k_len"), "the number of keys is 'Nk'"),
    **dict.fromkeys(("d", "d_k", "d_head", "dim", "head_size", "E"), _D),
    **dict.fromkeys(("num_heads", "n_heads", "nheads", "n_head"), "the number of query heads is 'H'"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads"), "the number of key/value heads is 'Hkv'"),
    **dict.fromkeys(("tau", "sm_scale", "softmax_scale"), _SCALE),
    **dict.fromkeys(("None", "none", "null", "full"), "leave the statement out"),
    **dict.fromkeys(("softmax1", "softmax_1", "softmax_one"), _OFF_BY_ONE),
    **dict.fromkeys(("linear", "identity"), "write 's'"),
    "alibi": "write 'score s - alibi_slope(h) * abs(i - j)'",
    **dict.fromkeys(("nan", "NaN"), "no number is NaN; a score that masks its pair is '-inf'"),
    **dict.fromkeys(("sparsemax", "entmax", "entmax15"), _WEIGHTS),
}

FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("softmax1", "softmax_1", "softmax_one"), _OFF_BY_ONE),
    **dict.fromkeys(_OVER_KEYS.split(), ROW),
    **dict.fromkeys(("sparsemax", "entmax", "entmax15", "entmax_bisect"), _WEIGHTS),
    **dict.fromkeys(("minimum", "fmin"), "write min(x, y)"),
    **dict.fromkeys(("maximum", "fmax"), "write max(x, y)"),
    **dict.fromkeys(("clip", "clamp_"), "write clamp(x, lo, hi)"),
    "clamp_min": "write max(x, lo)",
    "clamp_max": "write min(x, hi)",
    **dict.fromkeys(("rope", "rotary", "rotary_emb", "apply_rope", "apply_rotary", "apply_rotary_emb"), _ROTARY),
    **dict.fromkeys(("sliding_window", "sliding", "local", "swa"), "write 'causal and window_left(w)', or window(w)"),
    **dict.fromkeys(("relu2", "relu_squared", "squared_relu"), "write 'relu(s) ** 2'"),
    **dict.fromkeys(("square", "sqr"), "write 'x * x'"),
    "power": "write 'x ** y'",
    **dict.fromkeys(("absolute", "fabs"), "write abs(x)"),
    **dict.fromkeys(("logical_and", "and_masks"), "write 'x and y'"),
    **dict.fromkeys(("logical_or", "or_masks"), "write 'x or y'"),
    "logical_not": "write 'not x'",
    "logical_xor": "write 'x != y'",
    **dict.fromkeys(("fmod", "remainder", "mod"), "write 'x % y', whose sign is that of y"),
    "floor_divide": "write 'x // y'",
    **dict.fromkeys(("div", "divide", "true_divide"), "write 'x / y'"),
    "reciprocal": "write '1 / x'",
    **dict.fromkeys(("cdiv", "ceil_div"), "write ceildiv(x, y)"),
    "swish": "write silu(x)",
    "leaky_relu": "write 'max(x, 0.01 * x)'",
    "elu": "write 'x if x > 0 else exp(x) - 1'",
    "expm1": "write 'exp(x) - 1'",
    "log10": "write 'log2(x) * 0.30103'",
    "tan": "write 'sin(x) / cos(x)'",
    "sinh": "write '(exp(x) - exp(-x)) / 2'",
    "cosh": "write '(exp(x) + exp(-x)) / 2'",
    "bool": "write 'x != 0'",
    **dict.fromkeys(("float32", "float64", "tensor"), "write float(x)"),
    **dict.fromkeys(("int32", "int64", "long"), "write int(x)"),
    "masked_fill": "write 'where(condition, value, s)'; a score of '-inf' is masked",
    "tril": _LOWER,
    "triu": _UPPER,
    **dict.fromkeys(("arange", "iota", "range"), "positions are 'i' and 'j'; an expression is of one pair"),
    **dict.fromkeys(("len", "shape"), "the sizes are B, H, Hkv, Nq, Nk, D and Dv"),
    **dict.fromkeys(("matmul", "einsum", "bmm"), _PRODUCT),
    **dict.fromkeys(("rand", "randn", "bernoulli", "randint"), _RANDOM),
    "isnan": "write 'x != x'",
    "isinf": "write 'abs(x) == inf'",
}

STATEMENTS: Mapping[str, str] = {
    "score_mod": "write 'score EXPR', where 's' is the score, and 'b', 'h', 'i', 'j' say of which pair",
    "mask_mod": "write 'mask CONDITION' of 'b', 'h', 'i' (the query) and 'j' (the key)",
    "block_mask": "write 'mask CONDITION': which tiles it leaves out is found from it; 'layout' keeps blocks",
    "attn_mask": "write 'mask CONDITION'; one that is data is a 'tensor', as in 'mask keep[b, i, j]'",
    "attn_bias": "write 'score s + bias[h, i, j]' with 'tensor bias: f32[H, Nq, Nk]'",
    "dropout_p": "write 'dropout 0.1'",
    "is_causal": "write 'mask causal'",
    "sm_scale": "write 'scale 0.125'",
    "softmax_scale": "write 'scale 0.125'",
    "enable_gqa": "leave it out: H has to be a multiple of Hkv, and key/value heads are shared",
    **dict.fromkeys(("output", "out", "o", "gate", "epilogue"), _OUTPUT),
    "return": "write 'score EXPR', or 'mask CONDITION'",
    **dict.fromkeys(("for", "while"), _NO_LOOP),
    **dict.fromkeys(("heads", "num_heads", "n_heads", "kv_heads", "num_kv_heads", "batch", "seq_len"), _SIZE),
    **dict.fromkeys(("rope", "rotary", "qk_norm"), _ROTARY),
    "softcap": "write 'score softcap(s, 30)'",
    **dict.fromkeys(("alibi", "alibi_slopes"), "write 'score s - alibi_slope(h) * abs(i - j)'"),
    **dict.fromkeys(("window_size", "sliding_window"), "write 'mask causal and window_left(128)'"),
    **dict.fromkeys(("sink", "sinks"), "write 'weights softmax(sink = z[h])' with 'tensor z: f32[H]'"),
    "softmax": "write 'weights softmax', or leave it out",
}

# Definitions of the prelude that newcomers take for statements.
MASKS: Mapping[str, str] = {
    **dict.fromkeys(("causal", "causal_lower_right"), "write 'mask {}'"),
    **dict.fromkeys(("window", "window_left", "prefix", "same_document", "chunked"), "write 'mask {}(…)'"),
}

# Signs of other languages, of two that the language has.
SIGNS: Mapping[str, str] = {
    "&&": "write 'and'",
    "||": "write 'or'",
    **dict.fromkeys(("<>", "!=="), "write '!='"),
    "===": "write '=='",
    "/*": "a comment runs from '#' to the end of its line",
}
# Words of other languages between two values, or before one.
CLAUSES: Mapping[str, str] = {
    **dict.fromkeys(("for", "in"), _NO_LOOP),
    "lambda": "write the expression alone, of 'b', 'h', 'i' (the query) and 'j' (the key)",
    "return": "write the expression alone",
    "is": "write '=='",
    "then": "write 'a if condition else b'",
    "xor": "write '!='",
    "mod": "write '%'",
}

# Words of the language where a value should stand.
WORDS: Mapping[str, str] = {"score": "the score of the pair is 's'", "head_dim": _D, "scale": _SCALE}
# What is read on in their place.
READ_AS: Mapping[str, str] = {"score": "s", "head_dim": "D"}
