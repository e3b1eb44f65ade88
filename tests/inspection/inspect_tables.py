"""Token tables with chosen numbers: what an inspection, its page and its export are tested on."""

import numpy as np
import pyarrow as pa

from deftune.inspection.inspect import Inspection, inspect_tables
from deftune.objectives import objective
from deftune.objectives.stats import from_columns
from deftune.tokens.table import ROW_SCHEMA, token_schema

OBJECTIVES = ["nll", "linear", "deft"]
END = ("<|im_end|>", 0.9, "\n", 0.05)

# (text, p, the likeliest other token, its q): a right sum, a wrong one, and prose
ROWS = [
    [("2 + 2", 0.4, "3", 0.3), (" = ", 0.9, "=", 0.05), ("4", 0.95, "5", 0.03), ("\n#### ", 0.9, "\n", 0.05),
     ("4", 0.99, "5", 0.004), END],
    [("3 + 3", 0.4, "2", 0.3), (" = ", 0.9, "=", 0.05), ("7", 0.001, "6", 0.98), ("\n#### ", 0.9, "\n", 0.05),
     ("7", 0.97, "6", 0.01), END],
    [("Once", 0.2, "The", 0.2), (" upon", 0.0005, " again", 0.99), (" a", 0.99, " the", 0.004),
     (" time", 0.99, " day", 0.005), (" there", 0.5, ",", 0.3), (" was", 0.7, " lived", 0.2), (" a", 0.9, " an", 0.05),
     (" fox", 0.01, " king", 0.05), (" and", 0.3, " who", 0.3), (" a", 0.6, " the", 0.2), (" hen", 0.02, " dog", 0.06),
     (" in", 0.3, ".", 0.3), (" town", 0.02, " the", 0.3), END],
]  # fmt: skip


def make_tables(rows=ROWS, prompts=None, wheres=None, data="rows.jsonl", model="tiny") -> tuple[pa.Table, pa.Table]:
    """A token table and its rows. What p and q leave is spread over 1000 other tokens."""
    flat = [token for row in rows for token in row]
    p, q = np.array([token[1] for token in flat]), np.array([token[3] for token in flat])
    rest = 1 - p - q
    squares = p**2 + q**2 + rest**2 / 1000
    entropy = -(p * np.log(p) + q * np.log(q) + np.where(rest > 0, rest * np.log(np.maximum(rest, 1e-9) / 1000), 0))
    stats = from_columns(np.log(p).tolist(), entropy.tolist(), np.log(squares).tolist(), vocab_size=1002)
    columns = {
        "row": np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        "position": np.concatenate([np.arange(len(row)) + 10 for row in rows]),
        "token_id": np.zeros(len(flat)), "text": [token[0] for token in flat], "log_p": np.log(p), "p": p,
        "entropy": entropy, "concentration": squares, "rank": (q > p).astype(int), "top_id": np.zeros(len(flat)),
        "top_text": [token[0] if a >= b else token[2] for token, a, b in zip(flat, p, q)],
        "top_log_p": np.log(np.maximum(p, q)), "other_id": np.ones(len(flat)),
        "other_text": [token[2] for token in flat], "other_log_p": np.log(q),
        "is_eos": [token[0] == "<|im_end|>" for token in flat],
        "is_format": [token[0] == "<|im_end|>" for token in flat],
    }  # fmt: skip
    for name in OBJECTIVES:
        gate = objective(name).gate(stats).numpy()
        columns |= {f"focus:{name}": gate, f"gate:{name}": gate, f"signal:{name}": gate * (1 - p)}
        columns[f"gradient:{name}"] = gate
    schema = token_schema(OBJECTIVES)
    facts = {b"deftune": f'{{"model": "{model}", "data": "{data}"}}'.encode()}
    table = pa.table(
        [pa.array(columns[name]).cast(kind) for name, kind in zip(schema.names, schema.types)], schema=schema
    )
    lines = [
        {
            "row": i, "where": wheres[i] if wheres else f"{data}:{i + 1}",
            "prompt": prompts[i] if prompts else f"<|im_start|>user\nQuestion {i + 1}?<|im_end|>\n", "between": [],
            "answer": "".join(token[0] for token in row), "num_tokens": len(row) + 10, "num_supervised": len(row),
            "truncated": 0,
        }
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return table.replace_schema_metadata(facts), pa.Table.from_pylist(lines, schema=ROW_SCHEMA)


def make_inspection(rows=ROWS, **options) -> Inspection:
    return inspect_tables(*make_tables(rows, **options), OBJECTIVES)


def many_rows(num_tokens: int, per_row: int = 100) -> list:
    """Rows of words drawn from 5,000, with numbers drawn too: nothing that compresses well."""
    draw = np.random.default_rng(0)
    words = np.array([f" w{n}" for n in range(5000)])
    p = draw.uniform(1e-4, 0.5, num_tokens)
    q = draw.uniform(1e-4, 0.5, num_tokens)
    texts, others = (words[draw.integers(0, len(words), num_tokens)].tolist() for _ in range(2))
    tokens = list(zip(texts, p.tolist(), others, q.tolist()))
    return [tokens[i : i + per_row] for i in range(0, num_tokens, per_row)]
