"""The sections of a run's config, with every key, its default and its meaning."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


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
    weights: Literal["auto", "float32", "bfloat16_with_masters"] = Field(
        "auto",
        description="bfloat16_with_masters: the layers' matrices are bfloat16, and AdamW updates float32 copies of "
        "them; the saved model is float32. auto: for full fine-tuning with adamw in bf16 on one GPU, else float32",
    )
    gradient_checkpointing: Literal[True, False, "auto"] = Field(
        "auto", description="compute activations again in the backward pass, for less memory; auto: if a GPU needs it"
    )
    neftune_alpha: float | None = Field(
        None, gt=0, description="NEFTune: uniform noise on the embeddings, at most alpha / sqrt(length x width)"
    )
    liger: bool = Field(False, description="use Liger's kernels in the layers, never its cross-entropy; needs a GPU")
    compile: Literal["auto", True, False, "layers"] = Field(
        "auto",
        description="torch.compile the whole model (true) or each decoder layer, which compiles faster (layers); auto "
        "is layers for full fine-tuning on one GPU with varlen attention, in runs of 300 micro-batches or more",
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
    async_checkpoints: bool = Field(
        False,
        description="with fsdp or tensor_parallel: write checkpoints while training goes on, from a copy in the host's "
        "memory",
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
