"""Chat templates: the tokenizer's own, one of `TEMPLATES`, or a .jinja file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deftune._suggest import did_you_mean

# For base models that come without a template. Neither writes BOS: the encoder knows whether the tokenizer adds one.
TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # The prompt ends in a colon, not in a space: the answer's first token then carries the space, as in running text.
    "plain": (
        "{% for message in messages %}"
        "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
        "{% if message['role'] == 'system' %}{{ (message['content'] or '') | trim }}"
        "{% elif message['role'] == 'user' %}{{ 'User: ' + (message['content'] or '') | trim }}"
        "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + (message['content'] or '') | trim + eos_token }}"
        "{% else %}{{ raise_exception('the plain template has no role ' + message['role']) }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
    ),
}


def set_template(tokenizer: Any, name: str | None) -> None:
    """Store the template in the tokenizer, so that prompts are later written as in training."""
    template, own = resolve_template(tokenizer, name), tokenizer.chat_template
    tokenizer.chat_template = {**own, "default": template} if isinstance(own, dict) else template


def resolve_template(tokenizer: Any, name: str | None) -> str:
    """The Jinja text of a template.

    Args:
        tokenizer: a transformers tokenizer.
        name: one of `TEMPLATES`, one of the tokenizer's own where it has several, or the path of a .jinja file; None is
            the tokenizer's default.

    Raises:
        ValueError: there is no such template.
    """
    own: str | dict[str, str] | None = tokenizer.chat_template
    choices = sorted({*TEMPLATES, *(own if isinstance(own, dict) else ())})
    choose = f"set data.template (--template) to one of {', '.join(choices)} or a path to a .jinja file"
    if name is None:
        template = own.get("default") if isinstance(own, dict) else own
        if template:
            return template
        lacks = "several chat templates and no default" if own else "no chat template"
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path or 'the model'} has {lacks}; {choose}")
    if isinstance(own, dict) and name in own:
        return own[name]
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not name.endswith(".jinja"):
        raise ValueError(f"unknown template {name!r}.{did_you_mean(name, choices)} {choose[0].upper()}{choose[1:]}")
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"data.template: cannot read {name}: {reason}; {choose}") from error
