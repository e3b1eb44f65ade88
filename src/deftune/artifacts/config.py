"""The config of a run: a YAML file, checked before anything is loaded. Unknown keys are errors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deftune.artifacts.keys import keys_of
from deftune.objectives import objective as parse_objective
from deftune.objectives.suggest import did_you_mean

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
MISSING_MODEL = "model.name: missing; name a hub id, a folder, a .gguf file, or smollm2"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Lora(Section):
    """Low-rank adapters instead of full fine-tuning."""

    r: Positive = Field(16, description="the rank of the adapters")
    alpha: Positive = Field(32, description="an adapter's output is multiplied by alpha / r")
    dropout: Share = Field(0.0, description="dropout on the input of the adapters")
    target_modules: str | list[str] = Field(
        "all-linear", description="the modules that get an adapter; all-linear is every linear layer but the head"
    )

    @field_validator("target_modules")
    @classmethod
    def _no_head(cls, value: str | list[str]) -> str | list[str]:
        if "lm_head" in ([value] if isinstance(value, str) else value):
            raise ValueError("an adapter on lm_head would be left out of the fused loss; leave it out of the list")
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"neither a list of names nor a regular expression ({error})") from None
        return value


class Model(Section):
    """The model to tune."""

    name: str = Field(description="a hub id, a folder, a .gguf file, or smollm2 (from PyPI, no hub needed)")
    revision: str | None = Field(None, description="the revision of a hub id; a commit is safest")
    trust_remote_code: bool = Field(False, description="run the code in the model's repository")
    lora: Lora | None = Field(None, description="train adapters instead of all weights; {} takes the defaults")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of the frozen weights under lora; auto is bfloat16 on a GPU that computes in it, else "
        "float32. Trained weights are float32",
    )
    attention_implementation: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = Field(
        "auto", description="the attention of transformers; auto is its default, mostly sdpa (see train.attention)"
    )
    quantization: Literal["4bit"] | None = Field(
        None,
        description="4bit is QLoRA: bitsandbytes holds the layers' frozen matrices in NF4; embeddings, norms and head "
        "are bfloat16 (or model.dtype); needs model.lora",
    )


class Source(Section):
    """Rows: from a file, a folder, a hub dataset, or generated."""

    path: str | None = Field(None, description="a file or folder (JSONL, JSON, Parquet, CSV, TSV, .gz), or a hub id")
    generate: str | None = Field(
        None, description="make rows instead: gsm_symbolic, word_sorting, figlet_font or sentence_reordering"
    )
    format: str = Field(
        "auto", description="messages, prompt_completion, alpaca, gsm8k, math, ...; auto looks at the first row"
    )
    split: str | None = Field(None, description="the split of a hub dataset, or train or test of generated rows")
    limit: Positive | None = Field(None, description="read the first rows only; of generated rows: how many to make")
    fields: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="the format's field names and the names in your data: {prompt: q, completion: a}",
    )
    weight: float | None = Field(
        None, gt=0, description="the source's share of a mixture, relative to the others (default: all of its rows)"
    )
    exchange: Share = Field(
        0.0,
        description="label noise on purpose: the share of rows that get the last answer of another row; every seed "
        "exchanges the same rows, and a larger share includes the rows of a smaller one",
    )
    exchanged_only: bool = Field(
        False, description="keep only the rows with an exchanged answer, to measure how likely these answers are"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if self.exchanged_only and not self.exchange:
            raise ValueError("`exchanged_only` needs `exchange`: the share of the answers that are exchanged")
        if (self.path is None) == (self.generate is None):
            raise ValueError("give one of `path` and `generate`" + (", not both" if self.path else ""))
        if self.generate is not None and self.limit is None:
            raise ValueError("`generate` needs `limit`: how many rows to make")
        if self.generate is not None and self.fields:
            raise ValueError("`fields` is for `path`: generated rows have their own")
        return self

    @property
    def place(self) -> str:
        """The source as `deftune.data.sources.read_rows` and the commands take it."""
        return f"generated:{self.generate}" if self.generate else str(self.path)


class TaskSource(Section):
    """A task whose questions the model answers, greedily, at every evaluation of the run."""

    name: str = Field(description="a task of `deftune eval list`, such as gsm8k")
    path: str | None = Field(None, description="the folder with the task's data (default: the hub)")
    limit: Positive | None = Field(None, description="ask the first questions only (default: all)")
    max_new_tokens: Positive | None = Field(None, description="the most tokens of an answer (default: the task's)")


class Data(Section):
    """The rows to tune the model on, and how they are encoded."""

    train: list[Source] = Field(min_length=1, description="where the training rows come from")
    eval: list[Source] = Field(
        default_factory=list, description="rows to evaluate on during training, instead of holdout"
    )
    holdout: Share = Field(0.0, description="the chance of each training row to be held out for evaluation")
    tasks: list[TaskSource] = Field(
        default_factory=list, description="tasks that the model answers at every evaluation"
    )
    total: Positive | None = Field(
        None,
        description="the number of rows to draw from the sources (default: all, or as many as their weights allow)",
    )
    template: str | None = Field(
        None, description="chatml, plain, or a .jinja file (default: the chat template of the tokenizer)"
    )
    template_options: dict[str, bool | str] = Field(
        default_factory=dict, description="variables of the chat template: {enable_thinking: false}"
    )
    end_tokens: list[str] = Field(
        default_factory=list,
        description="further tokens that end an answer; the EOS token and the template's own are known",
    )
    bos: bool | None = Field(None, description="begin each row with the BOS token (default: as the tokenizer does)")
    mask: Literal["assistant", "completion", "all"] = Field(
        "assistant",
        description="which tokens are supervised: every answer, only the last answer (completion), or all tokens",
    )
    max_length: Positive = Field(2048, description="the most tokens of a row, prompt included")
    overlong: Literal["truncate", "drop"] = Field(
        "truncate", description="what happens to a row over max_length: its end is cut off, or the row is left out"
    )
    packing: bool = Field(False, description="put several rows into one sequence; no row sees another")
    skip_bad_rows: bool = Field(
        False, description="write rows that cannot be read to bad_rows.jsonl and go on; without it they stop the run"
    )


class Train(Section):
    """How to train. The defaults are those of the paper and its released code."""

    learning_rate: float = Field(5e-5, gt=0, description="the highest learning rate of the schedule")
    epochs: float = Field(1.0, gt=0, description="passes over the training rows")
    max_steps: Positive | None = Field(
        None, description="stop after so many optimizer steps, if the epochs do not end before"
    )
    batch_size: Positive = Field(256, description="rows of an optimizer step, over all micro-batches and ranks")
    micro_batch_size: Positive = Field(
        4, description="rows of one forward pass on one rank; changes the memory, not the result"
    )
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "muon"] = Field(
        "adamw",
        description="adamw_8bit is bitsandbytes' and needs a GPU; muon trains the layers' matrices, and AdamW the rest",
    )
    weight_decay: float = Field(0.01, ge=0, description="weight decay of matrices; norms and biases have none")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="beta1 and beta2 of AdamW")
    warmup_ratio: Share = Field(0.1, description="the share of the steps in which the learning rate rises from 0")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="the learning rate after warm-up: cosine and linear fall to 0, constant stays"
    )
    clip: float = Field(
        1.0, ge=0, description="the largest gradient norm; larger gradients are scaled down to it, 0 turns this off"
    )
    seed: NotNegative = Field(42, description="seed of held-out rows, row order, dropout, noise and new adapters")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="bf16 computes in bfloat16 over float32 weights; auto is bf16 on a GPU that has it, else fp32",
    )
    weights: Literal["float32", "bfloat16_with_masters"] = Field(
        "float32",
        description="bfloat16_with_masters: the layers' matrices are bfloat16, and AdamW updates float32 copies of "
        "them; the saved model is float32",
    )
    gradient_checkpointing: Literal[True, False, "auto"] = Field(
        "auto", description="compute activations again in the backward pass, for less memory; auto: if a GPU needs it"
    )
    neftune_alpha: float | None = Field(
        None, gt=0, description="NEFTune: uniform noise on the embeddings, at most alpha / sqrt(length x width)"
    )
    liger: bool = Field(False, description="use Liger's kernels in the layers, never its cross-entropy; needs a GPU")
    compile: Literal[True, False, "layers"] = Field(
        False,
        description="torch.compile the whole model (true) or each decoder layer, which compiles faster (layers)",
    )
    attention: Literal["auto", "varlen", "flash", "efficient", "math", "cudnn"] = Field(
        "auto",
        description="the attention kernel of torch. varlen lays rows end to end, without padding; auto is varlen in "
        "bf16 on a GPU if the model allows it, else any kernel but cuDNN's, which can give NaN gradients",
    )
    sparse: float | None = Field(
        None,
        gt=0,
        le=1,
        description="approximate the head's gradients with this share of the vocabulary (default: exact)",
    )
    fsdp: bool = Field(
        False,
        description="shard the model over the ranks of torchrun with FSDP2, instead of DDP",
    )
    shard_size: Positive | None = Field(
        None,
        description="with fsdp: how many ranks share a copy of the weights; several copies are HSDP (default: all)",
    )
    tensor_parallel: Positive = Field(
        1,
        description="divide every layer and the vocabulary among this many ranks: all ranks of torchrun",
    )
    workers: NotNegative = Field(0, description="processes that prepare batches, for each rank; 0: none")
    save_steps: Positive = Field(100, description="optimizer steps between checkpoints")
    keep: Positive = Field(
        2, description="how many of the newest checkpoints to keep, beside the best one and those of save_at"
    )
    save_at: list[Positive] = Field(default_factory=list, description="steps whose checkpoints are always kept")
    eval_steps: Positive | None = Field(None, description="optimizer steps between evaluations (default: at the end)")
    best: str = Field(
        "none",
        description="the step whose weights the run ends with: none (the last step), eval_loss, eval_nll, or a task of "
        "data.tasks",
    )
    stop_after: Positive | None = Field(
        None, description="stop after so many evaluations in a row that do not improve train.best"
    )
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        default_factory=list, description="trackers that get the numbers of each step"
    )
    push_to_hub: str | None = Field(None, description="upload the result to this hub id")
    push_private: bool = Field(False, description="with push_to_hub: a new repository is private")

    @model_validator(mode="after")
    def _batches(self) -> Train:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of micro_batch_size {self.micro_batch_size}")
        if self.optimizer == "adafactor" and self.betas != Train.model_fields["betas"].default:
            raise ValueError("betas: adafactor has none; leave them out")
        if self.push_private and not self.push_to_hub:
            raise ValueError("push_private: nothing is uploaded; give push_to_hub, or leave it out")
        if self.optimizer != "adamw" and self.fsdp:
            raise ValueError(f"optimizer: {self.optimizer} was not tested with fsdp; drop one")
        return self


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
        if self.train.tensor_parallel > 1:
            check_tensor_parallel(self)
        if self.train.weights != "float32":
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
                if getattr(self.train, name):
                    raise ValueError(f"model.quantization: was not tested with train.{name}; drop one")
        if self.model.dtype == "bfloat16" and self.model.lora is None:
            raise ValueError(
                "model.dtype: trained weights are float32, because bfloat16 rounds most of AdamW's updates to nothing; "
                "leave it out (a GPU computes in bfloat16 anyway: train.precision), or train adapters with model.lora"
            )
        if self.model.dtype == "bfloat16" and self.train.fsdp:
            raise ValueError("model.dtype: train.fsdp was tested with float32 weights only; drop one")
        if self.train.fsdp and self.model.lora is not None and self.train.compile:
            raise ValueError("train: fsdp, compile and lora together are not supported; drop one")
        return self


def check_tensor_parallel(config: RunConfig) -> None:
    """Refuse what a model whose layers are divided among ranks cannot be trained with."""
    reasons = {
        "train.fsdp": (config.train.fsdp, "both divide the weights"),
        "train.sparse": (config.train.sparse is not None, "a rank knows the mass of its own classes only"),
        "train.compile": (config.train.compile, "it was not tried"),
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
    """``train.learning_rate=1e-5``, ``data.train.0.limit=100``: the value is YAML."""
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
    *parents, last = key.strip().split(".")
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
            hint = did_you_mean(problem["loc"][-1], known) or _elsewhere(str(problem["loc"][-1]), root)
            lines.append(f"{where}: unknown key.{hint} Known here: {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(MISSING_MODEL if where in ("model", "model.name") else f"{where}: missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            if where == "objective" and message.startswith("unknown objective"):
                message += "; if it is your own, name its file: deftune --import FILE COMMAND ..."
            given = "" if isinstance(problem["input"], dict | list) else f" (got {problem['input']!r})"
            quotes = "; write it in quotes" if problem["type"] == "string_type" else ""
            lines.append(f"{where}: {message}{given}{quotes}" if where else message)
    return lines


def _elsewhere(name: str, root: type[BaseModel]) -> str:
    """ " Did you mean 'train.seed'?" for a key that another section has, else ""."""
    found = [key.path for key in keys_of(root) if key.path.rpartition(".")[2] == name]
    return f" Did you mean {found[0]!r}?" if found else ""


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


def schema() -> dict[str, Any]:
    """JSON schema, for editors."""
    return RunConfig.model_json_schema()


def render_yaml(config: RunConfig) -> str:
    """The config as YAML with every default; `load_config` reads it back."""
    return yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, allow_unicode=True)


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
