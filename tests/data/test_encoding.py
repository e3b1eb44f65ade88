"""The supervision mask of real chat templates: the exact text that is supervised, or the error."""

from __future__ import annotations

import importlib.util
import json
import pickle
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import SPECIAL, TEXT, small_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from deftune.artifacts.templates import TEMPLATES, resolve_template
from deftune.data.encoding import IGNORE_INDEX, Encoded, Encoder, EncodingError, Places, encode_rows, end_tokens_of
from deftune.data.rows import BadRows, Row

CHATML = TEMPLATES["chatml"]
U1, A1, U2, A2 = "What is the capital of France?", "The capital is Paris.", "And of Norway?", "Oslo."


def row(*turns: tuple[str, Any] | dict[str, Any], tools: Any = None, where: str = "train.jsonl:1") -> Row:
    messages = tuple(turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns)
    return Row(messages=messages, tools=tools, where=where, source="train.jsonl")


def runs(example: Encoded, tokenizer: Any) -> list[str]:
    """Each uninterrupted run of supervised tokens, decoded."""
    pairs = groupby(zip(example.input_ids, example.labels), key=lambda pair: pair[1] != IGNORE_INDEX)
    return [tokenizer.decode([token for token, _ in run]) for supervised, run in pairs if supervised]


def encode(tokenizer: Any, of: Row, mask: Any = "assistant", max_length: int = 4096, **options: Any) -> Encoded:
    example = Encoder(tokenizer, mask=mask, max_length=max_length, **options).encode(of)
    assert len(example.input_ids) == len(example.labels)
    assert all(label in (IGNORE_INDEX, token) for token, label in zip(example.input_ids, example.labels))
    return example


# --- real templates, as the installed trl carries them; none is rendered with its {% generation %} marks in use


def trl_template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs trl, for its collection of chat templates")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


REWRITES = "rewrites this turn once others follow"
MISMATCH = "so no answer can follow its prompt"
NO_END = "no end-of-turn token after"
BLOCKS = {"idefics3", "smolvlm", "llava_next"}  # take content as a list of blocks only


def ended(end: str, before: str = "") -> tuple[list[str], list[str]]:
    return [f"{before}{A1}{end}", f"{before}{A2}{end}"], [f"{before}{A2}{end}"]


