"""Load the model of a finished run, of a checkpoint, or of anything that `deftune train` takes as a model.

The model's encoding, the arguments of an `Encoder`, is that of its training run.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deftune.artifacts.checkpoints import PREFIX, checkpoints, step_of
from deftune.artifacts.config import Data
from deftune.artifacts.folders import MANIFEST, FolderError, read_manifest, verify
from deftune.artifacts.models import (
    cannot_load,
    check_loaded,
    load_model,
    load_tokenizer,
    quantized_dtype,
    read_object,
    resolve_model,
)
from deftune.artifacts.options import OptionError
from deftune.artifacts.runs import Run
from deftune.artifacts.templates import set_template


def load_result(
    name: str, notice: Callable[[str], None] = lambda _: None, *, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load the model and tokenizer of a run, or of anything that `deftune train` takes as a model.

    Args:
        name: a run's folder, ``RUN:200`` for its checkpoint of step 200, ``RUN:0`` for the model that the run began
            with, or a hub id, a model folder, a .gguf file, smollm2.
        notice: gets a line about anything that takes long.
        trust_remote_code: run the code of the model's repository. A run's own config does not decide this: the folder
            may come from somebody else.

    Returns:
        (model, tokenizer).
    """
    source, tokenizer, options, adapter = locate(name, notice, trust_remote_code=trust_remote_code)
    return (load_model(source, **options) if adapter is None else load_adapted(source, options, adapter)), tokenizer


def load_adapted(source: str, options: dict[str, Any], adapter: Path) -> Any:
    """A base model with its adapter, all in float32; weights that were trained on in 4 bits have their 4-bit values."""
    model = load_model(source, **options)
    if getattr(model, "is_quantized", False):
        model = model.dequantize().float()
    return load_adapter(model, adapter)


# what `deftune train` sets in an adapter's config, and what peft notes there
ADAPTER_KEYS = {"r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "inference_mode", "peft_version",
                "base_model_name_or_path", "revision"}  # fmt: skip


def check_adapter(path: Path) -> None:
    """Refuse a LoRA config that `deftune train` does not write: peft imports the module that some of its keys name."""
    from peft import LoraConfig

    usual: dict[str, Any] = LoraConfig().to_dict()
    for key, value in read_object(path).items():
        if key not in ADAPTER_KEYS and value != usual.get(key) and value not in (None, False, {}, []):
            raise ValueError(f"{path}: {key}: {value!r} is not what `deftune train` writes; the adapter is not loaded")


def load_adapter(model: Any, folder: Path) -> Any:
    """``model`` with the LoRA adapter of a folder, all of whose weights are from its file.

    Raises:
        ValueError: the adapter cannot be read, or does not fit the model.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    check_adapter(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ValueError(f"{folder}: has no {path.name}; an adapter is read from safetensors only")
    try:
        with safe_open(path, "pt") as file:
            found = set(file.keys())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # refused below, with their names
            adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # the adapter comes from anywhere, and peft says many things about one that is wrong
        raise cannot_load(str(folder), error) from error
    # save_embedding_layers: otherwise peft looks the base model up on the hub
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    check_loaded(str(folder), "adapter_config.json", missing=wanted - found, unexpected=found - wanted)
    return adapted


def locate(
    name: str, notice: Callable[[str], None], *, trust_remote_code: bool = False
) -> tuple[str, Any, dict[str, Any], Path | None]:
    """(what from_pretrained takes, the tokenizer, from_pretrained's options, the folder of a LoRA adapter or None)."""
    run, step = parse_result(name)
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if run is None:
        source = resolve_model(name, notice)
        return source, load_tokenizer(source, **trust), trust, None
    config = run.read_config()
    if config.model.trust_remote_code and not trust_remote_code:
        notice(
            f"{name}: the run was trained with the code of {config.model.name}, which is not run; read that code, and "
            f"pass --trust-remote-code if you trust it"
        )
    options: dict[str, Any] = {"revision": config.model.revision, **trust}
    if step == 0:
        source = resolve_model(config.model.name, notice, revision=config.model.revision)
        tokenizer = load_tokenizer(source, **options)
        set_template(tokenizer, config.data.template)
        return source, tokenizer, options, None
    folder = result_folder(run) if step is None else checkpoint_folder(run, step)
    tokenizer = load_tokenizer(str(folder), **trust)
    if not is_adapter(folder):
        return str(folder), tokenizer, trust, None
    source = resolve_model(config.model.name, notice, revision=config.model.revision)
    if config.model.quantization is not None:
        options |= {"quantization": config.model.quantization, "dtype": quantized_dtype(config.model)}
    return source, tokenizer, options, folder


def plain_model(
    name: str, place: Path, notice: Callable[[str], None] = lambda _: None, *, trust_remote_code: bool = False
) -> tuple[str, Any, dict[str, Any]]:
    """(what from_pretrained takes, the tokenizer, its options), without an adapter: one is merged, into ``place``."""
    source, tokenizer, options, adapter = locate(name, notice, trust_remote_code=trust_remote_code)
    if adapter is None:
        return source, tokenizer, options
    notice(f"adding the adapter of {name} into its model's weights, in {place}")
    merged = load_adapted(source, options, adapter).merge_and_unload(safe_merge=True)
    merged.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place), tokenizer, {"trust_remote_code": trust_remote_code}


