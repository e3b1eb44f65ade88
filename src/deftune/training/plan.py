"""`deftune plan`: the memory and the speed of a run before it is started.

The memory is counted from what a training step keeps: weights, gradients, AdamW's moments, the bfloat16 copies of the
layers' matrices, what each layer saves for the backward pass, and the head. The counts reproduce the peaks that were
measured on one H200 (`MEASURED`, `MEASURED_LORA`); several GPUs are counted in the same way and were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from deftune._suggest import did_you_mean
from deftune.artifacts.config import ConfigError, RunConfig
from deftune.tokens.head import has_experts

GIB = 2**30
Base = Literal["float32", "bfloat16", "4bit"]  # the frozen weights under LoRA
Layers = Literal["padded", "varlen", "compiled"]  # rows with a mask; rows end to end; the same in compiled layers
COMPILED = ("llama", "qwen2")  # model types for which the memory of compiled layers was measured
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0, "muon": 4}  # a trained weight of a layer's matrices
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64  # a weight, with its share of the doubly quantised scales
RESERVE = 0.9  # share of a GPU's memory that a plan may fill: the allocator's fragments and NCCL need the rest


@dataclass(frozen=True)
class Gpu:
    """A GPU: usable memory, and the dense bfloat16 peak of its data sheet."""

    name: str
    gib: float
    peak_tflops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 139.0, 989.0), Gpu("h100", 79.0, 989.0), Gpu("a100", 79.0, 312.0), Gpu("h20", 95.0, 148.0),
        Gpu("l40s", 44.4, 362.0), Gpu("rtx4090", 23.6, 165.0), Gpu("rtx3090", 23.7, 71.0), Gpu("a10", 22.0, 125.0),
        Gpu("l4", 22.0, 121.0),
    )
}  # fmt: skip


def known_gpu(name: str) -> Gpu:
    """The GPU of this name, or an error that suggests one."""
    if name not in GPUS:
        raise ValueError(f"plan: unknown GPU {name!r}.{did_you_mean(name, GPUS)} Known: {', '.join(GPUS)}")
    return GPUS[name]


@dataclass(frozen=True)
class Shape:
    """What a plan needs to know of a dense decoder."""

    name: str
    parameters: int
    linear: int  # of them in the layers' matrices
    head: int  # of them in the head, or in the embedding that is tied to it
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    kind: str  # model_type

    def flops_per_token(self, length: int) -> float:
        """Forward and backward of a token in a sequence of ``length``: 6 a weight, and 12 L d T for attention."""
        return 6.0 * (self.linear + self.head) + 12.0 * self.layers * self.hidden * length


# Numbers of the public config.json files of the paper's backbones; the names are those of the hub.
_LLAMA = {"model_type": "llama", "num_attention_heads": 32}
_QWEN_1B = {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
            "tie_word_embeddings": True}  # fmt: skip
_QWEN_7B = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "tie_word_embeddings": False}  # fmt: skip
BACKBONES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-3B": {
        **_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "deepseek-ai/deepseek-math-7b-base": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 30, "num_key_value_heads": 32,
        "vocab_size": 102400, "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-Math-1.5B": _QWEN_1B,
    "Qwen/Qwen2.5-1.5B": _QWEN_1B,
    "Qwen/Qwen2.5-Math-7B": _QWEN_7B,
    "Qwen/Qwen2.5-7B": _QWEN_7B,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A row of benchmarks/results: `deftune deft` on one H200, full fine-tuning in bfloat16, sequences of 2048."""

    file: str
    contender: str
    layers: Layers
    model: str
    rows: int
    peak_gib: float
    tokens_per_second: float


# the values of the files, rounded as their tables print them; tests/training/test_plan.py compares
_VARLEN, _COMPILED = "deftune deft; varlen", "deftune deft; varlen; compiled layers; bf16 weights"
MEASURED = (
    Measured("training_h200.json", "deftune deft", "padded", "SmolLM2-135M", 8, 18.77, 95_223),
    Measured("training_h200_16.json", "deftune deft", "padded", "SmolLM2-135M", 16, 35.39, 127_750),
    Measured("training_h200_qwen.json", "deftune deft", "padded", "Qwen2.5-Coder-1.5B", 4, 51.18, 31_677),
    Measured("training_h200_fast.jsonl", _VARLEN, "varlen", "SmolLM2-135M", 16, 30.23, 149_662),
    Measured("training_h200_fast_qwen.jsonl", _VARLEN, "varlen", "Qwen2.5-Coder-1.5B", 4, 49.21, 33_832),
    Measured("training_h200_fast.jsonl", _COMPILED, "compiled", "SmolLM2-135M", 16, 18.98, 292_083),
    Measured("training_h200_fast_qwen.jsonl", _COMPILED, "compiled", "Qwen2.5-Coder-1.5B", 4, 40.13, 46_187),
)
# lora_memory_h200.json: Llama-3.1-8B's shape, rank 16, 4 rows of 2048, activations computed again -> peak GiB
MEASURED_LORA: dict[Base, float] = {"bfloat16": 20.12, "4bit": 9.76}


