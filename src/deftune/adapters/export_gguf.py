"""`deftune export gguf`: a run or a model as one GGUF file, for llama.cpp and the programs that are built on it.

The file has what llama.cpp's own convert_hf_to_gguf.py writes: the keys of the architecture, the tensors under
llama.cpp's names, the tokenizer and the chat template. llama.cpp fixes some values of an architecture in its code; a
model that has another value there is refused, because llama.cpp would compute something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deftune._suggest import did_you_mean
from deftune.adapters.gguf_tokenizer import describe_tokenizer
from deftune.artifacts.display import quiet
from deftune.artifacts.files import sync
from deftune.artifacts.folders import disk_error
from deftune.artifacts.names import model_license
from deftune.artifacts.results import encoding_of, load_result, parse_result

TYPES = ("f32", "f16", "bf16", "q8_0")
LARGEST_F16 = 65504.0
CONVERTER = "llama.cpp's convert_hf_to_gguf.py converts the folder that `deftune merge` or the run's model/ holds"


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores a model: its name there, and the values of a config that llama.cpp takes for granted."""

    name: str
    fixed: dict[str, Any]
    permuted: bool = False  # llama.cpp rotates neighbouring pairs of a head, transformers its two halves
    norm_shift: float = 0.0  # what transformers adds to the weights of norms, and llama.cpp does not