# name -> what mask=assistant supervises of two turns, what mask=completion does; a str is part of the error
EXPECTED: dict[str, tuple[list[str] | str, list[str] | str]] = {
    "cohere": ended("<|END_OF_TURN_TOKEN|>"),
    "cohere2": ended("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    # the prompt opens <think>, which a finished turn never has: answers would be trained after another prompt
    "deepseek_r1_distill": (MISMATCH, MISMATCH),
    "deepseekv3": (MISMATCH, MISMATCH),
    "diffusion_gemma": ended("<turn|>"),
    "gemma": ended("<end_of_turn>"),
    "gemma3": ended("<end_of_turn>"),
    "gemma4": ended("<turn|>"),
    "gemma4_v2": ended("<turn|>"),
    "gemma4_v3": ended("<turn|>"),
    "gemma4_v4": ended("<turn|>"),
    "gemma4_v5": ended("<turn|>"),
    # no end of turn at all: the next turn's header ends it; after the last we append EOS
    "glm4moe": (NO_END, [f"\n<think></think>\n{A2}</s>"]),
    "gptoss": (
        [f"<|channel|>final<|message|>{A1}<|end|>", f"<|channel|>final<|message|>{A2}<|return|>"],
        [f"<|channel|>final<|message|>{A2}<|return|>"],
    ),
    "idefics3": ended("<end_of_utterance>", " "),
    "lfm2": ended("<|im_end|>"),
    "lfm2_2_5": ended("<|im_end|>"),
    "lfm2_2_5_v2": ended("<|im_end|>"),
    "lfm2_2_5_vl": ended("<|im_end|>"),
    "lfm2_v2": ended("<|im_end|>"),
    "llama3": ended("<|eot_id|>"),
    "llama3_1": ended("<|eot_id|>"),
    "llama3_2": ended("<|eot_id|>"),
    "llava_next": ended("</s>", " "),
    "muse_glimmer": ended("<|eot|>", " to=user<|message|>"),
    # the prompt opens "<think>\n", a turn without reasoning begins "<think></think>"; see test_template_options
    "nemotron_3_5_lightning": (MISMATCH, MISMATCH),
    "nemotron_3_nano": (MISMATCH, MISMATCH),
    "nemotron_3_super": (MISMATCH, MISMATCH),
    "nemotron_3_ultra": (MISMATCH, MISMATCH),
    "phi3": ended("<|end|>"),
    "phi3_5": ended("<|end|>"),
    "qwen2_5": ended("<|im_end|>"),
    "qwen2_5_vl": ended("<|im_end|>"),
    # the last turn has an empty <think> block, earlier ones lose it
    "qwen3": (REWRITES, [f"<think>\n\n</think>\n\n{A2}<|im_end|>"]),
    "qwen3_5_nothink": (REWRITES, [f"{A2}<|im_end|>"]),
    # the prompt ends in "<think>\n" and the turn goes on with "\n": one token, which straddles
    "qwen3_5_think": (REWRITES, [f"</think>\n\n{A2}<|im_end|>"]),
    "qwen3_6": (REWRITES, [f"</think>\n\n{A2}<|im_end|>"]),
    "qwen3_8": ended("<|im_end|>", "</think>\n\n"),
    "qwen3_instruct_2507": ended("<|im_end|>"),
    "qwen3_vl": ended("<|im_end|>"),
    "smolvlm": ended("<end_of_utterance>", " "),
}
STRADDLED = {"qwen3_5_think", "qwen3_6", "qwen3_8"}
FAMILIES = (
    "cohere gemma gemma4 gptoss idefics3 lfm2 llama3 llava_next muse_glimmer phi3 qwen2_5 qwen3_8 smolvlm cohere2"
).split()


def two_turns(name: str) -> Row:
    texts = [[{"type": "text", "text": text}] if name in BLOCKS else text for text in (U1, A1, U2, A2)]
    return row(*zip(["user", "assistant"] * 2, texts))


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("mask", ["assistant", "completion"])
def test_real_templates(name: str, mask: str):
    tokenizer = small_tokenizer(trl_template(name))
    expected = EXPECTED[name][mask == "completion"]
    if isinstance(expected, str):
        with pytest.raises(EncodingError, match=f"^train.jsonl:1: turn .*{expected}"):
            encode(tokenizer, two_turns(name), mask)
        return
    encoder = Encoder(tokenizer, mask=mask, max_length=4096)  # type: ignore[arg-type]
    example = encoder.encode(two_turns(name))
    assert runs(example, tokenizer) == expected
    assert example.straddled == (len(expected) if name in STRADDLED else 0)
    assert [label for label in example.labels if label != IGNORE_INDEX][-1] in encoder.end_ids.values()


def test_every_template_of_trl_is_in_the_table():
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs trl, for its collection of chat templates")
    names = {path.stem for path in (Path(found.origin).parent / "chat_templates").glob("*.jinja")}
    assert set(EXPECTED) <= names
    assert sum(not isinstance(EXPECTED[name][0], str) for name in FAMILIES) >= 12


# what trl's {% generation %} twin supervises besides: the prompt's end, which the model is given, and what follows the
# end of turn, which it never has to write
TWINS: dict[str, tuple[str, list[str]]] = {
    "cohere": ("", ["", ""]),
    "cohere2": ("", ["", ""]),
    "gemma": ("", ["\n", "\n"]),
    "gemma3": ("", ["\n", "\n"]),
    "gptoss": ("<|start|>assistant", ["", ""]),
    "idefics3": ("", ["\n", "\n"]),
    "lfm2": ("", ["\n", "\n"]),
    "lfm2_v2": ("", ["\n", "\n"]),
    "llama3": ("", ["", ""]),
    "llava_next": ("", ["", ""]),
    "muse_glimmer": ("<|start|>assistant", ["", ""]),
    "phi3": ("", ["\n", "\n</s>"]),
    "phi3_5": ("", ["\n", "\n</s>"]),
    "qwen2_5": ("\n", ["\n", "\n"]),
    "qwen2_5_vl": ("", ["\n", "\n"]),
    "qwen3": ("", ["\n", "\n"]),
    "qwen3_instruct_2507": ("", ["\n", "\n"]),
    "qwen3_vl": ("", ["\n", "\n"]),
    "smolvlm": ("", ["\n", "\n"]),
}


@pytest.mark.parametrize("name", TWINS)
def test_same_mask_as_generation_marks(name: str):
    twin = trl_template(f"{name}_training")
    # qwen3's twin also renders differently, so the twin itself is encoded; of the others, the model's own template
    tokenizer = small_tokenizer(twin if name == "qwen3" else trl_template(name))
    example = encode(tokenizer, two_turns(name))
    theirs = tokenizer.apply_chat_template(
        list(two_turns(name).messages), chat_template=twin, return_assistant_tokens_mask=True, return_dict=True
    )
    assert theirs["input_ids"] == example.input_ids
    labels = [i if kept else IGNORE_INDEX for i, kept in zip(theirs["input_ids"], theirs["assistant_masks"])]
    before, after = TWINS[name]
    want = [f"{before}{text}{end}" for text, end in zip(runs(example, tokenizer), after)]
    assert runs(Encoded(theirs["input_ids"], labels, "", ""), tokenizer) == want


def test_template_options_reach_the_template():
    tokenizer = small_tokenizer(trl_template("nemotron_3_nano"))
    example = encode(tokenizer, two_turns(""), template_options={"enable_thinking": False})
    assert runs(example, tokenizer) == [f"{A1}<|im_end|>", f"{A2}<|im_end|>"]
    thinking = row(("user", U1), {"role": "assistant", "content": A1, "reasoning_content": "Easy."})
    assert runs(encode(tokenizer, thinking), tokenizer) == [f"Easy.\n</think>\n{A1}<|im_end|>"]


def test_end_tokens_are_those_of_the_tokenizer_and_of_the_template():
    """Not a token that only looks like one: Gemma's vocabulary has "</s>" as the HTML tag of struck text."""

    ids = {"<eos>": 1, "</s>": 2, "<|im_end|>": 3, "<|endoftext|>": 4, "<tool>": 5}
    special = ("<eos>", "<|endoftext|>")
    tokenizer = SimpleNamespace(
        chat_template="{{ '<|im_end|>' }}", eos_token="<eos>", eos_token_id=1, get_added_vocab=lambda: dict(ids),
        added_tokens_decoder={i: AddedToken(text, special=text in special) for text, i in ids.items()},
    )  # fmt: skip
    assert end_tokens_of(tokenizer) == {"<eos>": 1, "<|im_end|>": 3, "<|endoftext|>": 4}
    assert end_tokens_of(tokenizer, "plain text") == {"<eos>": 1, "<|endoftext|>": 4}
    assert end_tokens_of(tokenizer, declared=["<tool>"])["<tool>"] == 5


def test_a_declared_end_token_may_be_the_next_header():
    tokenizer = small_tokenizer(trl_template("glm4moe"))
    example = encode(tokenizer, two_turns(""), end_tokens=["<|user|>"])
    assert runs(example, tokenizer) == [f"\n<think></think>\n{A1}<|user|>", f"\n<think></think>\n{A2}</s>"]
    with pytest.raises(ValueError, match=r"end_tokens: '<\|fin\|>' is not a token of its own"):
        Encoder(tokenizer, max_length=8, end_tokens=["<|fin|>"])


def test_reasoning_in_the_last_turn_is_supervised():
    tokenizer = small_tokenizer(trl_template("qwen3"))
    think = f"<think>\nNorway, so Oslo.\n</think>\n\n{A2}"
    example = encode(tokenizer, row(("user", U1), ("assistant", A1), ("user", U2), ("assistant", think)), "completion")
    assert runs(example, tokenizer) == [f"{think}<|im_end|>"]


def test_reasoning_that_a_later_turn_erases_is_an_error():
    tokenizer = small_tokenizer(trl_template("qwen3"))
    think = f"<think>\nFrance.\n</think>\n\n{A1}"
    with pytest.raises(EncodingError, match=r"turn 1: the template rewrites.*use mask=completion"):
        encode(tokenizer, row(("user", U1), ("assistant", think), ("user", U2), ("assistant", A2)))


def test_reasoning_that_is_only_context_may_be_left_out():
    tokenizer = small_tokenizer(trl_template("qwen3"))
    turns = row(("user", U1), ("assistant", f"<think>\nFrance.\n</think>\n\n{A1}"), ("user", U2), ("assistant", A2))
    example = encode(tokenizer, turns, "completion")
    assert "France.\n" not in tokenizer.decode(example.input_ids)
    assert runs(example, tokenizer) == [f"<think>\n\n</think>\n\n{A2}<|im_end|>"]


def test_reasoning_that_the_template_never_writes_is_an_error():
    tokenizer = small_tokenizer(trl_template("qwen2_5"))
    thinking = {"role": "assistant", "content": A1, "reasoning_content": "Easy, it is Paris."}
    with pytest.raises(EncodingError, match=r"leaves out 'Easy, it is Paris.' of turn 1 \(assistant\)"):
        encode(tokenizer, row(("user", U1), thinking))


def test_a_default_system_prompt_is_context():
    tokenizer = small_tokenizer(trl_template("qwen2_5"))
    example = encode(tokenizer, row(("user", U1), ("assistant", A1)))
    assert tokenizer.decode(example.input_ids).startswith("<|im_start|>system\nYou are Qwen")
    assert runs(example, tokenizer) == [f"{A1}<|im_end|>"]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            [("system", "Be brief."), ("user", U1), ("assistant", A1)],
            r"\(roles: system, user, assistant\): System role",
        ),
        ([("user", U1), ("user", U2), ("assistant", A1)], "Conversation roles must alternate"),
        ([("assistant", A1)], "Conversation roles must alternate"),
    ],
)
def test_a_template_that_raises_names_the_row(turns: list[tuple[str, str]], message: str):
    with pytest.raises(EncodingError, match=f"^train.jsonl:1: the chat template fails on these messages .*{message}"):
        encode(small_tokenizer(trl_template("gemma")), row(*turns))


