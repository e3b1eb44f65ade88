"""Tool calls in real chat templates: calls and answers are supervised with their end tokens, results are not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from small_tokenizer import small_tokenizer
from test_encoding import runs, trl_template

from deftune.data.encoding import Encoder, EncodingError, encode_rows
from deftune.data.preview import render_preview
from deftune.data.rendering import Template
from deftune.data.rows import Row
from deftune.data.sources import read_rows

TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "?"}},
                       "required": ["city"]},
    },
}]  # fmt: skip


def call(number: int, city: str) -> dict:
    """As OpenAI writes it: the arguments are text."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def messages() -> list[dict]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, "Oslo")]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "-3 degrees"},
        {"role": "assistant", "content": "It is cold."},
        {"role": "user", "content": "And Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call(2, "Rome")]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call00002", "content": "21 degrees"},
        {"role": "assistant", "content": "It is warm."},
    ]


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"messages": messages(), "tools": TOOLS}) + "\n", encoding="utf-8")
    return read_rows(path)


# template -> (how it writes a call, what stands before an answer, the ends of a call, an answer and the last answer)
REAL = {
    "qwen2_5": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "CITY"}}\n</tool_call>', "", ["<|im_end|>"] * 3
    ),
    "llama3_1": ('{"name": "get_weather", "parameters": {"city": "CITY"}}', "", ["<|eot_id|>"] * 3),
    "gptoss": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "CITY"}',
        "<|channel|>final<|message|>", ["<|call|>", "<|end|>", "<|return|>"],
    ),
    "lfm2_v2": ("<|tool_call_start|>[get_weather(city='CITY')]<|tool_call_end|>", "", ["<|im_end|>"] * 3),
    "qwen3_instruct_2507": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "CITY"}}\n</tool_call>', "", ["<|im_end|>"] * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_calls_are_supervised_and_results_are_not(name: str, rows: list[Row]):
    tokenizer = small_tokenizer(trl_template(name))
    encoder = Encoder(tokenizer, max_length=4096)
    example = encoder.encode(rows[0])
    written, before, (after_call, after_answer, after_last) = REAL[name]
    assert runs(example, tokenizer) == [
        written.replace("CITY", "Oslo") + after_call,
        f"{before}It is cold.{after_answer}",
        written.replace("CITY", "Rome") + after_call,
        f"{before}It is warm.{after_last}",
    ]
    text = tokenizer.decode(example.input_ids)
    assert "-3 degrees" in text and "21 degrees" in text and "The weather of a city." in text  # seen, not learnt


@pytest.mark.parametrize("name", REAL)
def test_the_last_answer_alone(name: str, rows: list[Row]):
    tokenizer = small_tokenizer(trl_template(name))
    _, before, ends = REAL[name]
    example = Encoder(tokenizer, max_length=4096, mask="completion").encode(rows[0])
    assert runs(example, tokenizer) == [f"{before}It is warm.{ends[2]}"]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gptoss"])
def test_the_preview_shows_calls_inside_the_marks(name: str, rows: list[Row]):
    tokenizer = small_tokenizer(trl_template(name))
    console = Console(file=io.StringIO(), width=20_000, no_color=True, color_system=None)
    render_preview(encode_rows(rows, Encoder(tokenizer, max_length=4096)), tokenizer, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    inside = [part.split("⟧")[0].replace("↵\n", "\n") for part in text.split("⟦")[1:] if "⟧" in part]
    written, before, ends = REAL[name]
    assert written.replace("CITY", "Oslo") + ends[0] in inside and f"{before}It is warm.{ends[2]}" in inside
    assert not any("degrees" in part for part in inside) and "degrees" in text
    assert "EOS supervised in 100%" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", "the template leaves out the tool 'get_weather'"),
        ("phi3", "the template leaves out the tool 'get_weather'"),
        ("lfm2", r"the template leaves out 'get_weather' of turn 2 \(assistant\)"),
        ("gemma3", "the chat template fails on these messages"),
    ],
)
def test_templates_that_ignore_tools_are_refused(name: str, text: str, rows: list[Row]):
    with pytest.raises(EncodingError, match=text):
        Encoder(small_tokenizer(trl_template(name)), max_length=4096).encode(rows[0])


def test_arguments_may_be_text_or_an_object(tmp_path: Path, rows: list[Row]):
    """Text would be quoted once more by templates that write JSON: the model would learn a string, not an object."""
    objects = messages()
    for message in objects:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    path = tmp_path / "objects.jsonl"
    path.write_text(json.dumps({"messages": objects, "tools": TOOLS}) + "\n", encoding="utf-8")
    assert read_rows(path)[0].messages == rows[0].messages
    objects[2]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    path.write_text(json.dumps({"messages": objects, "tools": TOOLS}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"objects\.jsonl:1: tool call's arguments are not JSON \(.*'\{\"city\": '"):
        read_rows(path)


def test_a_template_that_joins_arguments_to_text_gets_text(rows: list[Row]):
    """As DeepSeek's templates do; an object would be a TypeError."""
    text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}{% endfor %}"
    calls = [call for message in rows[0].messages for call in message.get("tool_calls", ())]
    written = "".join(f"<{json.dumps(call['function']['arguments'])}>" for call in calls)
    assert calls and Template(text + "{% endfor %}").render(rows[0].messages) == written
    with pytest.raises(TypeError):  # no call is the cause
        Template("{{ 'a' + 1 }}").render(rows[0].messages[:1])
