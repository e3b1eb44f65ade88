"""The paper's runs: one table from which the training config of every cell of its result tables is made.

A recipe is one of `CELLS` x `METHODS`; its settings come from `BACKBONES` and `REGIMES`, and `PROVENANCE` says of each
whether the paper states it, only the code released with the paper has it, or it is ours. A cell that evaluates a run of
another table has no recipe of its own: the recipe lists all its tables. Base rows need no training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import yaml

from deftune._suggest import did_you_mean
from deftune.artifacts.config import RunConfig, load_config


class Backbone(NamedTuple):
    """A base model, under its name on the hub."""

    hub: str
    # None: the chat template that its tokenizer ships. Base models of Llama ship none, and DeepSeekMath's is written as
    # `plain` in the released code. ChatML's marks are no tokens of either, so that answers would not end in one.
    template: str | None
    learning_rate: float
    fsdp: bool  # fp32 weights, gradients and AdamW's moments take 16 bytes a parameter: 7B and more need sharding


BACKBONES: dict[str, Backbone] = {
    "llama-3.1-8b": Backbone("meta-llama/Llama-3.1-8B", "plain", 2e-5, True),
    "llama-3.2-3b": Backbone("meta-llama/Llama-3.2-3B", "plain", 5e-5, False),
    "deepseek-math-7b": Backbone("deepseek-ai/deepseek-math-7b-base", "plain", 5e-5, True),
    "qwen2.5-math-1.5b": Backbone("Qwen/Qwen2.5-Math-1.5B", None, 5e-5, False),
    "qwen2.5-math-7b": Backbone("Qwen/Qwen2.5-Math-7B", None, 5e-5, True),
    "qwen2.5-1.5b": Backbone("Qwen/Qwen2.5-1.5B", None, 5e-5, False),
    "qwen2.5-7b": Backbone("Qwen/Qwen2.5-7B", None, 5e-5, True),
}


class Regime(NamedTuple):
    """Data, and the settings that go with it. ``steps`` are an epoch's, without a last batch that is not full."""

    source: dict[str, Any]
    max_length: int
    micro_batch_size: int
    weight_decay: float
    steps: int | None
    total: int | None = None  # rows drawn at random from the source; None: all


BATCH_SIZE = 256

REGIMES: dict[str, Regime] = {
    # 264 full batches of 67k rows
    "strong": Regime(
        {"path": "gaotang/numina-cot-subset-67k", "format": "verl", "split": "train"}, 3072, 4, 0.01, steps=264
    ),
    # 91 full batches of 23,493 rows
    "intermediate": Regime(
        {"path": "UCSC-VLAA/m23k-tokenized", "format": "m23k", "split": "train"}, 800, 16, 0.01, steps=91
    ),
    # 156 full batches of 40,000 rows
    "weak": Regime({"generate": "figlet_font", "split": "train", "limit": 40_000}, 800, 16, 1e-5, steps=156),
    # rows for the strong regime's 264 batches; drawn at random, because the mixture is said to be ordered by source
    "mixed": Regime(
        {"path": "allenai/tulu-3-sft-mixture", "format": "tulu3", "split": "train"},
        3072, 4, 0.01, steps=None, total=264 * BATCH_SIZE,
    ),
}  # fmt: skip


METHODS: dict[str, str] = {"nll": "-logp", "linear": "-p", "eaft": "EAFT", "cayley": "Cayley-Trans", "deft": "DEFT"}
"""The rows of the result tables: objective -> as the paper writes it."""


class Cells(NamedTuple):
    """The trained cells of a table: every backbone with every method, for every number of epochs."""

    regime: str
    backbones: tuple[str, ...]
    evaluated_on: str
    epochs: tuple[int, ...] = (1,)


CELLS: dict[str, Cells] = {
    "Table 1": Cells(
        "strong", ("llama-3.1-8b", "deepseek-math-7b", "qwen2.5-math-1.5b", "qwen2.5-math-7b"), "mathematics"
    ),
    "Table 2": Cells(
        "intermediate", ("llama-3.1-8b", "llama-3.2-3b", "qwen2.5-1.5b", "qwen2.5-math-7b"), "medicine"
    ),
    "Table 3": Cells("weak", ("llama-3.1-8b", "llama-3.2-3b", "qwen2.5-1.5b", "qwen2.5-7b"), "FigFont"),
    "Table 4": Cells("mixed", ("qwen2.5-1.5b",), "averages of Tables 7 and 8"),
    "Table 5": Cells("strong", ("llama-3.1-8b",), "medicine, out of domain"),
    "Table 6": Cells("strong", ("llama-3.1-8b",), "mathematics", epochs=(1, 2, 3, 4)),
    "Table 7": Cells("mixed", ("qwen2.5-1.5b",), "medicine"),
    "Table 8": Cells("mixed", ("qwen2.5-1.5b",), "mathematics"),
}  # fmt: skip


