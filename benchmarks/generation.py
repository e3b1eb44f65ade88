"""Sampled tokens per second: deftune's sampler against transformers' `generate` and `generate_batch`, in one run.

    python benchmarks/generation.py                                       # SmolLM2 on whatever device there is
    python benchmarks/generation.py --sequences 2048 --rounds 2 --json out.json --markdown out.md
    python benchmarks/generation.py --contenders deftune --parts          # and where the time of a step goes
    python benchmarks/generation.py --contenders deftune --tune           # the attention in other tiles
    python benchmarks/generation.py --quick                               # a try on a CPU

Prompts are reasoning_gym's gsm_symbolic, or GSM8K's with --questions, in the model's chat template, the same for all;
temperature 1, all tokens.
A *fixed* run makes --new-tokens tokens of every prompt, end tokens disabled for all alike; a *natural* one lets answers
end, and counts what they have until then. Each contender first makes a few tokens of the same prompts, not counted.

- tokens/s: over the whole call, with templates and reading the prompts; deftune's time has the texts, too
- ms a step: the seconds of a fixed run by its number of tokens, prompts and all
- peak: what torch had allocated, above the model's weights

Needs deftune[train]. `generate_batch` takes the first attention that works: its own choice, then paged sdpa.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import itertools
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Prompt

WARMUP_TOKENS = 4
questions_file: Path | None = None  # set by --questions


def gsm_prompts(number: int) -> list[Prompt]:
    """Questions of grade-school mathematics: the rows of --questions again and again, or reasoning_gym's."""
    if questions_file is not None:
        rows = [row["question"] for row in map(json.loads, gzip.open(questions_file, "rt"))]
        return [Prompt(f"gsm8k/{i}", rows[i % len(rows)]) for i in range(number)]
    import reasoning_gym

    items: Any = reasoning_gym.create_dataset("gsm_symbolic", seed=42, size=number)
    return [Prompt(f"gsm_symbolic/{i}", items[i]["question"]) for i in range(number)]


