"""Steps for the Gluon kernel, at its edges: see `test_hopper.py`."""

HEADS = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
RAGGED = {"kv_lens": [517, 130, 64, 0, 1023, 200], "qo_lens": [517, 130, 20, 25, 33, 0]}
CASES = {
    "one request": {"spec": HEADS, "page_size": 16, "kv_lens": [512], "qo_lens": [512]},
    "bfloat16": {"spec": HEADS | {"dtype": "bfloat16"}, "page_size": 16} | RAGGED,
    "head_dim 64": {"spec": HEADS | {"head_dim": 64}, "page_size": 16} | RAGGED,
    "head_dim 256": {"spec": HEADS | {"head_dim": 256}, "page_size": 16} | RAGGED,
    "head_dim 256 window soft cap": {
        "spec": HEADS | {"head_dim": 256, "window_left": 100, "logits_soft_cap": 20.0},
        "page_size": 64,
    } | RAGGED,
    "not causal": {"spec": HEADS | {"causal": False}, "page_size": 16} | RAGGED,
    "soft cap": {"spec": HEADS | {"logits_soft_cap": 20.0}, "page_size": 16} | RAGGED,
    "more queries than keys": {
        "spec": HEADS, "page_size": 16, "kv_lens": [1, 40, 300, 0], "qo_lens": [300, 200, 500, 90],
    },
    "empty rows beside NaN": {
        "spec": HEADS, "page_size": 16, "kv_lens": [100], "qo_lens": [133], "all_nan": True,
    },
    "infinity": {"spec": HEADS, "page_size": 64, "garbage": "infinity"} | RAGGED,
    "low scores": {"spec": HEADS, "page_size": 16, "values": "low_scores"} | RAGGED,
    "long context": {
        "spec": HEADS, "page_size": 16, "kv_lens": [4096, 3000], "qo_lens": [100, 65],
    },
    "many requests": {
        "spec": HEADS, "page_size": 32,
        "kv_lens": [37 * i % 701 for i in range(120)], "qo_lens": [17 + i % 50 for i in range(120)],
    },
    "window not causal": {
        "spec": HEADS | {"causal": False, "window_left": 100}, "page_size": 16,
    } | RAGGED,
    "window soft cap": {
        "spec": HEADS | {"window_left": 100, "logits_soft_cap": 20.0}, "page_size": 16,
    } | RAGGED,
    "heads of a larger cache": {"spec": HEADS, "page_size": 16, "strided": "heads"} | RAGGED,
    "pages out of step": {"spec": HEADS, "page_size": 16, "strided": "pages"} | RAGGED,
    "graph": {"spec": HEADS, "page_size": 16, "graph": True} | RAGGED,
    "graph window": {"spec": HEADS | {"window_left": 65}, "page_size": 16, "graph": True} | RAGGED,
    "plain kernel's cache": {"spec": HEADS, "page_size": 16, "strided": "odd"} | RAGGED,
}  # fmt: skip
# pages that are no boxes of the copy engine, whose rows are gathered
ONE = {"spec": HEADS, "page_size": 1}
WINDOW = {"spec": HEADS | {"window_left": 65}, "page_size": 3}
CASES |= {
    "gather": ONE | RAGGED,
    "gather, one tile": ONE | {"kv_lens": [100], "qo_lens": [70]},
    "gather empty rows beside NaN": ONE | {"kv_lens": [100], "qo_lens": [133], "all_nan": True},
    "gather infinity": ONE | {"garbage": "infinity"} | RAGGED,
    "gather long context": ONE | {"kv_lens": [4096, 3000], "qo_lens": [100, 65]},
    "gather many requests": ONE | {
        "kv_lens": [37 * i % 701 for i in range(120)], "qo_lens": [17 + i % 50 for i in range(120)],
    },
    "gather heads of a larger cache": ONE | {"strided": "heads"} | RAGGED,
    "gather pages out of step": ONE | {"strided": "pages"} | RAGGED,
    "gather two launches": ONE | {"first_grid": 40} | RAGGED,
    "gather graph": ONE | {"graph": True} | RAGGED,
    "gather window": WINDOW | RAGGED,
    "gather long window": WINDOW | {"kv_lens": [517, 900, 4500], "qo_lens": [517, 50, 140]},
    "gather window graph": WINDOW | {"graph": True} | RAGGED,
    "gather wide window": {
        "spec": HEADS | {"window_left": 1000}, "page_size": 3,
        "kv_lens": [517, 900, 4500], "qo_lens": [517, 50, 140],
    },
    "gather window soft cap": {
        "spec": HEADS | {"window_left": 100, "logits_soft_cap": 20.0}, "page_size": 5,
    } | RAGGED,
    "gather bfloat16, not causal": {
        "spec": HEADS | {"dtype": "bfloat16", "causal": False}, "page_size": 24,
    } | RAGGED,
    "gather head_dim 256": {"spec": HEADS | {"head_dim": 256}, "page_size": 2} | RAGGED,
    "gather head_dim 64": {"spec": HEADS | {"head_dim": 64}, "page_size": 7} | RAGGED,
}  # fmt: skip
# queries of up to 64 rows, alone, where some have more than 32 or are captured, or beside long ones
DECODE = {"kv_lens": [517, 130, 64, 0, 1, 6000, 65], "qo_lens": [1, 1, 1, 1, 1, 1, 0]}
DRAFTS = {"kv_lens": [517, 130, 2, 0, 4000, 200], "qo_lens": [16, 1, 5, 3, 8, 13]}
SHORT = {"spec": HEADS, "page_size": 16}
CASES |= {
    "short decode": SHORT | {"graph": True} | DECODE,
    "short drafts": SHORT | DRAFTS,
    "short one tile": SHORT | {"kv_lens": [64], "qo_lens": [9]},
    "short many pieces": SHORT | {"kv_lens": [100_000, 40_000], "qo_lens": [1, 16]},
    "short many requests": SHORT | {
        "kv_lens": [37 * i % 701 for i in range(300)], "qo_lens": [i % 17 for i in range(300)],
    },
    "short empty rows beside NaN": SHORT | {"kv_lens": [5], "qo_lens": [16], "all_nan": True},
    "short infinity": SHORT | {"garbage": "infinity"} | DRAFTS,
    "short low scores": SHORT | {"values": "low_scores"} | DRAFTS,
    "short heads of a larger cache": SHORT | {"strided": "heads"} | DRAFTS,
    "short plain kernel's cache": SHORT | {"strided": "pages"} | DRAFTS,
    "short graph": SHORT | {"graph": True} | DRAFTS,
    "short bfloat16": {"spec": HEADS | {"dtype": "bfloat16"}, "page_size": 128} | DRAFTS,
    "short head_dim 64": {"spec": HEADS | {"head_dim": 64}, "page_size": 16} | DRAFTS,
    "short head_dim 256": {"spec": HEADS | {"head_dim": 256}, "page_size": 16} | DRAFTS,
    "short not causal": {"spec": HEADS | {"causal": False}, "page_size": 16} | DRAFTS,
    "short window": {"spec": HEADS | {"window_left": 1000}, "page_size": 16} | DRAFTS,
    "short window soft cap": {
        "spec": HEADS | {"window_left": 65, "logits_soft_cap": 20.0}, "page_size": 64,
    } | DRAFTS,
    "short window not causal": {
        "spec": HEADS | {"causal": False, "window_left": 100}, "page_size": 16,
    } | DRAFTS,
}  # fmt: skip
BOTH = {
    "kv_lens": [517, 130, 6000, 64, 0, 1023, 200, 65, 4000, 1, 900],
    "qo_lens": [517, 1, 1, 20, 25, 33, 0, 1, 16, 1, 300],
}  # fmt: skip
MANY = {
    "kv_lens": [37 * i % 1401 for i in range(200)], "qo_lens": [i % 31 for i in range(200)],
}  # fmt: skip
CASES |= {
    "both": SHORT | BOTH,
    "both bfloat16": {"spec": HEADS | {"dtype": "bfloat16"}, "page_size": 64} | BOTH,
    "both head_dim 64": {"spec": HEADS | {"head_dim": 64}, "page_size": 16} | BOTH,
    "both head_dim 256": {"spec": HEADS | {"head_dim": 256}, "page_size": 16} | BOTH,
    "both window": {"spec": HEADS | {"window_left": 1000}, "page_size": 16} | BOTH,
    "both many requests": SHORT | MANY,
    "both infinity": SHORT | {"garbage": "infinity"} | BOTH,
    "both graph": SHORT | {"graph": True} | BOTH,
    "both pages out of step": SHORT | {"strided": "pages"} | BOTH,
    "both plain kernels' cache": SHORT | {"strided": "odd"} | BOTH,
    "both batch-invariant": SHORT | {"options": {"batch_invariant": True}} | BOTH,
    "both batch-invariant graph": SHORT | {
        "options": {"batch_invariant": True}, "graph": True,
    } | BOTH,
    "both batch-invariant, launches": SHORT | {
        "options": {"batch_invariant": True}, "first_grid": 40,
    } | BOTH,
    "both 3 KV heads": {"spec": HEADS | {"num_qo_heads": 12, "num_kv_heads": 3}, "page_size": 16}
    | BOTH,
}  # fmt: skip
for page_size in (8, 64, 256):
    CASES[f"page_size {page_size}"] = {"spec": HEADS, "page_size": page_size} | RAGGED
for group in (1, 7, 40):
    heads = HEADS | {"num_qo_heads": 2 * group}
    CASES[f"group {group}"] = {
        "spec": heads, "page_size": 16, "kv_lens": [200, 333], "qo_lens": [150, 333],
    }  # fmt: skip
for window_left in (0, 1, 63, 64, 65, 4096):
    CASES[f"window {window_left}"] = {
        "spec": HEADS | {"window_left": window_left}, "page_size": 16,
        "kv_lens": [517, 900, 4500], "qo_lens": [517, 50, 140],
    }  # fmt: skip