class Mark(NamedTuple):
    """The source of a setting, and a note on it."""

    origin: Literal["paper", "released code", "ours"]
    note: str = ""

    def __str__(self) -> str:
        return f"# {self.origin}: {self.note}" if self.note else f"# {self.origin}"


PROVENANCE: dict[str, dict[str, Mark]] = {
    "all": {
        "run": Mark("ours"),
        "objective": Mark("paper"),
        "model.name": Mark("paper"),
        "data.train.split": Mark("released code"),
        "data.train.format": Mark("ours", "how the rows are read"),
        "data.template": Mark("ours", "the tokenizer's own, in training and evaluation"),
        "data.template=plain": Mark("ours", "the tokenizer ships none; the released code writes Llama 3's by hand"),
        "data.mask": Mark("released code", "the answer and the token that ends it"),
        "data.max_length": Mark("released code"),
        "data.overlong": Mark("released code", "cut on the right"),
        "train.learning_rate": Mark("paper"),
        "train.epochs": Mark("paper"),
        "train.max_steps": Mark("released code", "full batches only"),
        "train.batch_size": Mark("released code"),
        "train.micro_batch_size": Mark("released code"),
        "train.weight_decay": Mark("released code"),
        "train.betas": Mark("released code"),
        "train.warmup_ratio": Mark("paper"),
        "train.schedule": Mark("paper"),
        "train.clip": Mark("released code", "there of gradients summed over micro-batches, here of their mean"),
        "train.seed": Mark("ours", "the released code has one and never reads it"),
        "train.precision": Mark("ours", "bf16 compute over fp32 weights; the released code keeps bf16 weights"),
        "train.gradient_checkpointing": Mark("released code"),
        "train.fsdp=true": Mark("released code"),
        "train.fsdp=false": Mark("ours", "the model and its optimizer fit one GPU"),
    },
    "strong": {
        "data.train.path": Mark("released code", "the paper says NuminaMath"),
        "data.train.format": Mark("ours", "extra_info.question and .answer, which the released code reads"),
    },
    "intermediate": {
        "data.train.path": Mark("paper", "m23k"),
        "data.train.format": Mark("released code", "the answer without the reasoning trace"),
    },
    "weak": {
        "data.train.generate": Mark("paper", "FigFont of reasoning_gym; seed and word lengths from the released code"),
        "data.train.limit": Mark("released code"),
    },
    "mixed": {
        "data.train.path": Mark("paper"),
        "data.train.split": Mark("ours", "it has no other"),
        "data.total": Mark("ours", "the paper says a subset; drawn at random, as many as 264 steps take"),
        "data.mask": Mark("ours", "every assistant turn"),
        "data.max_length": Mark("ours", "the strong regime's"),
        "data.overlong": Mark("ours", "the strong regime's"),
        "train.batch_size": Mark("ours", "the other regimes'"),
        "train.micro_batch_size": Mark("ours", "the strong regime's"),
        "train.weight_decay": Mark("ours", "the strong regime's"),
        "train.betas": Mark("ours", "the other regimes'"),
        "train.clip": Mark("ours", "the other regimes'"),
        "train.gradient_checkpointing": Mark("ours", "the other regimes'"),
    },
    "multi-epoch": {
        "train.epochs": Mark("paper", "one run for each number of epochs, with its own schedule, is our reading"),
        "train.max_steps": Mark("ours", "the released code's 264 for each epoch"),
    },
    "llama-3.1-8b": {
        "train.learning_rate": Mark("paper", "it prints LLaMA-3.8B; the released code has it here"),
    },
    "deepseek-math-7b": {
        "data.template=plain": Mark("released code", "User: ... Assistant: ..., there with a line asking for a box"),
    },
    "eaft": {
        "objective": Mark("ours", "the paper gives no setting and the code has no EAFT: top 20, divided by ln 20"),
    },
}
"""Marks by scope and setting, or setting=value; a recipe's narrower scopes come before "all"."""


