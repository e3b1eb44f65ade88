"""Real hidden states, head and labels for `linear_loss.py --hidden`, from a chat model and question/answer rows.

    python benchmarks/hidden_states.py MODEL_FOLDER train.jsonl.gz smollm2_gsm8k.safetensors --gguf model.gguf

MODEL_FOLDER is what transformers' from_pretrained takes; --gguf names a GGUF file in it. Rows are GSM8K's: a question
and an answer each, whose <<...>> annotations are dropped. The answer and its end token are supervised. Needs
transformers, safetensors and, for GGUF files, gguf.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deftune


def read_rows(path: Path) -> list[dict[str, str]]:
    text = gzip.open(path, "rt").read() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.split("\n") if line.strip()]  # splitlines would cut at U+2028


def encode(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """(ids, shifted targets) of one conversation."""
    user = {"role": "user", "content": row["question"].strip()}
    answer = re.sub(r"<<.*?>>", "", row["answer"]).strip()
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt + answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    given = tokenizer(prompt, add_special_tokens=False).input_ids
    if ids[: len(given)] != given:
        raise SystemExit("the prompt's tokens are no prefix of the conversation's; this tokenizer merges across them")
    labels = [deftune.IGNORE_INDEX] * len(given) + ids[len(given) :]
    return ids, [*labels[1:], deftune.IGNORE_INDEX]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", help="a GGUF file in the model's folder")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    import transformers  # pyright: ignore
    from safetensors.torch import save_file  # pyright: ignore

    options: dict[str, Any] = {"gguf_file": args.gguf} if args.gguf else {}
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(args.model, **options)
    if args.gguf and hasattr(transformers, "GgufConfig"):  # newer ones load it quantised otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **options).eval()
    hidden: list[Tensor] = []
    targets: list[int] = []
    for row in read_rows(args.data):
        ids, labels = encode(tokenizer, row)
        with torch.no_grad():
            hidden.append(model.model(input_ids=torch.tensor([ids])).last_hidden_state[0])
        targets += labels
        if len(targets) >= args.tokens:
            break
    states = torch.cat(hidden)[: args.tokens].bfloat16()
    weight, labels = model.lm_head.weight.detach().bfloat16(), torch.tensor(targets[: args.tokens])
    stats = deftune.linear_token_stats(states.float(), weight.float(), labels)
    print(
        f"{len(states)} positions, {len(stats)} supervised: nll {stats.nll.mean():.4f}, mean p {stats.p.mean():.4f}, "
    )
    print(f"mean sum P^2 {stats.concentration.mean():.4f}")
    save_file({"hidden": states.contiguous(), "weight": weight.contiguous(), "targets": labels}, args.out)


if __name__ == "__main__":
    main()