def parse_result(name: str) -> tuple[Run | None, int | None]:
    """(run, step) of ``RUN``, ``RUN:200`` or ``RUN:checkpoint-200``; (None, None) for what is no run.

    >>> parse_result("smollm2")
    (None, None)
    """
    folder, colon, step = name.rpartition(":")
    number = step.removeprefix(PREFIX)
    if colon and Run(Path(folder)).config.is_file():
        if not number.isdecimal():
            raise ValueError(f"{name}: {step!r} is no step; write RUN:200")
        return Run(Path(folder)), int(number)
    run = Run(Path(name))
    return (run, None) if run.config.is_file() else (None, None)


def checkpoint_folder(run: Run, step: int) -> Path:
    """Where a run's checkpoint of a step lies."""
    folder = run.checkpoints / f"{PREFIX}{step}"
    if not folder.is_dir():
        kept = ", ".join(str(step_of(path)) for path in checkpoints(run.checkpoints)) or "none"
        raise ValueError(
            f"{run.folder}: has no checkpoint of step {step} (it has {kept}, and 0 is the model it began with); "
            f"train.save_steps and train.keep say which are kept"
        )
    return verified(folder)


def result_folder(run: Run) -> Path:
    """Where a finished run's model lies."""
    if not run.model.is_dir():
        run.read_config()  # refuses what is no run
        state = run.status()["state"]
        raise ValueError(f"{run.folder}: has no model yet (the run is {state}); `deftune train {run.folder}` goes on")
    return verified(run.model)


SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file of weights without a manifest: training changes nearly all of its bytes


def weights_digest(model: str) -> str | None:
    """What tells a model's weights from other ones under the same name, without loading them.

    Of a sealed folder the sha256 of its manifest's entries for weights; of other folders and of .gguf files that of
    their sizes and of `SAMPLES` pieces of each file. A LoRA adapter's digest contains that of its base model.

    Returns:
        The digest; None for a hub id, a packaged model, and for files that are not there or cannot be read.
    """
    try:
        run, step = parse_result(model)
        if run is None:
            path = Path(model).expanduser()
            return _digest(path) if path.is_dir() or path.suffix == ".gguf" else None
        config = run.read_config()
        if step == 0:
            return weights_digest(config.model.name)
        folder = run.model if step is None else run.checkpoints / f"{PREFIX}{step}"
        digest = _digest(folder)
        return f"{digest}+{weights_digest(config.model.name)}" if is_adapter(folder) else digest
    except (OSError, ValueError):
        return None


