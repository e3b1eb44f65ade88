"""A model of ten thousand weights, ragged rows and a trainer over them, in memory."""

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig

import deftune
from deftune.objectives import IGNORE_INDEX
from deftune.tokens.head import shifted
from deftune.training.trainer import DeftSFTTrainer

VOCABULARY, END, PAD = 48, 46, 47


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY - 2)} | {"<end>": END, "<pad>": PAD}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def make_model(dtype: torch.dtype = torch.float64, cls=transformers.LlamaForCausalLM, scale: float = 4.0, **more):
    """Weights larger than at birth: an untrained model's tokens are all alike, and so are the objectives."""
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**options, **more})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    if dtype == torch.float64:  # transformers' norms go through float32, and so would the gradients
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(parent, name, torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=dtype))
    return model


def make_rows(number: int, seed: int = 1) -> list[dict[str, list[int]]]:
    """4 to 19 tokens, a prompt of unequal length before the supervised ones, the end token last."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = []
    for _ in range(number):
        ids = [draw(0, END) for _ in range(draw(3, 19))] + [END]
        prompt = draw(1, len(ids) - 1)
        rows.append({"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]})
    return rows


def make_arguments(folder, **more) -> SFTConfig:
    options = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "num_train_epochs": 1, "learning_rate": 1e-2, "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "dataset_kwargs": {"skip_prepare_dataset": True},
        "disable_tqdm": True, "max_length": None, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0,
    }  # fmt: skip
    return SFTConfig(**{**options, **more})


class Gradients(transformers.TrainerCallback):
    """The gradients that every optimizer step begins with."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})


def make_trainer(model, arguments, rows, **more) -> tuple[DeftSFTTrainer, Gradients]:
    watch = Gradients()
    trainer = DeftSFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer(), callbacks=[watch],
        **more,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, watch


def padded(rows) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": column("input_ids", PAD), "attention_mask": mask, "labels": column("labels", IGNORE_INDEX)}


def oracle(model, rows, spec, context) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a whole step in one call, from the model's own logits."""
    batch = padded(rows)
    labels = batch.pop("labels")
    logits = model(**batch, use_cache=False).logits
    loss = deftune.token_loss(logits, shifted(labels), spec, context=context)
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def deviation(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest gradient."""
    assert found.keys() == expected.keys()
    size = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / size