ARCHITECTURES = {
    "llama": Architecture("llama", {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}, permuted=True),
    "qwen2": Architecture("qwen2", {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture("qwen3", {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}),
    "gemma3_text": Architecture(
        "gemma3",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        norm_shift=1.0,
    ),
}


@dataclass(frozen=True)
class ExportedGguf:
    """The file, its architecture in llama.cpp, and what is not as asked for."""

    path: Path
    architecture: str
    num_tensors: int
    num_bytes: int
    notes: list[str] = field(default_factory=list[str])


def export_gguf(
    name: str, out: Path, *, type: str = "f16", notice: Callable[[str], None] = lambda _: None,
    trust_remote_code: bool = False,
) -> ExportedGguf:  # fmt: skip
    """Write a run or a model as a GGUF file; the adapter of a LoRA run is merged into the weights first.

    Matrices have the type that is asked for; norms and biases are float32. The whole model is held in memory in
    float32 while the file is written.

    Args:
        name: a run's folder, ``RUN:200`` for a checkpoint, or what `deftune train` takes as a model.
        out: the file to write; its name ends in .gguf.
        type: "f32", "f16", "bf16" or "q8_0" (8 bits, in blocks of 32 with a scale).
        notice: gets a line about anything that takes long.
        trust_remote_code: run the code of the model's repository.

    Returns:
        The file, and notes on what differs from what was asked for.

    Raises:
        ValueError: llama.cpp has no such architecture, tokenizer or option, or the file exists.

    Example:
        ``export_gguf("runs/first", Path("first.gguf"), type="q8_0").num_bytes``
    """
    if type not in TYPES:
        raise ValueError(f"export gguf: unknown --type {type!r}.{did_you_mean(type, TYPES)} Known: {', '.join(TYPES)}")
    if out.suffix != ".gguf":
        raise ValueError(f"export gguf: --out {out}: the name of a GGUF file ends in .gguf")
    if out.exists():
        raise ValueError(f"export gguf: {out} exists; name another file")
    with quiet():
        model, tokenizer = load_result(name, notice, trust_remote_code=trust_remote_code)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload(safe_merge=True)
    return write_gguf(
        model, tokenizer, out, type=type, about=facts_of(name), end_tokens=encoding_of(name)["end_tokens"]
    )


def facts_of(name: str) -> dict[str, str]:
    """The name and, where it is known, the licence that the file states."""
    run, _ = parse_result(name)
    path = Path(name)
    shown = run.folder.resolve().name if run else path.resolve().name if path.exists() else name
    license = model_license(run.read_config().model.name if run else name)
    return {"name": shown, **({"license": license} if license else {})}


def write_gguf(
    model: Any, tokenizer: Any, out: Path, *, type: str, about: dict[str, str], end_tokens: list[str]
) -> ExportedGguf:
    """`export_gguf` of a model that is loaded already."""
    import gguf

    config = model.config.get_text_config()
    architecture = check_architecture(config)
    # llama.cpp's writer opens the file itself; the file gets its name when it is complete
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.writing-{os.getpid()}")
    writer: Any = gguf.GGUFWriter(temporary, architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    for key, value in about.items():
        getattr(writer, f"add_{key}")(value)
    add_parameters(writer, config, architecture)
    writer.add_file_type(getattr(gguf.LlamaFileType, "ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    notes = describe_tokenizer(tokenizer, config.vocab_size, end_tokens).add_to(writer)
    notes += add_tensors(writer, model, config, architecture, type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.flush()
        writer.close()
        sync(temporary)
        os.replace(temporary, out)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if reason := disk_error(error) if isinstance(error, Exception) else None:
            raise ValueError(f"export gguf: {out}: could not be written ({reason}); nothing of it was kept") from error
        raise
    sync(out.parent)
    return ExportedGguf(out, architecture.name, sum(map(len, writer.tensors)), out.stat().st_size, notes)


def check_architecture(config: Any) -> Architecture:
    """How llama.cpp stores this model; a model that llama.cpp would compute in another way is refused."""
    kind: str = config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(f"export gguf: {kind} is not supported ({', '.join(ARCHITECTURES)} are); {CONVERTER}")
    architecture = ARCHITECTURES[kind]
    wanted = dict(architecture.fixed)
    if architecture.name == "gemma3":
        # the scale of attention is no key of the file; llama.cpp knows the 27B model by its 62 layers
        large = config.num_hidden_layers == 62
        wanted["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads if large else config.head_dim
        wanted["layer_types"] = [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention"
            for layer in range(config.num_hidden_layers)
        ]
    for key, value in wanted.items():
        found = getattr(config, key, value)
        if found != value and not (value is False and found is None):
            raise ValueError(
                f"export gguf: {key} of the model is {found!r}, and llama.cpp's {architecture.name} always has "
                f"{value!r}; the file would compute something else"
            )
    return architecture


# --- keys -------------------------------------------------------------------------------------------------------------


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_parameters(writer: Any, config: Any, architecture: Architecture) -> None:
    """The sizes of the model and its rotary positions."""
    import gguf

    size = head_size(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture.name == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        local = rope_of(config, "sliding_attention")["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)  # by its name: older gguf packages have no method for it
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)


def rope_of(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """The rotary positions of a kind of layers; types that are not written here are refused."""
    parameters: dict[str, Any] = config.rope_parameters
    rope: dict[str, Any] = parameters.get(layers, parameters)
    known = ("default",) if layers == "sliding_attention" else ("default", "linear")
    known += ("llama3",) if config.model_type == "llama" else ()  # llama.cpp reads its factors for Llama alone
    if rope["rope_type"] not in known or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"export gguf: rotary positions of type {rope['rope_type']!r} are not supported "
            f"({', '.join(known)} on whole heads are); {CONVERTER}"
        )
    return rope


# --- tensors ----------------------------------------------------------------------------------------------------------


def add_tensors(writer: Any, model: Any, config: Any, architecture: Architecture, type: str) -> list[str]:
    """Add the tensors of the file, in the order of the model; the notes on tensors that have another type."""
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, type.upper())
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    notes: list[str] = []
    if rope_of(config)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    for name, value in _weights(model):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ValueError(f"export gguf: llama.cpp's {architecture.name} has no tensor for {name}; {CONVERTER}")
        chosen = kind
        if value.dim() < 2 or stored.endswith("_norm.weight"):
            chosen = gguf.GGMLQuantizationType.F32
        elif kind.name == "Q8_0" and value.shape[-1] % 32:
            chosen = gguf.GGMLQuantizationType.F16
            notes.append(f"{stored} is f16: q8_0 needs rows of a multiple of 32 values, these have {value.shape[-1]}")
        read = partial(_read, name, value, config, architecture)
        writer.add_tensor(stored, _converted_later(stored, read, value.shape, chosen), raw_dtype=chosen)
    return notes


def _converted_later(name: str, read: Callable[[], NDArray[np.float32]], shape: Any, kind: Any) -> Any:
    """A tensor that is read and converted when it is written: converted tensors are not all held."""
    from gguf import LazyNumpyTensor
    from gguf.quants import quantize

    def checked() -> NDArray[np.float32]:
        values = np.ascontiguousarray(read())
        largest = float(np.abs(values).max(initial=0.0))
        if not np.isfinite(largest):
            raise ValueError(f"export gguf: {name} holds NaN or infinity; the weights are damaged")
        if kind.name == "F16" and largest > LARGEST_F16:
            raise ValueError(f"export gguf: {name} holds {largest:.4g}, more than f16 can; use --type bf16")
        return values

    form = LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, tuple(shape))
    return quantize(LazyNumpyTensor(meta=form, func=checked), kind)  # pyright: ignore


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of each weight once: a tied head is not stored, llama.cpp takes the embedding for it."""
    seen: set[int] = set()
    for name, value in model.named_parameters(remove_duplicate=False):
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            yield name, value.detach()


def _read(name: str, value: Any, config: Any, architecture: Architecture) -> NDArray[np.float32]:
    """A weight in llama.cpp's layout."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found: NDArray[np.float32] = value.float().cpu().numpy()
    module = name.split(".")[-2]
    if architecture.permuted and module in heads:
        found = interleave_halves(found, heads[module])
    if architecture.norm_shift and module.endswith("norm"):
        found = found + np.float32(architecture.norm_shift)
    return found


def interleave_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of each head, its first half between its second: rotary pairs become neighbours.

    >>> interleave_halves(np.arange(8, dtype=np.float32)[:, None], 2).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    parts = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(config: Any) -> NDArray[np.float32]:
    """What llama.cpp divides each rotary frequency by: the plain frequencies over those of Llama 3."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled: Any = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    size = head_size(config)
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    plain = rope_of(config)["rope_theta"] ** -exponents
    return (plain / scaled.double().numpy()).astype(np.float32)