def _digest(place: Path) -> str:
    """`weights_digest` of a folder or a file."""
    digest = hashlib.sha256()
    if (place / MANIFEST).is_file():
        for name, entry in sorted(read_manifest(place / MANIFEST)[1].items()):
            if name.endswith(".safetensors"):
                digest.update(f"{name} {entry}\n".encode())
        return digest.hexdigest()[:16]
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"{place}: no weights")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for piece in range(SAMPLES):
                file.seek(piece * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def verified(folder: Path) -> Path:
    """The folder, if its files have the names and sizes that its manifest states; `verify_folder` compares hashes."""
    try:
        verify(folder, hashes=False)
    except FolderError as error:
        raise ValueError(f"{error}; it is not loaded") from error
    return folder


def verify_folder(folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Compare every byte of a run, a checkpoint or a model folder with the sha256 written beside it.

    Args:
        folder: a sealed folder (it has a manifest.json), or a run: then its checkpoints, its model and other sealed
            folders in it.
        say: gets a line for each folder that is whole.

    Raises:
        FolderError: a file is not as it was written.
        ValueError: there is nothing to verify.
    """
    inside = [folder] if (folder / MANIFEST).is_file() or step_of(folder) is not None else []
    if not inside and folder.is_dir():
        sealed = {path.parent for path in folder.glob(f"*/{MANIFEST}")} | {Run(folder).model} & set(folder.iterdir())
        inside = [*checkpoints(Run(folder).checkpoints), *sorted(sealed)]
    if not inside:
        raise ValueError(f"{folder}: nothing to verify; name a run, a checkpoint or a model folder with a {MANIFEST}")
    for place in inside:
        sizes = [entry["bytes"] for entry in verify(place)["files"].values()]
        say(f"{place}: {len(sizes)} files, {sum(sizes):,} bytes, as they were written")


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


# --- how a model's rows and prompts become tokens ---------------------------------------------------------------------

PROMPT_OPTIONS = ("template", "template_options", "end_tokens", "bos")  # of an Encoder
ENCODER_OPTIONS = (*PROMPT_OPTIONS, "mask", "max_length", "overlong")


def encoder_options(data: Data) -> dict[str, Any]:
    """The arguments of `Encoder` in a config's `data` section."""
    return {name: getattr(data, name) for name in ENCODER_OPTIONS}


def encoding_of(model: str | Run, **given: Any) -> dict[str, Any]:
    """The arguments of `Encoder` for a model: those of its training where ``model`` is a run, else the defaults.

    >>> encoding_of("smollm2", max_length=512, template=None)["max_length"]
    512

    Args:
        model: a `Run`, a run's folder, ``RUN:STEP``, or any other name of a model.
        given: arguments that replace those of the run or the defaults; None replaces nothing.
    """
    run = model if isinstance(model, Run) else parse_result(model)[0]
    options = encoder_options(Data.model_construct() if run is None else run.read_config().data)
    if run is not None and (time := run.template_time()):
        options["now"] = time  # the date in the prompts is that of the training, not today's
    return options | {name: value for name, value in given.items() if value is not None}


def reading_of(
    model: str | Run, data: str, *, format: str = "auto", fields: Mapping[str, str] | None = None
) -> dict[str, Any]:  # fmt: skip
    """How `read_rows` reads data that a run was trained or evaluated on: as its config says, unless more is given.

    Args:
        model: a `Run`, a run's folder, ``RUN:STEP``, or any other name of a model.
        data: a file, a folder, or a hub id; one of the run's sources is found by its path.
        format: replaces the source's format, and its fields.
        fields: replace the source's fields, and its format.
    """
    run = model if isinstance(model, Run) else parse_result(model)[0]
    if run is not None and format == "auto" and not fields:
        about = run.read_config().data
        for source in (*about.train, *about.eval):
            if source.path and (source.path == data or Path(source.path).resolve() == Path(data).resolve()):
                return {"format": source.format, "fields": source.fields or None}
    return {"format": format, "fields": fields}


def prompt_options(encoding: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Encoder` that the tokens of a prompt depend on."""
    return {name: encoding[name] for name in (*PROMPT_OPTIONS, "now") if name in encoding}


def encoding_for(model: str, template: str | None = None, like: str | Path | None = None) -> dict[str, Any]:
    """The arguments of `Encoder` in an evaluation: those of the run that is evaluated, or of ``like``, or the defaults.

    Raises:
        OptionError: ``template`` or ``like`` beside a run, whose own options are used.
    """
    own, other = parse_result(model)[0], None if like is None else Run(Path(like))
    run = own or other
    if run is not None and template is not None:
        raise OptionError("template", f"{run.folder} was trained with its own (data.template); leave it out")
    if own is not None and other is not None:
        raise OptionError("like", f"{own.folder} is a run and is encoded as it was trained; leave it out")
    return encoding_of(other or model, template=template)
