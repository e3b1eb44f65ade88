"""Formats of training rows: one small pure function for each, from a row's fields to a conversation.

`detect` finds a row's format by its keys. Where several formats fit, it raises an error that lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from deftune._suggest import did_you_mean
from deftune.data.fields import (
    Fields,
    as_list,
    as_object,
    name_keys,
    name_type,
    read_field,
    read_medmcqa_options,
    read_pubmedqa_question,
    read_text,
)
from deftune.data.rows import Fault

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content")

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]] | None]
"""The messages, and the tools that were on offer."""


@dataclass(frozen=True)
class Format:
    """``keys``: sets of keys of which a row has at least one; ``sign``: a further test where formats share keys."""

    about: str
    keys: tuple[frozenset[str], ...]
    convert: Callable[[Fields], Conversation]
    sign: Callable[[Fields], bool] = lambda row: True


class Ambiguous(Fault):
    """A row that fits two formats. The user must name the format of the whole source, so the row is never skipped."""


# Conversations of a format -------------------------------------------------------------------------------------------


def _turns(user: str, assistant: str, system: str = "") -> Conversation:
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}], None


def _tools(row: Fields) -> list[dict[str, Any]] | None:
    """The row's ``tools``: a list, or a list written as a string, as the hub's tables hold it."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Fault("'tools' is not JSON", tools[:60]) from None
    if not tools:
        return None
    return [as_object(tool, "a tool") for tool in as_list(tools, "'tools'")]


# Formats -------------------------------------------------------------------------------------------------------------


def _system(row: Fields) -> list[Message]:
    """The row's ``system``, as the first message."""
    return [{"role": "system", "content": read_text(row, "system")}] if row.get("system") else []


def _messages(row: Fields) -> Conversation:
    system, messages = _system(row), as_list(read_field(row, "messages"), "'messages'")
    if system and messages[:1] == system:
        system = []
    if system and any(isinstance(m, dict) and cast("Message", m).get("role") == "system" for m in messages):
        raise Fault("two system prompts", "the field 'system' and a message differ", "remove one of them from the row")
    return [*system, *messages], _tools(row)


_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function": "tool",
    "tool": "tool",
    "observation": "tool",
}


def _sharegpt(row: Fields) -> Conversation:
    messages = _system(row)
    for index, turn in enumerate(as_list(read_field(row, "conversations"), "'conversations'")):
        turn = as_object(turn, "a turn", f"turn {index}")
        if "role" in turn and "from" not in turn:
            messages.append(turn)  # some files name it conversations and fill it with messages
            continue
        speaker = read_text(turn, "from")
        if speaker not in _SHAREGPT_ROLES:
            raise Fault(
                "unknown speaker", f"turn {index} is from {speaker[:40]!r}; known: {', '.join(_SHAREGPT_ROLES)}"
            )
        role = _SHAREGPT_ROLES[speaker]
        for key in ("weight", "train"):  # axolotl's; SlimOrca has weight 0 for questions and 1 for answers
            if role == "assistant" and turn.get(key) not in (None, 1):
                raise Fault(
                    "an answer that is not to be trained",
                    f"turn {index} has {key!r}: {str(turn[key])[:40]}",
                    "deftune trains every answer, with data.mask: completion the last; remove the key from the rows, "
                    "or pass --skip-bad-rows",
                )
        messages.append({"role": role, "content": read_text(turn, "value")})
    return messages, _tools(row)


def _prompt_completion(row: Fields) -> Conversation:
    prompt, completion = read_field(row, "prompt"), read_field(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [*_system(row), *_turns(prompt, completion)[0]], _tools(row)
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*cast("list[Message]", prompt), *cast("list[Message]", completion)], _tools(row)
    raise Fault(
        "prompt and completion are neither both text nor both messages",
        f"they are {name_type(prompt)} and {name_type(completion)}",
    )


def _alpaca(row: Fields) -> Conversation:
    history = _system(row)
    for pair in as_list(row.get("history") or [], "'history'"):
        if not isinstance(pair, list) or len(cast("list[Any]", pair)) != 2:
            raise Fault("'history' is not made of pairs", "each is [instruction, answer]")
        history += _turns(*cast("list[str]", pair))[0]
    given = read_text(row, "input") if row.get("input") else ""
    instruction = read_text(row, "instruction")
    messages, _ = _turns(f"{instruction}\n\n{given}" if given.strip() else instruction, read_text(row, "output"))
    return [*history, *messages], None


