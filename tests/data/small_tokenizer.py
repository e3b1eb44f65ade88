"""A real byte-level BPE tokenizer, trained in memory: no hub, no files."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
    "<|python_tag|> <start_of_turn> <end_of_turn> <|turn> <turn|> <|user|> <|assistant|> <|system|> <|observation|> "
    "<|end|> <|start|> <|channel|> <|message|> <|return|> <|call|> <|eot|> <|endoftext|> [gMASK] <sop> "
    "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> "
    "<|START_RESPONSE|> <|END_RESPONSE|> <end_of_utterance> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> "
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
).split()
TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "User: Hello, who are you?\n\nAssistant: I am a small model.\n\n",
    "<think>\n\n</think>\n\nThe weather in Oslo is cold: -3 degrees, {'city': 'Oslo'}.",
    "system\nYou are a helpful assistant.\nuser\nassistant\nmodel\n",
]


@cache
def _trained(trim_offsets: bool, bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    elif trim_offsets:  # GPT-2's default: a token's offsets leave out its leading space
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def small_tokenizer(
    template: str | None = None, *, trim_offsets: bool = False, bos: bool = False, **tokens: Any
) -> Any:
    """A fresh copy; ``bos`` adds BOS as Llama's does, ``tokens`` are attributes such as ``eos_token``."""
    tokenizer = copy.deepcopy(_trained(trim_offsets, bos))
    tokenizer.chat_template = template
    for name, value in tokens.items():
        setattr(tokenizer, name, value)
    return tokenizer