@dataclass(frozen=True)
class Recipe:
    """A training run of the paper, and the tables it is in (the first is where it is trained for)."""

    name: str
    tables: tuple[str, ...]
    regime: str
    backbone: str
    method: str
    epochs: int

    @property
    def table(self) -> str:
        return self.tables[0]

    def config(self) -> dict[str, Any]:
        """What goes in the run's YAML file; a fresh dict."""
        backbone, regime = BACKBONES[self.backbone], REGIMES[self.regime]
        return {
            "run": f"runs/{self.name}",
            "objective": self.method,
            "model": {"name": backbone.hub},
            "data": {
                "train": [dict(regime.source)],
                **({"total": regime.total} if regime.total else {}),
                "template": backbone.template,
                "mask": "assistant",
                "max_length": regime.max_length,
                "overlong": "truncate",
            },
            "train": {
                "learning_rate": backbone.learning_rate,
                "epochs": self.epochs,
                **({"max_steps": regime.steps * self.epochs} if regime.steps else {}),
                "batch_size": BATCH_SIZE,
                "micro_batch_size": regime.micro_batch_size,
                "weight_decay": regime.weight_decay,
                "betas": [0.9, 0.95],
                "warmup_ratio": 0.1,
                "schedule": "cosine",
                "clip": 1.0,
                "seed": 42,
                "precision": "bf16",
                "gradient_checkpointing": True,
                "fsdp": backbone.fsdp,
            },
        }

    def resolve(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The checked config, with ``a.b=c`` overrides on top."""
        return load_config(None, overrides, base=self.config())

    def mark(self, setting: str, value: Any) -> Mark:
        """Where a setting of this recipe comes from: the narrowest scope that knows it."""
        prefix = self.name.partition("/")[0]
        for scope in (self.method, self.backbone, prefix, self.regime, "all"):
            for key in (f"{setting}={_scalar(value)}", setting):
                if mark := PROVENANCE.get(scope, {}).get(key):
                    return mark
        raise LookupError(f"PROVENANCE has no mark for {setting}")


def recipes() -> list[Recipe]:
    """Every run behind the paper's tables, in the tables' order."""
    tables: dict[tuple[str, str, str, int], list[str]] = {}
    for table, cells in CELLS.items():
        for backbone, method, epochs in product(cells.backbones, METHODS, cells.epochs):
            tables.setdefault((cells.regime, backbone, method, epochs), []).append(table)
    return [Recipe(_name(*run), tuple(found), *run) for run, found in tables.items()]


def recipe(name: str) -> Recipe:
    """A recipe by its name."""
    known = {recipe.name: recipe for recipe in recipes()}
    if name in known:
        return known[name]
    # cells whose run has another name: Table 5, and the first epoch of Table 6
    same = re.sub(r"^(?:ood|multi-epoch)/(.+?)(?:-e1)?$", r"strong/\1", name)
    if same in known:
        raise ValueError(f"unknown recipe {name!r}. It is the run of {same!r}; use that one")
    raise ValueError(
        f"unknown recipe {name!r}.{did_you_mean(name, known)} `deftune paper recipes` lists all {len(known)}"
    )


def _name(regime: str, backbone: str, method: str, epochs: int) -> str:
    return f"{regime}/{backbone}/{method}" if epochs == 1 else f"multi-epoch/{backbone}/{method}-e{epochs}"


# --- the YAML files ---------------------------------------------------------------------------------------------------


def render_recipe(name: str) -> str:
    """The recipe as a YAML file, each setting with its mark; `load_config` reads it back to the same config."""
    found = recipe(name)
    where = "; ".join(f"{table} ({CELLS[table].evaluated_on})" for table in found.tables)
    lines = list(_yaml_lines(found, found.config()))
    width = 2 + max(len(line) for line, mark in lines if mark)
    return "\n".join(
        [
            f"# {name}: {BACKBONES[found.backbone].hub} tuned with {METHODS[found.method]}, {found.regime} regime.",
            f"# The run behind: {where}.",
            "# Settings are marked: stated in the paper (arXiv 2602.11424), only in the code released with it",
            "# (luludus/DEFT), or ours.",
            "",
            *(f"{line:{width}}{mark}" if mark else line for line, mark in lines),
            "",
        ]
    )


def _yaml_lines(
    found: Recipe, value: dict[str, Any], path: str = "", indent: str = ""
) -> Iterator[tuple[str, Mark | None]]:
    """Lines of block YAML and their marks; lists of sections are the one kind of list with lines of its own."""
    for key, inner in value.items():
        setting = f"{path}{key}"
        if isinstance(inner, dict):
            yield f"{indent}{key}:", None
            yield from _yaml_lines(found, inner, f"{setting}.", indent + "  ")
        elif isinstance(inner, list) and isinstance(inner[0], dict):
            yield f"{indent}{key}:", None
            for section in inner:
                lines = _yaml_lines(found, section, f"{setting}.", indent + "    ")
                for i, (line, mark) in enumerate(lines):
                    yield (f"{indent}  - {line.lstrip()}" if i == 0 else line), mark
        else:
            yield f"{indent}{key}: {_scalar(inner)}", found.mark(setting, inner)


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    return yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()[1:-1]