_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_GSM8K_END = re.compile(r"(?:^|\n)#### \S[^\n]*\s*$")


def _gsm8k(row: Fields) -> Conversation:
    """The calculator's annotations ``<<48/2=24>>`` are removed; the last line stays ``#### 72``."""
    return _turns(read_text(row, "question"), _ANNOTATION.sub("", read_text(row, "answer")))


def _is_gsm8k(row: Fields) -> bool:
    return isinstance(row["answer"], str) and bool(_GSM8K_END.search(row["answer"])) and not _is_medquad(row)


def _math(row: Fields) -> Conversation:
    return _turns(read_text(row, "problem"), read_text(row, "solution"))


def _verl(row: Fields) -> Conversation:
    extra = as_object(read_field(row, "extra_info"), "'extra_info'")
    return _turns(read_text(extra, "question"), read_text(extra, "answer"))


def _is_verl(row: Fields) -> bool:
    extra = row["extra_info"]
    return isinstance(extra, dict) and {"question", "answer"} <= cast("dict[str, Any]", extra).keys()


def _m23k(row: Fields) -> Conversation:
    """The distilled answer without the ``reasoning`` before it, as the paper trains it; ``prompt`` has the options."""
    return _turns(read_text(row, "prompt"), read_text(row, "distilled_answer_string", "answer_string"))


def _choices(question: str, options: Mapping[str, str], letter: str, explanation: str = "") -> Conversation:
    lines = [question.strip(), "", *(f"{name}. {text}" for name, text in options.items())]
    answer = f"Answer: {letter}. {options[letter]}"
    return _turns("\n".join(lines), f"{explanation.strip()}\n\n{answer}" if explanation.strip() else answer)


def _medmcqa(row: Fields, first: int = 0) -> Conversation:
    options = read_medmcqa_options(row)
    correct = read_field(row, "cop")
    if isinstance(correct, bool) or not isinstance(correct, int) or not first <= correct <= first + 3:
        other, span = ("medmcqa_1based", "1 to 4") if first == 0 else ("medmcqa", "0 to 3")
        raise Fault(
            "'cop' out of range",
            f"{str(correct)[:20]!r} is not in {first} to {first + 3}",
            f"format {other!r} counts from {span}; name it if the file counts so (the hub's test split has no answers)",
        )
    explanation = read_text(row, "exp") if row.get("exp") else ""
    return _choices(read_text(row, "question"), options, "ABCD"[correct - first], explanation)


def _medqa(row: Fields) -> Conversation:
    options = read_field(row, "options")
    if not isinstance(options, dict) or not all(isinstance(text, str) for text in cast("Fields", options).values()):
        raise Fault("'options' is not an object of texts", 'it looks like {"A": "...", "B": "..."}')
    options = cast("dict[str, str]", options)
    letter = read_text(row, "answer_idx", "label")
    if letter not in options:
        raise Fault("answer is no option", f"{letter[:20]!r} is not among {', '.join(options)}")
    return _choices(read_text(row, "question"), options, letter)


def _pubmedqa(row: Fields) -> Conversation:
    question = read_pubmedqa_question(row)
    answer = read_text(row, "LONG_ANSWER", "long_answer")
    decision = row.get("final_decision")  # the unlabelled part has none
    return _turns(question, f"{answer.strip()}\n\nAnswer: {decision}" if decision else answer)


def _medquad(row: Fields) -> Conversation:
    return _turns(read_text(row, "question"), read_text(row, "answer"))


def _is_medquad(row: Fields) -> bool:
    return bool({"qtype", "focus", "question_type", "question_focus"} & row.keys())


def _any(*keys: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in keys)


