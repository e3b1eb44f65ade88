"""The preview: what is supervised can be told with and without colour, and data cannot steer the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from small_tokenizer import small_tokenizer

from deftune.data.encoding import Encoder, encode_rows
from deftune.data.preview import render_example, render_histogram, render_preview
from deftune.data.rows import Row

HOSTILE = "Oslo é日 \x1b[31mred\x1b[0m [bold]not markup[/bold] \u202e\n\tend"


def preview(answers: list[str], *, colour: bool, max_length: int = 99, width: int = 200) -> str:
    tokenizer = small_tokenizer()
    rows = [
        Row(({"role": "user", "content": "Where?"}, {"role": "assistant", "content": text}), None, f"a.jsonl:{i}", "a")
        for i, text in enumerate(answers, 1)
    ]
    encoded = encode_rows(rows, Encoder(tokenizer, template="chatml", max_length=max_length))
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
    )
    render_preview(encoded, tokenizer, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_without_colour_supervised_text_is_inside_marks():
    text = preview(["Oslo."], colour=False)
    assert "\x1b" not in text
    assert "<|im_start|>user↵\nWhere?<|im_end|>↵\n<|im_start|>assistant↵\n⟦Oslo.<|im_end|>⟧↵\n" in text
    assert "1 rows; 0 dropped" in text and "EOS supervised in 100%" in text
    assert "supervised text is inside ⟦ ⟧" in text


def test_with_colour_supervised_text_is_bright_and_the_rest_dim():
    text = preview(["Oslo."], colour=True)
    assert "⟦" not in text.replace("⟦ ⟧", "")
    assert "\x1b[1;32mOslo.\x1b[0m" in text  # bold green
    assert "\x1b[2mWhere?\x1b[0m" in text  # dim
    assert "\x1b[1;35m<|im_end|>\x1b[0m" in text  # a supervised special token
    assert "\x1b[2;35m<|im_end|>\x1b[0m" in text  # and one that is not


def test_styles_follow_the_labels_exactly():
    tokenizer = small_tokenizer()
    encoder = Encoder(tokenizer, template="chatml", max_length=99)
    turns = ({"role": "user", "content": "Where is é日?"}, {"role": "assistant", "content": "é日 in Oslo."})
    text = render_example(encoder.encode(Row(turns, None, "a.jsonl:1", "a")), tokenizer)
    bright = "".join(
        text.plain[span.start : span.end]
        for span in text.spans
        if "green" in str(span.style) or "bold" in str(span.style)
    )
    assert bright == "é日 in Oslo.<|im_end|>"


def test_data_cannot_steer_the_terminal():
    text = preview([HOSTILE], colour=False)
    assert "\x1b" not in text and "\u202e" not in text
    assert r"\x1b[31mred\x1b[0m [bold]not markup[/bold] \u202e↵" in text and "é日" in text


def test_truncation_and_lengths_are_shown():
    text = preview(["Oslo.", "Oslo. " * 9], colour=False, max_length=20)
    assert "a.jsonl:2: 20 tokens" in text and "tokens cut" in text
    assert "tokens per example: " in text


@pytest.mark.parametrize("width", [40, 80])
def test_the_bars_of_lengths_fit_into_the_terminal(width):
    text = preview(["Oslo. " * i for i in range(1, 30)], colour=False, max_length=600, width=width)
    bars = [line for line in text.splitlines() if "█" in line]
    assert len(bars) > 3 and all(line.rstrip()[-1].isdigit() for line in bars), bars


def test_histogram_counts_every_example():
    lines = render_histogram([3, 3, 5, 19], num_bins=4, width=4).splitlines()
    assert lines == [
        "tokens per example: 3 to 19, mean 8",
        " 0 to  4  ████ 2",
        " 5 to  9  ██   1",
        "10 to 14       0",
        "15 to 19  ██   1",
    ]
    assert render_histogram([]) == "no examples"