class Contender:
    """One way to sample: ``run`` makes at most ``tokens`` of each of the prompts and returns how many there were."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        self.note = ""
        self.sampler = TransformersSampler(model, tokenizer)
        self.ends = sorted(self.sampler.network.end_ids)

    def generation(self, tokens: int, ends: bool) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens,
            eos_token_id=self.ends if ends else -1, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip

    def run(self, prompts: list[Prompt], tokens: int, ends: bool, seed: int) -> int:
        raise NotImplementedError


class Generate(Contender):
    def run(self, prompts: list[Prompt], tokens: int, ends: bool, seed: int) -> int:
        rows = [self.sampler.encode(prompt) for prompt in prompts]
        longest, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        torch.manual_seed(seed)
        out = self.model.generate(ids, attention_mask=mask, generation_config=self.generation(tokens, ends))
        made = out[:, longest:]
        if not ends:
            return made.numel()
        ended = torch.isin(made, torch.tensor(self.ends, device=made.device))
        return int((ended.cumsum(-1) - ended.long() == 0).sum())  # up to the first end, and that


class GenerateBatch(Contender):
    def __init__(self, model: Any, tokenizer: Any):
        super().__init__(model, tokenizer)
        self.attention: str | None = None

    def run(self, prompts: list[Prompt], tokens: int, ends: bool, seed: int) -> int:
        before = self.model.config._attn_implementation
        names = [before, "paged|sdpa", "paged|eager"] if self.attention is None else [self.attention]
        rows = [self.sampler.encode(prompt) for prompt in prompts]
        errors: list[str] = []
        for name in names:
            try:
                self.model.set_attn_implementation(name)
                made = self._run(rows, tokens, ends, seed)
            except Exception as error:  # whatever it is, the next attention may do without it
                errors.append(f"{name}: {first_line(error)}")
                continue
            finally:
                self.model.set_attn_implementation(before)
            self.attention = name
            self.note = f"attention {name}{', CUDA graphs' if torch.cuda.is_available() else ''}"
            return made
        raise RuntimeError("; ".join(errors))

    def _run(self, rows: list[list[int]], tokens: int, ends: bool, seed: int) -> int:
        from transformers import ContinuousBatchingConfig  # pyright: ignore[reportAttributeAccessIssue]

        options = ContinuousBatchingConfig(use_cuda_graph=True if torch.cuda.is_available() else None, seed=seed)
        outputs: dict[str, Any] = self.model.generate_batch(
            rows, generation_config=self.generation(tokens, ends), continuous_batching_config=options
        )
        failed = [o.error for o in outputs.values() if o.error]
        if failed or len(outputs) < len(rows):
            raise RuntimeError(f"{len(rows) - len(outputs) + len(failed)} answers failed: {(failed or [''])[0]}")
        return sum(len(o.generated_tokens) for o in outputs.values())


class Deftune(Contender):
    def run(self, prompts: list[Prompt], tokens: int, ends: bool, seed: int) -> int:
        self.sampler.batch_size = len(prompts)
        self.sampler.network.end_ids = frozenset(self.ends if ends else ())
        outputs = list(self.sampler.sample(prompts, temperature=1.0, max_new_tokens=tokens, seed=seed))
        assert len(outputs) == len(prompts) and all(o.finish != "error" for o in outputs)
        return sum(o.tokens or 0 for o in outputs)


CONTENDERS: dict[str, type[Contender]] = {
    "generate": Generate,
    "generate_batch": GenerateBatch,
    "deftune": Deftune,
}


def first_line(error: BaseException) -> str:
    return next(iter(f"{type(error).__name__}: {error}".splitlines()))[:200]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(contender: Contender, prompts: list[Prompt], tokens: int, ends: bool, seed: int) -> dict[str, Any]:
    gc.collect()
    held = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = now()
    made = contender.run(prompts, tokens, ends, seed)
    seconds = now() - start
    peak = torch.cuda.max_memory_allocated() - held if torch.cuda.is_available() else None
    return {"seconds": seconds, "tokens": made, "tokens_per_second": made / seconds, "peak_bytes": peak}


# Where the time of a step goes ---------------------------------------------------------------------------------------


def parts(model: Any, tokenizer: Any, rows: int, tokens: int) -> list[dict[str, Any]]:
    """Milliseconds of the parts of a decoding step of ``rows`` answers, half way through ``tokens``."""
    from deftune.evaluation import slots
    from deftune.evaluation.decoding import Answer, LanguageModel
    from deftune.evaluation.slot_decoding import SlotDecoder

    network = LanguageModel(model, end_ids=set(), pad_id=0, tie_margin=0.0)
    sampler = TransformersSampler(model, tokenizer)
    limit = 64  # more than the steps below
    asked = [Answer(p, 0, sampler.encode(p), limit, (i, i), 1.0) for i, p in enumerate(gsm_prompts(rows))]
    room = max(len(answer.ids) for answer in asked) + tokens // 2 + limit
    found = slots.survey(network)
    decoder = SlotDecoder(network, found, slots.Plan(rows, room), top_p=1.0, max_new_tokens=limit)
    reading = timed(lambda: decoder.admit(asked), 1)
    decoder.cache.lengths += tokens // 2
    decoder.start()  # compiles, captures

    lengths, cache = decoder.cache.lengths, decoder.cache
    heads, width = found.shapes[0]
    query_heads = model.config.get_text_config().num_attention_heads
    with torch.no_grad():
        query = torch.randn(rows, query_heads, width, device=model.device, dtype=model.dtype)
        new = torch.randn(rows, heads, width, device=model.device, dtype=model.dtype)
        logits = decoder._logits(rows).clone()  # pyright: ignore[reportPrivateUsage]
        attend = slots.kernels().attend if decoder.fast else slots.attend_plain
        attention = timed_kernels(
            lambda: attend(query, new, new, cache.keys[0], cache.values[0], lengths, scale=width**-0.5), 30
        )
        chance = decoder.keys, decoder.steps, decoder.temperatures
        if decoder.fast:
            drawing = timed_kernels(lambda: slots.kernels().draw(logits, *chance), 30)
        else:
            drawing = timed(lambda: network.choose(logits, *chance, top_p=1.0), 3)
        step = timed(lambda: decoder._step(rows), 20)  # pyright: ignore[reportPrivateUsage]
        launched = timed(lambda: decoder._logits(rows), 3)  # pyright: ignore[reportPrivateUsage]
    layers = len(found.shapes)
    moved = int(lengths.sum()) * 2 * heads * width * model.dtype.itemsize
    return [
        {"part": "reading the prompts, once", "ms": reading},
        {"part": "a step", "ms": step, "note": f"{rows} rows, {float(lengths.float().mean()):.0f} tokens each"},
        {"part": "of it attention", "ms": layers * attention, "note": f"{layers} x {moved / attention / 1e6:.0f} GB/s"},
        {"part": "of it drawing", "ms": drawing},
        {"part": "the model's part of a step without a graph", "ms": launched},
    ]  # fmt: skip


def tune(model: Any, rows: int, length: int) -> list[dict[str, Any]]:
    """Milliseconds of one layer's attention for other constants of `triton_decoding` than its own, fastest first."""
    from deftune.evaluation import slots
    from deftune.evaluation.decoding import LanguageModel

    kernels = slots.kernels()
    found = slots.survey(LanguageModel(model, end_ids=set(), pad_id=0, tie_margin=0.0))
    heads, width = found.shapes[0]
    cache = slots.SlotCache(found.shapes[:1], rows, length + 1, model.dtype, model.device)
    cache.lengths += length
    query_heads = model.config.get_text_config().num_attention_heads
    query = torch.randn(rows, query_heads, width, device=model.device, dtype=model.dtype)
    new = torch.randn(rows, heads, width, device=model.device, dtype=model.dtype)
    moved = rows * length * 2 * heads * width * model.dtype.itemsize
    own = kernels.TILE_BYTES, kernels.WARPS, kernels.STAGES
    results: list[dict[str, Any]] = []
    attend = functools.partial(
        kernels.attend, query, new, new, cache.keys[0], cache.values[0], cache.lengths, scale=width**-0.5
    )
    for setting in [own, *itertools.product((4096, 8192, 16384), (1, 2, 4), (2, 3, 4))]:
        kernels.TILE_BYTES, kernels.WARPS, kernels.STAGES = setting
        try:
            ms = timed_kernels(attend, 50)
        except Exception as error:  # a tile that the device has no shared memory for
            results.append({"part": f"attention, {setting}", "ms": math.inf, "note": first_line(error)})
            continue
        results.append({"part": f"attention, {setting}", "ms": ms, "note": f"{moved / ms / 1e6:.0f} GB/s"})
    kernels.TILE_BYTES, kernels.WARPS, kernels.STAGES = own
    return sorted(results, key=lambda result: result["ms"])


