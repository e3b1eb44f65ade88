"""The card of a tuned model: the `README.md` beside its weights, published with them, without a local path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from deftune.artifacts.config import RunConfig, Source, render_yaml
from deftune.artifacts.names import HUB_ID, hub_model, is_local, model_license, shown_model, shown_path
from deftune.artifacts.runs import Run
from deftune.data.files import SUFFIXES
from deftune.training.data_record import facts
from deftune.training.preparation import Prepared

NUMBERS = {"train": ("loss", "nll", "p", "focus", "gate"), "eval": ("eval_loss", "eval_nll", "eval_p")}


def render_card(prepared: Prepared, run: Run, *, kept: int | None = None, holds: str = "") -> str:
    """What the model is, what it was tuned on and how, and the numbers of the step whose weights it holds.

    ``kept`` is that step; None for the last one. ``holds`` says it in words.
    """
    return card_text(prepared.config, facts(prepared), run, kept=kept, holds=holds)


def render_merged_card(run: Run) -> str:
    """The card of a LoRA run's adapter merged into its base model."""
    try:
        lines = json.loads((run.folder / "data.json").read_text(encoding="utf-8"))["facts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        lines = []
    kept = run.status().get("kept")
    return card_text(
        run.read_config(), [line for line in lines if isinstance(line, str)], run,
        kept=kept if isinstance(kept, int) else None, merged=True,
    )  # fmt: skip


def name_base_model(folder: Path, config: RunConfig) -> None:
    """In an adapter's config, name the base model by its hub id: peft writes the folder it was loaded from."""
    path = folder / "adapter_config.json"
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        content["base_model_name_or_path"] = hub_model(config.model.name)
        path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")


def card_text(
    config: RunConfig, lines: Sequence[str], run: Run, *, kept: int | None = None, holds: str = "", merged: bool = False
) -> str:
    adapter = config.model.lora is not None and not merged
    what = "A LoRA adapter for" if adapter else "A LoRA adapter merged into" if merged else "Tuned from"
    base, hub = shown_model(config.model.name), hub_model(config.model.name)
    source = f" (from `{hub}`)" if hub and hub != base else ""
    if is_local(config.model.name):  # what a run recorded before names were shown without their folders
        lines = [line.replace(config.model.name, base) for line in lines]
    for path in [data.path for data in [*config.data.train, *config.data.eval] if data.path and is_local(data.path)]:
        lines = [line.replace(path, shown_path(path)) for line in lines]  # dropped rows are named by their file
    parts = [
        f"---\n{yaml.safe_dump(front_matter_of(config, adapter), sort_keys=False, allow_unicode=True)}---",
        f"# {run.folder.resolve().name}",
        f"{what} {base}{source}, trained with the objective `{config.objective}` by deftune."
        + (f" It holds {holds}." if holds else ""),
        "## Data\n\n" + "\n".join(f"- {source_text(source)}" for source in config.data.train),
        "## Training\n\n" + "\n".join(f"- {line}" for line in lines),
        numbers_table(run, kept),
        "## Configuration\n\n`config.yaml` of the run, without the folders of the machine it ran on:",
        f"```yaml\n{public_yaml(config)}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_matter_of(config: RunConfig, adapter: bool) -> dict[str, Any]:
    """What the hub reads: the base model by its hub id, licence and datasets where they are known."""
    name = config.model.name
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    if hub := hub_model(name):
        front |= {"base_model": hub, "base_model_relation": "adapter" if adapter else "finetune"}
    if license := model_license(name):
        front["license"] = license
    if datasets := list(dict.fromkeys(found for source in config.data.train if (found := hub_dataset(source)))):
        front["datasets"] = datasets
    return {**front, "tags": ["deftune", "sft"]}


def hub_dataset(source: Source) -> str | None:
    """The id of a dataset on the hub, None for a file, a folder, or generated rows."""
    name = (source.path or "").partition(":")[0]
    is_file = name.endswith(SUFFIXES)
    return name if HUB_ID.fullmatch(name) and not is_file and not Path(name).exists() else None


def source_text(source: Source) -> str:
    name = f"generated: `{source.generate}`" if source.generate else f"`{shown_path(source.path or '')}`"
    details = [f"split {source.split}" if source.split else "", f"first {source.limit:,} rows" if source.limit else "",
               f"weight {source.weight:g}" if source.weight is not None else "",
               f"{source.exchange:.0%} of the answers exchanged" if source.exchange else ""]  # fmt: skip
    return ", ".join([name, *filter(None, details)])


def numbers_table(run: Run, kept: int | None) -> str:
    """The last recorded numbers up to the step whose weights were kept."""
    records = [record for record in run.read_metrics() if kept is None or record["step"] <= kept]
    found: dict[str, float] = {}
    for kind, names in NUMBERS.items():
        last = next((record for record in reversed(records) if record.get("kind") == kind), {})
        found |= {name: last[name] for name in names if isinstance(last.get(name), int | float)}
    if not found:
        return ""
    step = f"step {kept}, whose weights were kept" if kept is not None else "last step"
    return f"| {step} | |\n|---|---|\n" + "\n".join(f"| {name} | {value:.4g} |" for name, value in found.items())


def public_yaml(config: RunConfig) -> str:
    """A config's YAML, every local path in it reduced to its last part."""
    content = yaml.safe_load(render_yaml(config))
    content["run"] = Path(content["run"]).name
    return yaml.safe_dump(without_folders(content), sort_keys=False, allow_unicode=True)


def without_folders(value: Any) -> Any:
    """
    >>> without_folders({"path": "/home/me/train.jsonl", "limit": 5, "objective": "deft"})
    {'path': 'train.jsonl', 'limit': 5, 'objective': 'deft'}
    """
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return shown_path(value) if isinstance(value, str) and is_local(value) else value