FORMATS: dict[str, Format] = {
    "messages": Format("chat messages with role and content, perhaps tools", _any("messages"), _messages),
    "sharegpt": Format("conversations of from (human, gpt, ...) and value", _any("conversations"), _sharegpt),
    "prompt_completion": Format(
        "prompt and completion: texts, or messages", _any("prompt completion"), _prompt_completion
    ),
    "alpaca": Format("instruction, input (may be empty), output", _any("instruction output"), _alpaca),
    "gsm8k": Format("question, answer ending in '#### N'", _any("question answer"), _gsm8k, _is_gsm8k),
    "math": Format("problem, solution", _any("problem solution"), _math),
    "numina": Format("NuminaMath-CoT: problem, solution, messages, source", _any("problem solution messages"), _math),
    "verl": Format("verl's Parquet: extra_info with question and answer", _any("extra_info"), _verl, _is_verl),
    "m23k": Format(
        "m23k: prompt, reasoning, distilled_answer_string (trained without the reasoning)",
        _any("prompt distilled_answer_string", "prompt answer_string"),
        _m23k,
    ),
    "medmcqa": Format(
        "MedMCQA on the hub: question, opa..opd, cop from 0 to 3, exp",
        _any("question opa opb opc opd cop"),
        _medmcqa,
        lambda row: row["cop"] == 0,  # 1, 2 and 3 are answers in both countings
    ),
    "medmcqa_1based": Format(
        "MedMCQA as its authors released it: cop from 1 to 4",
        _any("question opa opb opc opd cop"),
        lambda row: _medmcqa(row, first=1),
        lambda row: row["cop"] == 4,
    ),
    "medqa": Format(
        "question, options by letter, answer_idx (or label)",
        _any("question options answer_idx", "question options label"),
        _medqa,
    ),
    "pubmedqa": Format(
        "QUESTION, CONTEXTS, LONG_ANSWER, final_decision; or the hub's question, context, long_answer",
        _any("QUESTION CONTEXTS LONG_ANSWER", "question context long_answer"),
        _pubmedqa,
    ),
    "medquad": Format("question, answer, qtype, focus", _any("question answer"), _medquad, _is_medquad),
    "tulu3": Format("Tulu 3's mixture: id, messages, source", _any("id messages source"), _messages),
}


def detect(row: Fields) -> str:
    """The format that a row's keys name; a `Fault` if none does, `Ambiguous` if more than one could.

    >>> detect({"instruction": "Name a colour.", "input": "", "output": "Red."})
    'alpaca'
    """
    present = {key for key, value in row.items() if value is not None}  # a table's row has every column
    claims = {
        name: max((keys for keys in form.keys if keys <= present), key=len, default=frozenset[str]())
        for name, form in FORMATS.items()
    }
    claims = {name: keys for name, keys in claims.items() if keys}
    fits = {name: keys for name, keys in claims.items() if FORMATS[name].sign(row)}
    fits = {name: keys for name, keys in fits.items() if not any(keys < other for other in fits.values())}
    if len(fits) == 1:
        return next(iter(fits))
    could_be = fits or claims
    if len(could_be) > 1 and "options" not in present:  # a choice without its options would be another task
        raise Ambiguous(
            "format not clear",
            f"its keys: {name_keys(row)}; could be {' or '.join(could_be)}",
            f"name it, e.g. --format {next(iter(could_be))}, or name its fields: --fields prompt=...,completion=...",
        )
    for keys in (keys for form in FORMATS.values() for keys in form.keys if keys <= row.keys()):
        if null := next((key for key in row if key in keys and row[key] is None), None):
            raise Fault(f"{null!r} is null")
    raise Fault(
        "unknown format",
        f"its keys: {name_keys(row)}.{_nearest(row)} Known: {', '.join(FORMATS)}",
        "name it with --format, or name its fields: --fields prompt=...,completion=..., in a config "
        "fields: {prompt: ..., completion: ...}",
    )


def _nearest(row: Fields) -> str:
    """' Did you mean ...?': a misspelt key, or the format of which the fewest keys are missing."""
    known = {key for form in FORMATS.values() for keys in form.keys for key in keys}
    for key in row:
        if key not in known and (hint := did_you_mean(key, known, cutoff=0.75)):
            return f"{hint.removesuffix('?')} for {key!r}?"
    partly = [(name, keys) for name, form in FORMATS.items() for keys in form.keys if not keys <= row.keys()]
    name, keys = max(partly, key=lambda pair: len(pair[1] & row.keys()) / len(pair[1]))
    if 2 * len(keys & row.keys()) < len(keys):
        return ""
    return f" Did you mean {name}? It needs {', '.join(sorted(keys - row.keys()))} too."