def timed(function: Callable[[], Any], times: int) -> float:
    """Milliseconds a call, after one that is not counted where there are several."""
    if times > 1:
        function()
    start = now()
    for _ in range(times):
        function()
    return 1000 * (now() - start) / times


def timed_kernels(function: Callable[[], Any], times: int) -> float:
    """The same, of the kernels alone where there is a GPU: from a graph of them, which the host does not hold up."""
    if not torch.cuda.is_available():
        return timed(function, times)
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            function()
    return timed(graph.replay, 3) / times


# The table -----------------------------------------------------------------------------------------------------------


def render(
    results: list[dict[str, Any]], found_parts: list[dict[str, Any]], args: argparse.Namespace, head: str
) -> str:
    lines = [head]
    for kind, number in dict.fromkeys((r["kind"], r["sequences"]) for r in results):
        group = [r for r in results if (r["kind"], r["sequences"]) == (kind, number)]
        what = (
            f"{args.new_tokens} tokens each" if kind == "fixed" else f"answers to their ends, at most {args.new_tokens}"
        )
        ran = {r["contender"] for r in group if "seconds" in r}
        beside = next((c for c in CONTENDERS if c in ran), "generate")  # the ratio's denominator
        lines += [f"\n{number} sequences, {what}\n",
                  f"| | tokens/s | x {beside} | spread | ms a step | seconds | tokens | peak GiB | |",
                  "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        reference = [r["tokens_per_second"] for r in group if r["contender"] == beside and "seconds" in r]
        for contender in dict.fromkeys(r["contender"] for r in group):
            mine = [r for r in group if r["contender"] == contender and "seconds" in r]
            if not mine:
                error = next(r["error"] for r in group if r["contender"] == contender)
                lines.append(f"| {contender} | not run | | | | | | | {error} |")
                continue
            speeds = [r["tokens_per_second"] for r in mine]
            speed, seconds = statistics.median(speeds), statistics.median(r["seconds"] for r in mine)
            ratio = f"{speed / statistics.median(reference):.2f}" if reference else "-"
            step = f"{1000 * seconds / args.new_tokens:.2f}" if kind == "fixed" else "-"
            peak = max(r["peak_bytes"] or 0 for r in mine) / 2**30
            lines.append(
                f"| {contender} | {speed:,.0f} | {ratio} | {(max(speeds) - min(speeds)) / speed:.1%} | {step} | "
                f"{seconds:.2f} | {mine[-1]['tokens']:,} | {f'{peak:.2f}' if peak else '-'} | {mine[-1]['note']} |"
            )
    if found_parts:
        lines += ["\n| | ms | |", "|---|---|---|"]
        lines += [f"| {part['part']} | {part['ms']:.3f} | {part.get('note', '')} |" for part in found_parts]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="smollm2, or a model folder")
    parser.add_argument("--sequences", default="256,2048", help="how many at once, by commas")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--kinds", default="fixed,natural", help="fixed, natural, or both by a comma")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="which ones, by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--questions", type=Path, help="GSM8K's test.jsonl.gz (default: reasoning_gym's gsm_symbolic)")
    parser.add_argument("--parts", action="store_true", help="also the parts of a step, at the most sequences")
    parser.add_argument("--tune", action="store_true", help="also the attention with other constants; needs CUDA")
    parser.add_argument("--quick", action="store_true", help="4 sequences of 8 tokens, once: a try")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    global questions_file
    questions_file = args.questions
    if args.quick:
        args.sequences, args.new_tokens, args.rounds = "4", 8, 1
    numbers = [int(part) for part in args.sequences.split(",")]
    unknown = [c for c in args.contenders.split(",") if c not in CONTENDERS]
    unknown += [k for k in args.kinds.split(",") if k not in ("fixed", "natural")]
    if unknown:
        parser.error(f"{', '.join(unknown)}: unknown; contenders are {', '.join(CONTENDERS)}, kinds fixed, natural")

    if args.tune and not torch.cuda.is_available():
        parser.error("--tune: needs a CUDA device")

    import transformers

    from deftune.artifacts.models import load_model, load_tokenizer, resolve_model

    folder = resolve_model(args.model)
    cuda = torch.cuda.is_available()
    model = load_model(folder, dtype="bfloat16" if cuda else "float32").to("cuda" if cuda else "cpu").eval()
    tokenizer = load_tokenizer(folder)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    shown = " ".join(sys.argv)
    machine = f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {model.dtype}"
    results: list[dict[str, Any]] = []
    found_parts: list[dict[str, Any]] = []

    def write() -> str:
        text = render(results, found_parts, args, f"`python {shown}`\n\n{args.model} on {machine}")
        record = {"command": shown, "machine": machine, "results": results, "parts": found_parts}
        for path, content in ((args.markdown, text), (args.json, json.dumps(record, indent=1))):
            if path:
                path.write_text(content + "\n")
        return text

    for contender in args.contenders.split(","):
        one = CONTENDERS[contender](model, tokenizer)
        for number in numbers:
            prompts = gsm_prompts(number)
            try:
                one.run(prompts, WARMUP_TOKENS, False, 0)
                for kind in args.kinds.split(","):
                    for round_ in range(args.rounds):
                        result = measure(one, prompts, args.new_tokens, kind == "natural", round_)
                        record = {"contender": contender, "sequences": number, "kind": kind, "round": round_}
                        results.append({**record, **result, "note": one.note})
                        print(contender, number, kind, f"{result['tokens_per_second']:,.0f} tokens/s", flush=True)
                        write()  # a run that is stopped leaves what it has
            except Exception as error:
                traceback.print_exc()
                for kind in args.kinds.split(","):
                    record = {"contender": contender, "sequences": number, "kind": kind}
                    results.append({**record, "error": first_line(error)})
    if args.parts:
        found_parts += parts(model, tokenizer, max(numbers), args.new_tokens)
    if args.tune:
        found_parts += tune(model, max(numbers), args.new_tokens)
    print(write())


if __name__ == "__main__":
    main()