def test_a_conversation_that_begins_with_the_assistant_is_an_error():
    with pytest.raises(EncodingError, match=r"\(roles: none\)"):
        encode(small_tokenizer(CHATML), row(("assistant", A1)))


# --- tools

WEATHER = ({"type": "function", "function": {"name": "get_weather", "description": "?", "parameters": {}}},)
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
TOOL_TURNS = (
    ("user", "Weather in Oslo?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ("tool", "-3 degrees"),
    ("assistant", "It is -3."),
)


def test_tool_calls_are_supervised_and_results_are_not():
    tokenizer = small_tokenizer(trl_template("qwen2_5"))
    example = encode(tokenizer, row(*TOOL_TURNS, tools=WEATHER))
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    text = tokenizer.decode(example.input_ids)
    assert "-3 degrees" in text and '"description": "?"' in text  # the result, and what the tool is
    assert [text.strip("\n") for text in runs(example, tokenizer)] == [call, "It is -3.<|im_end|>"]


def test_tool_calls_in_channels():
    tokenizer = small_tokenizer(trl_template("gptoss"))
    example = encode(tokenizer, row(*TOOL_TURNS, tools=WEATHER))
    call, answer = runs(example, tokenizer)
    assert call == ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    assert answer == "<|channel|>final<|message|>It is -3.<|return|>"


@pytest.mark.parametrize("name", ["llama3", "lfm2"])
def test_a_template_that_drops_tool_calls_is_an_error(name: str):
    with pytest.raises(EncodingError, match="the template leaves out 'get_weather' of turn 1"):
        encode(small_tokenizer(trl_template(name)), row(*TOOL_TURNS))


def test_a_template_that_drops_the_tools_is_an_error():
    with pytest.raises(EncodingError, match="the template leaves out the tool 'get_weather'"):
        encode(small_tokenizer(CHATML), row(("user", U1), ("assistant", A1), tools=WEATHER))


def test_a_template_that_drops_text_is_an_error():
    # idefics takes blocks; of a plain string it writes nothing, and says nothing
    with pytest.raises(EncodingError, match=r"leaves out 'What is the capital of France.' of turn 0"):
        encode(small_tokenizer(trl_template("idefics3")), row(("user", U1), ("assistant", A1)))


def test_an_answer_must_be_in_its_own_turn():
    # the template writes the user only; that the answer's text is in the question proves nothing
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    with pytest.raises(EncodingError, match=r"leaves out 'Paris' of turn 1 \(assistant\)"):
        encode(small_tokenizer(template), row(("user", "Paris, you say?"), ("assistant", "Paris")))


# --- boundaries


def sentencepiece_like() -> Any:
    """As Llama 2's: a space before every piece of text, no pre-tokenizer, bytes where a character is unknown."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, special_tokens=["<unk>", *byte_tokens])
    bpe.train_from_iterator(TEXT * 4, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("answer", [A1, "日é ∑ x"])
def test_sentencepiece_boundaries(answer: str):
    tokenizer = sentencepiece_like()
    example = encode(tokenizer, row(("user", U1), ("assistant", answer)), template="chatml")
    assert (runs(example, tokenizer), example.straddled) == ([f"{answer}<|im_end|>"], 0)


def test_straddling_token_is_counted_and_not_supervised():
    template = "{{ messages[0].content }} {% if messages | length > 1 %}{{ messages[1].content }}</s>{% endif %}"
    for trim_offsets in (False, True):  # GPT-2 style offsets hide the space that a token begins with
        tokenizer = small_tokenizer(template, trim_offsets=trim_offsets)
        example = encode(tokenizer, row(("user", "The capital of France is"), ("assistant", "Paris.")))
        assert example.straddled == 1
        assert runs(example, tokenizer) == [".</s>"]


def test_an_answer_without_a_token_of_its_own_is_an_error():
    # an EOS that is no special token: BPE merges it, the answer and the prompt's last space into " Paris"
    template = "{{ messages[0].content }} {% if messages | length > 1 %}{{ messages[1].content }}{% endif %}"
    tokenizer = small_tokenizer(template, eos_token="is")
    with pytest.raises(EncodingError, match=r"'Paris' should be supervised up to its .* its tokens end in no token"):
        encode(tokenizer, row(("user", "The capital of France"), ("assistant", "Par")))


def test_no_end_anywhere_is_an_error():
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.raises(EncodingError, match=r"the tokenizer has no EOS; set tokenizer.eos_token"):
        encode(small_tokenizer(template, eos_token=None), row(("user", U1), ("assistant", A1)))


def test_tokens_that_swallow_whitespace():
    # Phi 3's own: <|assistant|> and <|end|> take the newline after them, and with it the answer's leading space
    tokenizer = small_tokenizer(trl_template("phi3"))
    for token in ("<|assistant|>", "<|end|>"):
        tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, rstrip=True, special=True)]})
    assert runs(encode(tokenizer, row(("user", U1), ("assistant", A1))), tokenizer) == [f"{A1}<|end|>"]
    example = encode(tokenizer, row(("user", U1), ("assistant", f"  {A1}")))
    assert runs(example, tokenizer) == [f"{A1}<|end|>"]


@pytest.mark.parametrize("content", ["  two spaces before", "newlines after\n\n", "\n\tboth \n", "x"])
def test_whitespace_is_kept_or_trimmed_as_the_template_has_it(content: str):
    keeps, trims = small_tokenizer(CHATML), small_tokenizer(trl_template("llama3"))
    example = encode(keeps, row(("user", U1), ("assistant", content)))
    if example.straddled:  # "assistant\n" + "\n...": one token for both newlines
        assert content.startswith("\n") and runs(example, keeps) == [f"{content[1:]}<|im_end|>"]
    else:
        assert runs(example, keeps) == [f"{content}<|im_end|>"]
    assert runs(encode(trims, row(("user", U1), ("assistant", content))), trims) == [f"{content.strip()}<|eot_id|>"]


def test_an_empty_answer_is_only_its_end():
    tokenizer = small_tokenizer(CHATML)
    assert runs(encode(tokenizer, row(("user", U1), ("assistant", ""))), tokenizer) == ["<|im_end|>"]


@pytest.mark.parametrize("token", ["<|im_end|>", "</s>", "<|eot_id|>"])
def test_text_that_spells_an_end_of_turn_is_refused(token: str):
    tokenizer = small_tokenizer(CHATML)
    for turns in ([("user", f"what is {token}?"), ("assistant", A1)], [("user", U1), ("assistant", f"{A1}{token}")]):
        with pytest.raises(EncodingError, match=r"train.jsonl:1: the text spells the end-of-turn token") as caught:
            encode(tokenizer, row(*turns))
        assert token in str(caught.value) and "remove it from the row" in str(caught.value)


def test_text_that_spells_another_special_token_keeps_its_span():
    tokenizer = small_tokenizer(CHATML)
    answer = "it is <|im_start|>assistant\nlike this"
    example = encode(tokenizer, row(("user", "how? <|im_start|>assistant\n"), ("assistant", answer)))
    assert runs(example, tokenizer) == [f"{answer}<|im_end|>"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=4), st.booleans())
def test_any_text_is_supervised_exactly(texts: list[str], trim_offsets: bool):
    tokenizer = small_tokenizer(CHATML, trim_offsets=trim_offsets)
    turns = [turn for text in texts for turn in (("user", text[::-1]), ("assistant", f"A{text}"))]
    encoder = Encoder(tokenizer, max_length=4096)
    if any(token in text for _, text in turns for token in encoder.end_ids):
        with pytest.raises(EncodingError, match="spells the end-of-turn token"):
            encoder.encode(row(*turns))
        return
    example = encoder.encode(row(*turns))
    assert example.straddled == 0
    assert runs(example, tokenizer) == [f"A{text}<|im_end|>" for text in texts]
    assert example.input_ids == tokenizer.apply_chat_template([*row(*turns).messages])["input_ids"]


# --- BOS and EOS


def test_bos_exactly_once():
    adds, adds_not = small_tokenizer(CHATML, bos=True), small_tokenizer(CHATML)
    writes = "{{ bos_token }}" + CHATML
    one = row(("user", U1), ("assistant", A1))
    bos = adds.bos_token_id

    def begins(tokenizer: Any, template: str, **options: Any) -> list[bool]:
        tokenizer.chat_template = template
        example = encode(tokenizer, one, **options)
        assert example.labels[0] == IGNORE_INDEX
        assert runs(example, tokenizer) == [f"{A1}<|im_end|>"]
        return [token == bos for token in example.input_ids[:2]]

    assert begins(adds, CHATML) == [True, False]
    assert begins(adds, writes) == [True, False]
    assert begins(adds_not, CHATML) == [False, False]
    assert begins(adds_not, writes) == [True, False]
    assert begins(adds_not, CHATML, bos=True) == [True, False]
    assert begins(adds, CHATML, bos=False) == [False, False]
    with pytest.raises(ValueError, match="the tokenizer has no BOS token"):
        Encoder(small_tokenizer(CHATML, bos_token=None), max_length=8, bos=True)


def test_eos_is_appended_where_the_template_ends_nothing():
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = small_tokenizer(template)
    example = encode(tokenizer, row(("user", U1), ("assistant", A1)))
    assert runs(example, tokenizer) == [f"{A1}</s>"]
    assert runs(encode(tokenizer, row(("user", U1), ("assistant", A1)), "all"), tokenizer)[0].endswith(f"{A1}</s>")
    with pytest.raises(EncodingError, match=r"turn 1: no end-of-turn token after .*use mask=completion"):
        encode(tokenizer, row(("user", U1), ("assistant", A1), ("user", U2), ("assistant", A2)))


def test_all_supervises_everything_but_the_first_token_and_what_follows_the_end():
    tokenizer = small_tokenizer(CHATML)
    example = encode(tokenizer, row(("user", U1), ("assistant", A1)), "all")
    assert runs(example, tokenizer) == [f"user\n{U1}<|im_end|>\n<|im_start|>assistant\n{A1}<|im_end|>"]


@pytest.mark.parametrize("name", ["gemma", "gptoss", "qwen2_5", "plain", "chatml"])
def test_a_prompt_for_generation_is_the_head_of_what_was_trained(name: str):
    template = TEMPLATES.get(name) or trl_template(name)
    encoder = Encoder(small_tokenizer(template, bos=True), max_length=4096, mask="completion")
    example, prompt = encoder.encode(two_turns("")), encoder.encode_prompt(two_turns(""))
    assert example.input_ids[: len(prompt)] == prompt
    assert example.labels[: len(prompt)] == [IGNORE_INDEX] * len(prompt)
    assert example.labels[len(prompt)] != IGNORE_INDEX


# --- our own templates, and how one is chosen


def test_plain_template():
    tokenizer = small_tokenizer()
    turns = row(("system", "Be brief."), ("user", U1), ("assistant", A1), ("user", U2), ("assistant", A2))
    example = encode(tokenizer, turns, template="plain")
    assert tokenizer.decode(example.input_ids) == (
        f"Be brief.\n\nUser: {U1}\n\nAssistant: {A1}</s>\n\nUser: {U2}\n\nAssistant: {A2}</s>"
    )
    assert runs(example, tokenizer) == [f" {A1}</s>", f" {A2}</s>"]
    with pytest.raises(EncodingError, match="the plain template has no role tool"):
        encode(tokenizer, row(*TOOL_TURNS), template="plain")


def test_resolve_template(tmp_path: Path):
    bare, own = small_tokenizer(), small_tokenizer("{{ messages }}")
    bare.name_or_path = "org/base"
    assert resolve_template(own, None) == "{{ messages }}"
    assert resolve_template(own, "chatml") == CHATML
    several = small_tokenizer()
    several.chat_template = {"default": "D", "rag": "R"}
    assert (resolve_template(several, None), resolve_template(several, "rag")) == ("D", "R")
    (tmp_path / "mine.jinja").write_text("M", encoding="utf-8")
    assert resolve_template(bare, str(tmp_path / "mine.jinja")) == "M"
    choose = "set data.template (--template) to one of chatml, plain or a path to a .jinja file"
    with pytest.raises(ValueError) as caught:
        resolve_template(bare, None)
    assert str(caught.value) == f"the tokenizer of org/base has no chat template; {choose}"
    with pytest.raises(ValueError, match=r"unknown template 'chatlm'. Did you mean 'chatml'\?"):
        resolve_template(bare, "chatlm")
    with pytest.raises(ValueError, match=r"cannot read .*gone.jinja: No such file"):
        resolve_template(bare, str(tmp_path / "gone.jinja"))


def test_a_template_cannot_reach_python():
    attack = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(EncodingError, match=r"train.jsonl:1: the chat template fails on these messages"):
        encode(small_tokenizer(attack), row(("user", U1), ("assistant", A1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "assistants"}, "unknown mask 'assistants'. Known: assistant, completion, all"),
        ({"overlong": "cut"}, "unknown overlong 'cut'. Known: truncate, drop"),
        ({"max_length": 1}, "max_length: a token and its target need at least 2, got 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Encoder(small_tokenizer(CHATML), **{"max_length": 8, **options})


# --- truncation and the dataset


def rows_of(*answers: str) -> list[Row]:
    return [row(("user", U1), ("assistant", text), where=f"train.jsonl:{i}") for i, text in enumerate(answers, 1)]


def test_truncation_keeps_the_head():
    tokenizer = small_tokenizer(CHATML)
    (of,) = rows_of(A1)
    full, cut = encode(tokenizer, of), encode(tokenizer, of, max_length=20)
    assert (cut.input_ids, cut.labels) == (full.input_ids[:20], full.labels[:20])
    assert cut.truncated == len(full.input_ids) - 20 > 0


def test_facts_count_and_name_every_row():
    tokenizer = small_tokenizer(CHATML)
    prompt = len(Encoder(tokenizer, max_length=99).encode_prompt(rows_of("")[0]))
    long = row(("user", U1 * 9), ("assistant", A1), where="train.jsonl:3")
    asked = row(("user", U1), where="train.jsonl:4")
    encoder = Encoder(tokenizer, max_length=prompt + 6)
    result = encode_rows([*rows_of("Oslo", A1 * 3), long, asked], encoder)
    assert [example.where for example in result.examples] == ["train.jsonl:1", "train.jsonl:2"]
    first, second = result.examples
    assert (first.truncated, len(second.input_ids), second.num_supervised) == (0, prompt + 6, 6)
    tokens, supervised = result.examples.num_tokens, result.examples.num_supervised
    assert (tokens, supervised) == (len(first.input_ids) + prompt + 6, first.num_supervised + 6)
    assert result.facts() == [
        f"4 rows; 2 dropped: 1 over {prompt + 6} tokens with no answer left, 1 fully masked",
        f"1 truncated (50%); {tokens} tokens, {supervised} supervised ({100 * supervised / tokens:.0f}%); "
        f"EOS supervised in 50%",
        f"WARNING: only 50% of the rows teach the model to end its answer: the others are cut off at "
        f"data.max_length={prompt + 6}; set data.max_length to {len(second.input_ids) + second.truncated} (keeps "
        f"90% of the rows whole), or data.overlong to drop (leaves the long ones out)",
        f"dropped, over {prompt + 6} tokens with no answer left: train.jsonl:3",
        "dropped, fully masked: train.jsonl:4",
    ]


def test_overlong_rows_are_dropped_on_request():
    tokenizer = small_tokenizer(CHATML)
    prompt = len(Encoder(tokenizer, max_length=99).encode_prompt(rows_of("")[0]))
    encoder = Encoder(tokenizer, max_length=prompt + 6, overlong="drop")
    result = encode_rows(rows_of("Oslo", A1 * 3), encoder)
    assert (result.overlong, result.examples.num_truncated) == (Places(1, ["train.jsonl:2"]), 0)
    assert len(result.examples) == 1
    assert f"1 dropped: 1 over {prompt + 6} tokens" in result.facts()[0]


def test_bad_rows_raise_or_are_kept_with_their_reason():
    encoder = Encoder(small_tokenizer(CHATML), max_length=99)
    rows = rows_of("Oslo", "</s>", "Bergen")
    with pytest.raises(EncodingError, match=r"^train.jsonl:2: the text spells") as raised:
        encode_rows(rows, encoder)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    bad = BadRows(skip=True)
    result = encode_rows(rows, encoder, bad=bad)
    assert list(result.refused) == list(bad.rows)
    (left_out,) = bad.rows
    assert left_out.where == "train.jsonl:2" and "the text spells the end-of-turn token </s>" in left_out.reason
    assert json.loads(left_out.raw) == {"messages": list(rows[1].messages)}
    assert bad.summary() == "1 row skipped: 1 mask not verified"
    assert result.facts()[0] == "3 rows; 1 dropped: 1 refused"


@pytest.mark.parametrize(
    ("rows", "max_length", "message"),
    [
        ([], 99, "no rows to encode"),
        (rows_of(A1), 5, r"no row has a supervised token left \(1 rows; .*raise max_length \(now 5\)"),
        ([row(("user", "Hi"))], 99, "mask=assistant needs rows with an assistant turn"),
        (rows_of("</s>"), 99, "the first refused row says: train.jsonl:1: the text spells"),
    ],
)
def test_nothing_left_is_an_error(rows: list[Row], max_length: int, message: str):
    with pytest.raises(ValueError, match=message):
        encode_rows(rows, Encoder(small_tokenizer(CHATML), max_length=max_length), bad=BadRows(skip=True))
