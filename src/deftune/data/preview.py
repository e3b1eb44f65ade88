"""Encoded rows in a terminal: the text that a model sees, with the supervised part marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deftune.artifacts.terminal import visible
from deftune.data.encoding import EncodedRows
from deftune.data.examples import IGNORE_INDEX, Encoded

SUPERVISED, CONTEXT, SPECIAL = "bold green", "dim", "magenta"
MARKS = ("⟦", "⟧")  # around supervised text where there is no colour


def render_preview(encoded: EncodedRows, tokenizer: Any, console: Console, *, num_examples: int = 3) -> None:
    """Print the dataset's facts, its lengths, and the first examples token by token."""
    facts = Table(title="dataset", show_header=False, title_justify="left")
    for line in encoded.facts():
        facts.add_row(Text(visible(line)))
    console.print(facts)
    console.print(Text(render_histogram(encoded.examples.sizes, width=max(8, min(40, console.width - 28)))))
    marked = console.no_color or console.color_system is None
    legend = (
        f"supervised text is inside {MARKS[0]} {MARKS[1]}" if marked else "supervised text is bright, the rest is dim"
    )
    console.print(Text(f"\n{legend}; ↵ is a newline\n"))
    for example in encoded.examples[:num_examples]:
        console.print(Text(_heading(example)))
        console.print(render_example(example, tokenizer, marked=marked))


def render_example(example: Encoded, tokenizer: Any, *, marked: bool = False) -> Text:
    """The example's text: supervised tokens coloured or, if ``marked``, bracketed; special tokens visible."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    text = Text()
    tokens = zip(example.input_ids, (label != IGNORE_INDEX for label in example.labels))
    for supervised, run in groupby(tokens, key=lambda token: token[1]):
        if supervised and marked:
            text.append(MARKS[0])
        for is_special, part in groupby((token for token, _ in run), key=special.__contains__):
            style = SUPERVISED if supervised else CONTEXT
            # whole runs, not tokens: a character may be spread over several
            decoded = tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            text.append(visible(decoded), style=f"{style} {SPECIAL}" if is_special else style)
        if supervised and marked:
            text.append(MARKS[1])
    if example.truncated:
        text.append(f" ... {example.truncated:,} tokens cut", style="red")
    return text.append("\n")


def _heading(example: Encoded) -> str:
    size, supervised = len(example.input_ids), example.num_supervised
    parts = [f"{size:,} tokens", f"{supervised:,} supervised ({supervised / size:.0%})"]
    if example.truncated:
        parts.append(f"{example.truncated:,} cut")
    if example.straddled:
        parts.append(f"{example.straddled:,} straddled")
    return f"{visible(example.where)}: {', '.join(parts)}"


def render_histogram(lengths: Sequence[int], *, num_bins: int = 10, width: int = 40) -> str:
    """One line per range of lengths, a bar and a count."""
    if not lengths:
        return "no examples"
    step = -(-(max(lengths) + 1) // num_bins)
    counts = [0] * (max(lengths) // step + 1)
    for size in lengths:
        counts[size // step] += 1
    digits = len(f"{max(lengths) + step:,}")
    lines = [f"tokens per example: {min(lengths):,} to {max(lengths):,}, mean {sum(lengths) / len(lengths):,.0f}"]
    for i, count in enumerate(counts):
        bar = "█" * -(-width * count // max(counts))
        lines.append(f"{i * step:>{digits},} to {(i + 1) * step - 1:>{digits},}  {bar:{width}} {count:,}".rstrip())
    return "\n".join(lines)
