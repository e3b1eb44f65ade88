"""The config of a run: a YAML file, checked before anything is loaded. Unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from deftune._suggest import did_you_mean, nearest
from deftune.artifacts.keys import keys_of
from deftune.artifacts.other_keys import advice
from deftune.artifacts.sections import Data, Model, Section, Train
from deftune.artifacts.sections import Lora as Lora  # and these: a config is described by all of them
from deftune.artifacts.sections import NotNegative as NotNegative
from deftune.artifacts.sections import Positive as Positive
from deftune.artifacts.sections import Source as Source
from deftune.artifacts.sections import TaskSource as TaskSource
from deftune.objectives import objective as parse_objective

MISSING_MODEL = "model.name: missing; name a hub id, a folder, a .gguf file, or smollm2"


class RunConfig(Section):
    """The whole config of a run."""

    run: str = Field("runs/first", description="the folder of the run; a run with the same folder resumes")
    objective: str = Field(
        "deft", description="the loss: a name or spec of `deftune objectives`, such as deft or deft | floor(0.2)"
    )
    model: Model = Field(description="the model to tune")
    data: Data = Field(description="the rows, and which of their tokens are supervised")
    train: Train = Field(  # pyright: ignore[reportUnknownVariableType]
        default_factory=Train,  # pyright: ignore[reportArgumentType]
        description="optimizer, schedule, batches, checkpoints; the defaults are the paper's",
    )

    @field_validator("objective")
    @classmethod
    def _objective(cls, value: str) -> str:
        return str(parse_objective(value))

    @model_validator(mode="after")
    def _together(self) -> RunConfig:
        if self.data.eval and self.data.holdout:
            raise ValueError("data: give `eval` or `holdout`, not both")
        if self.train.eval_steps and not (self.data.eval or self.data.holdout):
            raise ValueError("train.eval_steps: there is nothing to evaluate on; give data.eval or data.holdout")
        names = [task.name for task in self.data.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"data.tasks: {max(names, key=names.count)} is given twice")
        if names and self.train.eval_steps is None:
            raise ValueError("data.tasks: say how often to ask them with train.eval_steps")
        if self.train.best not in ("none", "eval_loss", "eval_nll", *names):
            known = ", ".join(["none", "eval_loss", "eval_nll", *names])
            raise ValueError(
                f"train.best: {self.train.best!r} is not measured; one of {known}, or add it to data.tasks"
            )
        if self.train.best != "none" and self.train.eval_steps is None:
            raise ValueError(f"train.best: {self.train.best} is measured at evaluations; give train.eval_steps")
        if self.train.stop_after is not None and self.train.best == "none":
            raise ValueError("train.stop_after: say what must improve with train.best: eval_loss, eval_nll or a task")
        if self.train.fsdp and names:
            raise ValueError("data.tasks: cannot be asked of a model that train.fsdp shards; drop one")
        if self.train.shard_size is not None and not self.train.fsdp:
            raise ValueError("train.shard_size: needs train.fsdp=true; without it every rank holds all weights")
        if self.train.shard_size == 1:
            raise ValueError("train.shard_size: 1 shards nothing; leave out train.fsdp and train.shard_size for DDP")
        if self.train.async_checkpoints and not (self.train.fsdp or self.train.tensor_parallel > 1):
            raise ValueError(
                "train.async_checkpoints: needs train.fsdp or train.tensor_parallel; otherwise rank 0 writes the whole "
                "checkpoint before the next step"
            )
        if self.train.tensor_parallel > 1:
            check_tensor_parallel(self)
        if self.train.weights == "bfloat16_with_masters":
            check_masters(self)
        implementation = self.model.attention_implementation
        if self.train.attention != "auto" and implementation not in ("auto", "sdpa"):
            raise ValueError(
                f"train.attention: chooses among the kernels of sdpa and does nothing with "
                f"model.attention_implementation={implementation}; drop one"
            )
        if self.model.quantization is not None:
            if self.model.lora is None:
                raise ValueError("model.quantization: 4-bit weights cannot be trained; train adapters with model.lora")
            for name in ("fsdp", "compile"):
                if getattr(self.train, name) not in (False, "auto"):
                    raise ValueError(f"model.quantization: was not tested with train.{name}; drop one")
        if self.model.dtype == "bfloat16" and self.model.lora is None:
            raise ValueError(
                "model.dtype: trained weights are float32, because bfloat16 rounds most of AdamW's updates to nothing; "
                "leave it out (a GPU computes in bfloat16 anyway: train.precision), or train adapters with model.lora"
            )
        if self.model.dtype == "bfloat16" and self.train.fsdp:
            raise ValueError("model.dtype: train.fsdp was tested with float32 weights only; drop one")
        if self.train.fsdp and self.model.lora is not None and self.train.compile not in (False, "auto"):
            raise ValueError("train: fsdp, compile and lora together are not supported; drop one")
        return self


def check_tensor_parallel(config: RunConfig) -> None:
    """Refuse what a model whose layers are divided among ranks cannot be trained with."""
    reasons = {
        "train.fsdp": (config.train.fsdp, "both divide the weights"),
        "train.sparse": (config.train.sparse is not None, "a rank knows the mass of its own classes only"),
        "train.compile": (config.train.compile not in (False, "auto"), "it was not tried"),
        "model.lora": (config.model.lora is not None, "adapters are not divided"),
        "data.tasks": (bool(config.data.tasks), "one rank alone would answer the questions, with its part of a model"),
        "objective": (
            parse_objective(config.objective).kind != "local",
            f"{config.objective} sums over the rows of all ranks, which are the same rows here",
        ),
    }
    for name, (given, why) in reasons.items():
        if given:
            raise ValueError(f"train.tensor_parallel: cannot be combined with {name}: {why}; drop one")


def check_masters(config: RunConfig) -> None:
    """Refuse what bfloat16 weights with float32 masters were not tested with."""
    train = config.train
    reasons = {
        "train.fsdp": train.fsdp,
        "train.tensor_parallel": train.tensor_parallel > 1,
        "model.lora": config.model.lora is not None,
        f"train.optimizer={train.optimizer}": train.optimizer != "adamw",
        "train.precision=fp32": train.precision == "fp32",
    }
    for name, given in reasons.items():
        if given:
            raise ValueError(f"train.weights: {train.weights} was not tested with {name}; drop one")


class ConfigError(ValueError):
    """A wrong config; the message says where, what is wrong and what to do."""


def load_config(path: Path | None, overrides: Sequence[str] = (), base: dict[str, Any] | None = None) -> RunConfig:
    """A config from a YAML file (or ``base``), with ``a.b=c`` overrides on top."""
    content: Any = dict(base or {})
    name = "config"
    if path is not None:
        name = str(path)
        content = read_yaml(path)
    for override in overrides:
        apply_override(content, override)
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{name}: {line}" for line in explain(error))) from None


DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".gz", ".parquet")  # of files that are not YAML
MOST_VALUES = 100_000  # of a config with its aliases written out


class Refused(yaml.YAMLError):
    """YAML that PyYAML would accept and that a config must not contain."""

    def __init__(self, problem: str, node: yaml.Node):
        super().__init__(problem)
        self.problem, self.problem_mark = problem, node.start_mark


def parse_yaml(text: str) -> Any:
    """The value of a YAML document: no tags that make objects, no duplicate keys, no aliases that multiply.

    >>> parse_yaml("train: {seed: 1}")
    {'train': {'seed': 1}}

    Raises:
        yaml.YAMLError: the text is not such YAML; its ``problem_mark`` has the line.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > MOST_VALUES:
            raise Refused(f"its aliases make more than {MOST_VALUES:,} values", node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """The values below a node, those of an alias counted each time; a duplicate key is refused (PyYAML takes the last).

    ``known`` has the count of every node that was seen, None while it is being counted.
    """
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise Refused("an alias contains itself", node)
        return count
    known[id(node)] = None
    total = 1
    if isinstance(node, yaml.MappingNode):
        first: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in first:
                    raise Refused(f"duplicate key {key.value!r}, first on line {first[key.tag, key.value]}", key)
                first[key.tag, key.value] = line
            total += _count_values(key, known) + _count_values(value, known)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count_values(item, known) for item in node.value)
    known[id(node)] = total
    return total