def shape_of(config: Any, name: str) -> Shape:
    """The shape of a transformers config; the parameters are counted on a model without memory.

    Raises:
        ValueError: a mixture of experts, or a config that is not of a decoder of text.
    """
    import torch
    import transformers

    text = config.get_text_config()
    if has_experts(config):
        raise ValueError(f"plan: {name} is a mixture of experts, whose activations are not counted here")
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    if missing := [key for key in sizes if not isinstance(getattr(text, key, None), int)]:
        raise ValueError(f"plan: the config of {name} has no {missing[0]}, so its memory cannot be counted")
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    ends = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    linear = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in ends)
    layers, hidden, intermediate, heads = (getattr(text, key) for key in sizes)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head = model.get_output_embeddings().weight.numel()
    parameters = sum(p.numel() for p in model.parameters())
    kind = str(text.model_type)
    return Shape(name, parameters, linear, head, layers, hidden, intermediate, heads, kv_heads, kind)


def find_shape(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Shape:
    """The shape of a backbone of the paper, of a folder or GGUF file, or of a hub id."""
    import transformers

    from deftune.artifacts.models import resolve_model

    if name in BACKBONES:
        return shape_of(transformers.AutoConfig.for_model(**BACKBONES[name]), name)
    source = resolve_model(name, revision=revision)
    try:
        config = transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        hint = did_you_mean(name, BACKBONES)
        raise ValueError(f"plan: cannot read the config of {name}: {str(error).splitlines()[0]}{hint}") from None
    return shape_of(config, name)


@dataclass(frozen=True)
class Workload:
    """What a GPU computes in a step."""

    length: int
    rows: int  # of a micro-batch
    accumulation: int = 1
    bf16: bool = True
    optimizer: str = "adamw"
    layers: Layers = "compiled"  # the fastest that the run's options allow


@dataclass(frozen=True)
class Strategy:
    """How the model is laid out over the GPUs."""

    shards: int = 1  # ranks that hold one copy of the weights
    copies: int = 1
    checkpointing: bool = False
    lora_rank: int = 0
    base: Base = "float32"
    layers: Layers = "padded"

    def __str__(self) -> str:
        if self.shards > 1:
            name = "FSDP2" if self.copies == 1 else f"FSDP2 in {self.copies} copies (HSDP)"
        else:
            name = "one GPU" if self.copies == 1 else "DDP"
        name += ", compiled layers" * (self.layers == "compiled") + " + gradient checkpointing" * self.checkpointing
        return name + (f" + LoRA r={self.lora_rank} over {self.base}" if self.lora_rank else "")

    def options(self) -> list[str]:
        """The ``--set`` options of `deftune train`."""
        found = ["train.fsdp=true"] if self.shards > 1 else []
        found += [f"train.shard_size={self.shards}"] if self.shards > 1 and self.copies > 1 else []
        found += ["train.gradient_checkpointing=true"] if self.checkpointing else []
        found += ["train.compile=layers"] if self.layers == "compiled" else []
        found += [f"model.lora.r={self.lora_rank}"] if self.lora_rank else []
        extra = {"bfloat16": ["model.dtype=bfloat16"], "4bit": ["model.quantization=4bit"], "float32": list[str]()}
        return found + extra[self.base]


WHOLE = Strategy()


@dataclass(frozen=True)
class Memory:
    """GiB of one GPU at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # bfloat16 copies of the layers' matrices: autocast's, or the weights beside their float32 masters
    activations: float
    head: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.copies + self.activations + self.head


def layer_bytes(shape: Shape, work: Workload, base: str = "float32", layers: Layers = "padded") -> float:
    """Bytes that a layer saves for the backward pass, a token; ``base`` is the dtype of its weights.

    Under autocast, d the width, f the width of the MLP and k d that of the keys: two norms keep their input and their
    output in float32 (16 d); each of the five matrices after a norm keeps a bfloat16 copy of its input (10 d);
    attention keeps queries, repeated keys and values, its output and a copy of it (10 d), and a row of its mask (2 T);
    the MLP keeps four tensors (8 f). Rows end to end have no mask, and keys and values that are not repeated.

    Compiled layers keep less: both norms' inputs in float32 (8 d), their outputs, the queries and attention's output in
    bfloat16 (8 d), keys and values (4 k d), and three tensors of the MLP (6 f).

    In float32 the matrices share the norm's scaled output (8 d), and the rest is twice as large. With bfloat16 weights
    the layers pass bfloat16 to each other, and each norm keeps one float32 copy of its input (8 d).
    """
    d, f, k = shape.hidden, shape.intermediate, shape.kv_heads / shape.heads
    if layers == "compiled":
        return (16 + 4 * k) * d + 6 * f
    if not work.bf16 and base == "float32":
        return 16 * d + 8 * d + 20 * d + 16 * f + 4 * work.length
    saved = (36 if base == "float32" else 28) * d + 8 * f
    return saved + 2 * work.length if layers == "padded" else saved - 4 * (1 - k) * d


def estimate(shape: Shape, work: Workload, strategy: Strategy = WHOLE) -> Memory:
    """The memory of one GPU at the peak of a step.

        peak = max(end of the forward pass, optimizer step)

    At the end of the forward pass there are the weights (4 bytes a parameter, 2 a frozen bfloat16 one), AdamW's moments
    (8), the bfloat16 copies (2 a float32 matrix; of 4-bit matrices one at a time), all activations, and the head's
    gradient; gradients (4) only where an earlier micro-batch left them. In the optimizer step there are weights,
    gradients and moments, and on one GPU the bfloat16 weights beside their float32 masters.

    Args:
        shape: of the model.
        work: of one GPU.
        strategy: sharding divides weights, gradients and moments by ``shards``; a sharded layer is gathered in
            bfloat16, two at a time. DDP keeps buckets beside the gradients, of the same size.

    Returns:
        The parts of the larger of the two.
    """
    trained = shape.parameters
    if strategy.lora_rank:  # two thin matrices beside each of the seven of a layer
        widths = 8 * shape.hidden + 3 * (shape.hidden + shape.intermediate)
        trained = strategy.lora_rank * widths * shape.layers
    narrow = strategy.base != "float32"
    stored = 4.0 * trained
    if strategy.lora_rank:
        matrix = {"float32": 4.0, "bfloat16": 2.0, "4bit": NF4_BYTES}[strategy.base]
        stored += matrix * shape.linear + (2 if narrow else 4) * (shape.parameters - shape.linear)
    part = 1 / strategy.shards
    tokens = work.rows * work.length
    saved = layer_bytes(shape, work, strategy.base, strategy.layers)
    if strategy.checkpointing:  # the input of each layer, and one layer that is computed again
        activations = tokens * ((2 if narrow else 4) * shape.hidden * shape.layers + saved)
    else:
        activations = tokens * saved * shape.layers
    width = 2 if work.bf16 else 4
    copies = 2.0 * shape.linear if work.bf16 and not narrow else 0.0
    if strategy.base == "4bit":
        copies = 2.0 * shape.hidden * shape.intermediate
    if strategy.shards > 1:
        copies = width * (2 * shape.linear / shape.layers + shape.head)
    head = 0.0 if strategy.lora_rank else 4.0 * shape.head  # the gradient of the head, whole even where it is sharded
    weights, gradients, matrices = stored * part, 4 * trained * part, trained if strategy.lora_rank else shape.linear
    moments = MOMENT_BYTES[work.optimizer] * matrices * part
    if work.optimizer != "adafactor":  # embeddings, norms and head: AdamW's, in float32
        moments += 8 * (trained - matrices) * part
    buckets = gradients if strategy.shards == 1 and strategy.copies > 1 else 0.0
    kept = gradients if work.accumulation > 1 else 0.0
    forward = (weights, kept + buckets, moments, copies, activations, head)
    alone = strategy.shards == strategy.copies == 1 and not strategy.lora_rank
    masters = copies if alone and work.optimizer == "adamw" else 0.0  # `train.weights: auto` keeps the bfloat16 weights
    update = (weights, gradients + buckets, moments, masters, 0.0, 0.0)
    return Memory(*(value / GIB for value in max(forward, update, key=sum)))


# beyond this ratio of the work of a token to that of the smallest or largest measured model, a speed is extrapolated
NEAR = 1.1


def measured_ends(layers: Layers) -> tuple[Measured, Measured]:
    """The rows whose speeds a plan interpolates: SmolLM2-135M and Qwen2.5-Coder-1.5B."""
    rows = [row for row in MEASURED if row.layers == layers]
    return rows[-2], rows[-1]


# the work of a token of these two models in sequences of 2048: `Shape.flops_per_token`
WORK = {"SmolLM2-135M": 1.231e9, "Qwen2.5-Coder-1.5B": 1.032e10}


def tflops(shape: Shape, length: int, layers: Layers) -> tuple[float, bool]:
    """(measured TFLOP/s of a H200 for a model of that size, whether the size lies outside of the measured ones).

    Between SmolLM2-135M and Qwen2.5-Coder-1.5B the rate is interpolated in the logarithm of the work of a token; beyond
    them it is that of the nearer one.
    """
    low, high = measured_ends(layers)
    rates = [row.tokens_per_second * WORK[row.model] / 1e12 for row in (low, high)]
    least, most, work = WORK[low.model], WORK[high.model], shape.flops_per_token(length)
    place = math.log(work / least) / math.log(most / least)
    clamped = min(max(place, 0.0), 1.0)
    return rates[0] + clamped * (rates[1] - rates[0]), not least / NEAR <= work <= most * NEAR


@dataclass(frozen=True)
class Plan:
    """A strategy with its memory and speed on some GPUs."""

    shape: Shape
    work: Workload
    strategy: Strategy
    gpu: Gpu
    gpus: int
    memory: Memory
    tokens_per_second: float  # of all GPUs
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.total <= RESERVE * self.gpu.gib


def strategies(shape: Shape, work: Workload, gpus: int, lora_rank: int = 0, base: Base = "bfloat16"
               ) -> Iterator[Strategy]:  # fmt: skip
    """What a plan tries, the fastest first; LoRA changes what is trained and comes last, unless it is asked for.

    ``base`` is the frozen weights under LoRA, with 4-bit ones as the last resort; FSDP2 has float32 ones.
    """
    plain: Layers = "padded" if work.layers == "padded" or not work.bf16 else "varlen"
    if not lora_rank and gpus == 1 and work.layers == "compiled" and work.bf16 and shape.kind in COMPILED:
        yield Strategy(layers="compiled")
    for rank in dict.fromkeys((lora_rank, lora_rank or 16)):
        for frozen in dict.fromkeys((base, "4bit")) if rank else ("float32",):
            for checkpointing in (False, True):
                yield Strategy(1, gpus, checkpointing, rank, frozen, plain)
                if gpus > 1 and frozen != "4bit":
                    yield Strategy(gpus, 1, checkpointing, rank, layers=plain)


def make_plan(shape: Shape, work: Workload, strategy: Strategy, gpu: Gpu, gpus: int) -> Plan:
    """The plan of one strategy."""
    rate, outside = tflops(shape, work.length, strategy.layers)
    rate *= gpu.peak_tflops / GPUS["h200"].peak_tflops
    cost = shape.flops_per_token(work.length) * (4 / 3 if strategy.checkpointing else 1)
    low, high = measured_ends(strategy.layers)
    notes = [f"speed: {low.file} and {high.file} (one H200, sequences of 2048)"]
    if gpu.name != "h200":
        notes.append(f"speed extrapolates: scaled from H200 to {gpu.name} by the peaks of their data sheets")
    if outside:
        notes.append("speed extrapolates: the work of a token is outside of the measured: 0.135B to 1.8B, rows of 2048")
    if strategy.lora_rank:
        notes.append("speed extrapolates: LoRA is taken to be as fast as full fine-tuning")
    if strategy.layers == "varlen":
        notes.append("rows end to end need torch 2.11 and a GPU of compute capability 8.0; padded rows take more")
    if gpus > 1:
        notes.append("speed extrapolates: several GPUs are taken to be as fast as one each; communication is left out")
        notes.append("memory extrapolates: several GPUs are counted, not measured")
    memory = estimate(shape, work, strategy)
    return Plan(shape, work, strategy, gpu, gpus, memory, gpus * rate * 1e12 / cost, tuple(notes))


def plan(
    shape: Shape, work: Workload, *, gpu: str = "h200", gpus: int = 1, lora_rank: int = 0,
    base: Base = "bfloat16",
) -> tuple[Plan, list[Plan]]:  # fmt: skip
    """The fastest strategy that fits into the GPUs, and all strategies that were tried.

    Full fine-tuning goes before LoRA, and LoRA over bfloat16 before 4 bits, whose conversion costs uncounted time.

    Args:
        shape: the model's sizes, from `find_shape`.
        work: the rows of one GPU and their length.
        gpu: the kind of GPU, a name of `GPUS`.
        gpus: the number of GPUs.
        lora_rank: the rank of a LoRA run; 0 is full fine-tuning, with LoRA only if nothing else fits.
        base: the dtype of the frozen weights under LoRA.

    Returns:
        (the plan, all plans). If nothing fits, the plan is the one that needs the least memory.

    Raises:
        ValueError: an unknown GPU, or no GPU.

    Example:
        >>> chosen, tried = plan(find_shape("Qwen/Qwen2.5-7B"), Workload(3072, 4), gpus=8)  # doctest: +SKIP
        >>> str(chosen.strategy)  # doctest: +SKIP
        'FSDP2'
    """
    if gpus < 1:
        raise ValueError(f"plan: --gpus from 1, got {gpus}")
    kind = known_gpu(gpu)
    tried = [make_plan(shape, work, way, kind, gpus) for way in strategies(shape, work, gpus, lora_rank, base)]
    fitting = [found for found in tried if found.fits]
    return (fitting[0] if fitting else min(tried, key=lambda found: found.memory.total)), tried


@dataclass(frozen=True)
class Checkpointing:
    """Whether a run computes activations again in the backward pass, and why."""

    on: bool
    why: str = ""
    needs_compiled: bool = False  # off only because compiled layers keep less; on, if the layers are not compiled


NO_CHECKPOINTING = Checkpointing(False)


def choose_checkpointing(
    config: RunConfig, source: str, base: Base, gpus: int, gib: float | None, compiles: bool = False
) -> Checkpointing:
    """What ``train.gradient_checkpointing: auto`` means for a run: off, unless the counted memory exceeds the GPU's.

    Args:
        config: of the run.
        source: what from_pretrained takes.
        base: the frozen weights under LoRA.
        gpus: ranks of the run.
        gib: the memory of a GPU; None on a CPU.
        compiles: whether the run would compile its layers without checkpointing, as far as config and machine tell.
    """
    chosen = config.train.gradient_checkpointing
    if chosen != "auto" or gib is None:
        return Checkpointing(chosen is True)
    model, train = config.model, config.train
    try:
        shape = find_shape(source, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except ValueError as error:
        return Checkpointing(True, f"gradient checkpointing is on: the memory was not counted ({error})")
    tensor = train.tensor_parallel if gpus > 1 else 1  # ranks with the same rows, each with its part of every layer
    shards = min(train.shard_size or gpus, gpus) if train.fsdp else tensor
    lora = model.lora.r if model.lora else 0
    work = workload_of(config, gpus // tensor)
    padded = needed = estimate(shape, work, Strategy(shards, gpus // shards, False, lora, base)).total
    compiles = compiles and shape.kind in COMPILED
    if compiles:
        needed = estimate(shape, work, Strategy(layers="compiled")).total
    on = needed > RESERVE * gib
    how = "without, with compiled layers" if compiles else "without"
    words = f"gradient checkpointing is {'on' if on else 'off'}: a step needs about {needed:.0f} of {gib:.0f} GiB {how}"
    return Checkpointing(on, words, needs_compiled=not on and padded > RESERVE * gib)


def workload_of(config: RunConfig, gpus: int) -> Workload:
    """What one of ``gpus`` GPUs computes in a step of a run, at its longest rows.

    Raises:
        ConfigError: the batch cannot be divided among the GPUs.
    """
    train = config.train
    if train.batch_size % (train.micro_batch_size * gpus):
        raise ConfigError(
            f"plan: train.batch_size {train.batch_size} cannot be {gpus} GPUs x {train.micro_batch_size} rows x a "
            f"whole number; change batch_size, micro_batch_size or --gpus"
        )
    accumulation = train.batch_size // (train.micro_batch_size * gpus)
    layers: Layers = "padded"
    if train.attention in ("auto", "varlen") and train.precision != "fp32":
        masters = train.optimizer == "adamw" and train.weights != "float32"
        layers = "compiled" if masters and train.compile in ("auto", "layers") and not train.liger else "varlen"
    return Workload(
        config.data.max_length, train.micro_batch_size, accumulation, train.precision != "fp32", train.optimizer, layers
    )
