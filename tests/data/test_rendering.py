"""Chat templates with limits: what transformers renders, and an error for one that never ends or fills the memory."""

from __future__ import annotations

import copy
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from small_tokenizer import small_tokenizer

from deftune.artifacts.templates import TEMPLATES
from deftune.data.encoding import Encoder, EncodingError
from deftune.data.rendering import Template
from deftune.data.rows import BadRows, Row
from deftune.data.sandbox import BASE_CHARACTERS, TemplateLimitError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
    {"role": "user", "content": " é日 <b>\n"},
    {"role": "assistant", "content": "Yes."},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALLED = [
    {"role": "user", "content": "2 + 2"},
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "4", "tool_call_id": "abcdefghi", "name": "add"},
    {"role": "assistant", "content": "4"},
]  # fmt: skip


@cache
def templates() -> dict[str, str]:
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else None
    files = sorted(folder.glob("*.jinja")) if folder and folder.is_dir() else []
    return {**TEMPLATES, **{file.stem: file.read_text(encoding="utf-8") for file in files}}


unchanged_tokenizer = cache(small_tokenizer)
compiled = cache(Template)


@pytest.mark.parametrize("name", templates())
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(name: str, prompt: bool):
    text, tokenizer = templates()[name], unchanged_tokenizer()
    for chat, tools in ((CHAT, None), (CHAT[1:2], None), (CALLED, [TOOL]), (CHAT[1:], [TOOL])):
        chat = chat[:-1] if prompt and len(chat) > 1 else chat
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
        try:
            expected = transformers_text(tokenizer, text, chat, **options)
        except Exception as error:
            with pytest.raises(type(error)):
                render(text, chat, tokenizer, **options)
        else:
            assert render(text, chat, tokenizer, **options) == expected


def transformers_text(tokenizer: Any, text: str, chat: list[dict[str, Any]], **options: Any) -> str:
    """As transformers renders it, without keys that have no value (5.23 leaves them out by itself).

    A template that joins the arguments of a call to text fails on an object; it gets text here.
    """
    chat = [{key: value for key, value in message.items() if value is not None} for message in chat]
    options |= {"chat_template": text, "tokenize": False, "enable_thinking": False}
    try:
        return tokenizer.apply_chat_template(chat, **options)
    except TypeError:
        chat = copy.deepcopy(chat)
        for function in (call["function"] for message in chat for call in message.get("tool_calls", ())):
            function["arguments"] = json.dumps(function["arguments"])
        return tokenizer.apply_chat_template(chat, **options)


def render(text: str, chat: list[dict[str, Any]], tokenizer: Any, **options: Any) -> str:
    return compiled(text).render(chat, variables={**tokenizer.special_tokens_map, "enable_thinking": False}, **options)


def doubling(step: str) -> str:
    return f"{{% set ns = namespace(s='aaaa') %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.s }}}}"


NESTED = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops that pass over": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "repetition": "{{ 'a' * 3000000000 }}",
    "repetition, reversed": "{% set x = 3000000000 * 'a' %}",
    "repeated list": "{% set x = [1] * 3000000000 %}",
    "doubling +": doubling("{% set ns.s = ns.s + ns.s %}"),
    "doubling ~": doubling("{% set ns.s = ns.s ~ ns.s %}"),
    "doubling %": doubling("{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "doubling format": doubling("{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    "doubling replace": doubling("{% set ns.s = ns.s.replace('a', ns.s) %}"),
    "doubling block": doubling("{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
    "a list in itself, written": NESTED + "{{ ns.s }}",
    "a list in itself, as JSON": NESTED + "{{ ns.s | tojson }}",
    "a list in itself, compared": NESTED + "{% if ns.s == [ns.s] %}{% endif %}",
    "join": "{{ (['a' * 1000000] * 100000) | join }}",
    "str.join": "{{ ('a' * 1000000).join(range(99999) | map('string') | list) }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "center by map": "{{ ['a'] | map('center', 3000000000) | list | length }}",
    "str.ljust": "{{ 'a'.ljust(3000000000) | length }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) | length }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000) }}",
    "% width": "{{ '%03000000000d' % 1 }}",
    "% width as a value": "{{ '%*d' % (3000000000, 1) }}",
    "format filter": "{{ '%03000000000d' | format(1) }}",
    "str.format width": "{{ '{:3000000000}'.format(1) }}",
    "str.format width as a value": "{{ '{:{}}'.format(1, 3000000000) }}",
    "power": "{{ 10 ** 10000000 }}",
    "squares": "{% set ns = namespace(s=10) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "JSON indent": "{{ [1, 2] | tojson(indent=2000000000) }}",
    "searches": "{% set s = 'ab' * 4000000 %}{% for x in range(99999) %}{% if 'ac' in s %}{% endif %}{% endfor %}",
    "slices": "{% set s = 'ab' * 4000000 %}{% for x in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "batch": "{{ [1] | batch(2000000000, 1) | list | length }}",
    "its own account": "{% for a in range(99999) %}{{ [-100000000] | map('_written') | list | length }}{% endfor %}",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "macros" else name for name in BOMBS]
)
def test_a_template_without_end_or_measure_is_stopped(name: str):
    with pytest.raises(TemplateLimitError, match=r"more than [\d,]+ (loop rounds|characters|bits)|width of more|bits"):
        Template(BOMBS[name]).render(CHAT)


def test_a_stopped_template_names_itself_and_is_no_bad_row():
    """Every other row would stop it too: skipping bad rows would try them all."""
    row = Row(({"role": "user", "content": "x" * 28},), None, "train.jsonl:7", "train.jsonl")
    encoder = Encoder(small_tokenizer("{{ 'a' * 3000000000 }}"), max_length=99)
    with pytest.raises(TemplateLimitError) as raised:
        encoder.encode(row)
    limit = BASE_CHARACTERS + 64 * (28 + len("userrolecontent"))
    limit = BASE_CHARACTERS + 64 * (28 + len("userrolecontent"))
    assert str(raised.value) == (
        f"train.jsonl:7: the chat template was stopped: it makes more than {limit:,} characters of "
        f"text, which no conversation needs; it is broken or hostile: set data.template to another"
    )
    assert not isinstance(raised.value, EncodingError) and not BadRows(skip=True).rows


def test_long_conversations_have_an_allowance_to_match():
    chat = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(1000)]
    quadratic = "{% for a in messages %}{% for b in messages %}{% if a.content == b.content %}{% endif %}{% endfor %}"
    assert Template(quadratic + "{{ a.content }}{% endfor %}").render(chat) == "word " * 200_000
    large = [{"role": "user", "content": "é" * 5_000_000}]
    assert len(Template(TEMPLATES["chatml"]).render(large)) > 5_000_000


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_a=1) %}",
        "{{ dict.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''|urlize }}",
        "{% include 'x' %}",
    ],
)
def test_the_sandbox_is_closed(text: str):
    with pytest.raises((jinja2.TemplateError, TypeError)):
        Template(text).render(CHAT)


def test_objects_reach_a_template_as_plain_values():
    class Odd:
        def dangerous(self) -> str:
            return "called"

    text = Template("{{ messages[0].content }}{{ messages[0].odd }}").render([{"content": "a", "odd": Odd()}])
    assert text == "a<Odd>"