def read_yaml(path: Path, root: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """The mapping in a YAML file; ``root`` has the keys that an error lists."""
    if path.suffix.lower() in DATA_SUFFIXES and path.is_file():
        raise ConfigError(
            f"{path}: is data, not a config; `deftune init run.yaml` writes a config, whose data.train names the data"
        )
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file or run; `deftune init` writes a config to start from") from None
    except Refused as error:
        raise ConfigError(f"{path}:{error.problem_mark.line + 1}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not YAML ({getattr(error, 'problem', None) or type(error).__name__})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping with the keys {', '.join(root.model_fields)}")
    return content  # pyright: ignore[reportUnknownVariableType]


def apply_override(content: dict[str, Any], override: str) -> None:
    """``train.learning_rate=1e-5``, ``data.train.0.limit=100`` or ``data.train[0].limit=100``: the value is YAML."""
    key, equals, text = override.partition("=")
    if len(override) > 200:
        override = f"{override[:200]}..."  # as an error shows it
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: write it as a.b=value")
    try:
        value = parse_yaml(text)
    except Refused as error:
        raise ConfigError(f"--set {override}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ConfigError(f"--set {override}: the value is not YAML") from None
    if isinstance(value, str):  # YAML reads 5e-5 as a string
        try:
            value = float(value)
        except ValueError:
            pass
    *parents, last = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
    place: Any = content
    for i, part in enumerate(parents):
        if isinstance(place, list):
            place = place[_index(place, part, override)]
        else:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override}: {'.'.join(parents[: i + 1])} is a value and has no keys")
    if isinstance(place, list):
        place[_index(place, last, override)] = value
    else:
        place[last] = value


def _index(place: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(place):
        raise ConfigError(f"--set {override}: {part} is no place in a list of {len(place)}")
    return int(part)


def explain(error: ValidationError, root: type[BaseModel] = RunConfig) -> list[str]:
    """One line for each wrong key or value of a ``root``; an unknown key comes with the nearest known one."""
    lines: list[str] = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = known_keys(problem["loc"][:-1], root)
            if root is RunConfig and (elsewhere := advice(problem["loc"][-1])):
                lines.append(f"{where}: unknown key. {elsewhere}")
                continue
            hint = did_you_mean(problem["loc"][-1], known) or _elsewhere(str(problem["loc"][-1]), root)
            lines.append(f"{where}: unknown key.{hint} Known here: {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(MISSING_MODEL if where in ("model", "model.name") else f"{where}: missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            if where == "objective" and message.startswith("unknown objective"):
                message += "; if it is your own, name its file: deftune --import FILE COMMAND ..."
            given = "" if isinstance(problem["input"], dict | list) else f" (got {problem['input']!r})"
            if problem["type"] == "string_type":
                given = "; it is empty" if problem["input"] is None else f"{given}; write it in quotes"
            if problem["type"] == "list_type" and where in ("data.train", "data.eval"):
                given += f"; write a list of sources: [{{path: {problem['input']}}}]"
            elif problem["type"] == "list_type" and isinstance(problem["input"], str | int):
                given += f"; write [{problem['input']}]"
            lines.append(f"{where}: {message}{given}" if where else message)
    return lines


def _elsewhere(name: str, root: type[BaseModel]) -> str:
    """ " Did you mean 'train.seed'?" for a key that another section has, else ""."""
    paths = {key.path.rpartition(".")[2]: key.path for key in reversed(keys_of(root))}
    near = nearest(name, paths, cutoff=0.8)
    return "" if near is None else f" Did you mean {paths[near]!r}?"


def known_keys(path: Sequence[int | str], root: type[BaseModel] = RunConfig) -> list[str]:
    """The keys of the section at ``path`` in the config."""
    model: Any = root
    parts = iter(path)
    for part in parts:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        if get_origin(annotation) is dict:
            next(parts, None)  # a name of the user's
        choices = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in choices if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def render_yaml(config: RunConfig) -> str:
    """The config as YAML with every default; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# The file that `deftune init` writes.
STARTER = """\
# A first run: SmolLM2-135M on generated word problems. It needs no hub and no GPU; two cores are enough.
# `deftune train FILE` runs it, and goes on where it was interrupted. The baseline to compare with:
# `deftune train FILE --set objective=nll --set run=runs/nll`.

run: runs/first                 # the run's folder: checkpoints, metrics, this file
objective: deft                 # `deftune objectives` lists them; modifiers compose: deft | eos(nll)

model:
  name: smollm2                 # or a hub id, a folder, a .gguf file
  # lora: {r: 16}               # adapters instead of full fine-tuning

data:
  train:
    - generate: gsm_symbolic    # or path: train.jsonl, or path: org/dataset
      split: train
      limit: 400                # rows to make
  holdout: 0.1                  # chance of each row to be kept to evaluate on
  max_length: 384               # tokens; longer rows are cut
  # template: chatml            # for a model without a chat template of its own

train:
  learning_rate: 5.0e-5
  max_steps: 40
  batch_size: 8                 # rows of an optimizer step
  micro_batch_size: 4           # rows of one forward pass: memory, never the result
  save_steps: 20
  eval_steps: 20
  # best: eval_loss             # end with the best step by the held-out loss instead of the last step
  seed: 42
"""