def known_format(name: str) -> Format:
    """The format of this name, or an error that suggests one."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}.{did_you_mean(name, FORMATS)} Known: auto, {', '.join(FORMATS)}")
    return FORMATS[name]


# Conversations -------------------------------------------------------------------------------------------------------


def check_conversation(messages: list[Any]) -> tuple[Message, ...]:
    """The messages, their nulls left out; a `Fault` where they are no conversation that ends in an answer."""
    checked = [_check_message(index, message) for index, message in enumerate(messages)]
    roles = [message["role"] for message in checked]
    if not checked:
        raise Fault("no messages")
    if "assistant" not in roles:
        raise Fault("no assistant turn", f"roles: {_short(roles)}")
    if roles[-1] != "assistant":
        raise Fault("last turn is not the assistant's", f"roles: {_short(roles)}")
    return tuple(checked)


def _short(roles: list[str]) -> str:
    return ", ".join(roles if len(roles) <= 6 else ["...", *roles[-5:]])


def _check_message(index: int, message: object) -> Message:
    where = f"message {index}"
    message = {key: value for key, value in as_object(message, "message", where).items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        others = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
        meant = others.get(role) if isinstance(role, str) else None
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(role, ROLES)
        raise Fault(
            "unknown role" if role is not None else "no role",
            f"{where}: {str(role)[:40]!r}.{hint} Known: {', '.join(ROLES)}",
        )
    unknown = [key for key in message if key not in MESSAGE_KEYS]
    if unknown:
        raise Fault(
            "unknown key in a message",
            f"{where}: {str(unknown[0])[:40]!r}; known: {', '.join(MESSAGE_KEYS)}",
            "it would be ignored: remove it from the rows, or pass --skip-bad-rows",
        )
    match message.get("content"):
        case [{"type": "text", "text": str(text), **rest}] if not any(rest.values()):  # as chat servers take it
            message = {**message, "content": text}
        case _:
            pass
    content, calls = message.get("content"), message.get("tool_calls")
    for key in ("content", "name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            hint = "; of a list of parts only a single text is read" if isinstance(message[key], list) else ""
            raise Fault(f"{key} is not text", f"{where} ({role}): it is {name_type(message[key])}{hint}")
        if "\0" in message.get(key, ""):  # JSON files are refused before; Parquet and the hub can hold it
            raise Fault("NUL character", f"{where} ({role}): in {key}")
    if calls is not None:
        message = {**message, "tool_calls": _checked_calls(where, role, calls)}
    if role == "assistant" and not (content and content.strip()) and not calls:
        raise Fault("empty assistant turn", where)
    if role == "user" and not (content and content.strip()):
        raise Fault("empty user turn", where)
    if content is None and not calls:
        raise Fault("no content", f"{where} ({role})")
    return message if content is not None else {**message, "content": None}


def _checked_calls(where: str, role: str, calls: object) -> list[Fields]:
    """The calls, with arguments as objects: OpenAI writes an object as text, which templates would quote once more."""
    if role != "assistant":
        raise Fault("tool_calls outside an assistant turn", f"{where} ({role})")
    checked: list[Fields] = []
    for call in as_list(calls, "tool_calls"):
        function = cast("Fields", call).get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(cast("Fields", function).get("name"), str):
            shape = '{"function": {"name": ..., "arguments": ...}}'
            raise Fault("tool call without a function's name", f"{where}: a call looks like {shape}")
        arguments = cast("Fields", function).get("arguments", "")
        if not isinstance(arguments, (str, dict)):
            raise Fault("tool call's arguments are neither text nor object", where)
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise Fault("tool call's arguments are not JSON", f"{where}: {arguments[:60]!r}") from None
            call = {**cast("Fields", call), "function": {**cast("Fields", function), "arguments": arguments}}
        checked.append(cast("Fields", call))
    return checked
