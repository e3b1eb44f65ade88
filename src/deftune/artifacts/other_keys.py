"""What keys of TRL, axolotl and LLaMA-Factory are called in a config of deftune; docs/coming_from.md has the table."""

from __future__ import annotations

NAMES = {
    "base_model": "model.name",
    "model_name_or_path": "model.name",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention_implementation",
    "flash_attn": "model.attention_implementation",
    "flash_attention": "model.attention_implementation",
    "load_in_4bit": "model.quantization: 4bit",
    "quantization_bit": "model.quantization: 4bit",
    "peft_config": "model.lora",
    "adapter": "model.lora",
    "finetuning_type": "model.lora",
    "lora_r": "model.lora.r",
    "lora_rank": "model.lora.r",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target": "model.lora.target_modules",
    "lora_target_modules": "model.lora.target_modules",
    "train_dataset": "data.train",
    "datasets": "data.train",
    "dataset": "data.train",
    "dataset_dir": "data.train",
    "eval_dataset": "data.eval",
    "val_set_size": "data.holdout",
    "val_size": "data.holdout",
    "chat_template": "data.template",
    "chat_template_path": "data.template",
    "assistant_only_loss": "data.mask",
    "completion_only_loss": "data.mask",
    "train_on_inputs": "data.mask",
    "train_on_prompt": "data.mask",
    "roles_to_train": "data.mask",
    "mask_history": "data.mask",
    "sequence_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "sample_packing": "data.packing",
    "neat_packing": "data.packing",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup_ratio, a share of the steps",
    "optim": "train.optimizer",
    "max_grad_norm": "train.clip",
    "bf16": "train.precision",
    "disable_gradient_checkpointing": "train.gradient_checkpointing",
    "neftune_noise_alpha": "train.neftune_alpha",
    "use_liger_kernel": "train.liger",
    "enable_liger_kernel": "train.liger",
    "liger_rms_norm": "train.liger",
    "load_best_model_at_end": "train.best",
    "metric_for_best_model": "train.best",
    "early_stopping_patience": "train.stop_after, with train.best",
    "early_stopping_steps": "train.stop_after, with train.best",
    "save_total_limit": "train.keep",
    "use_wandb": "train.report_to",
    "use_tensorboard": "train.report_to",
    "hub_model_id": "train.push_to_hub",
    "output_dir": "run",
    "loss_type": "objective",
    "use_dft": "objective",
    "use_eaft": "objective",
    "use_dft_loss": "objective",
    "use_eaft_loss": "objective",
}
ADVICE = {
    "gradient_accumulation_steps": "Write the rows of a whole step as train.batch_size; the accumulation follows.",
    "resume_from_checkpoint": "Leave it out; the same command resumes.",
    "load_in_8bit": "8 bits are not supported; write model.quantization: 4bit.",
    "deepspeed": (
        "DeepSpeed is not supported, because its engine updates weights inside the backward pass; leave it out, and "
        "shard over several GPUs with train.fsdp."
    ),
}


def advice(name: object) -> str | None:
    """What to write instead of another stack's key, as a sentence, or None for other names.

    >>> advice("num_train_epochs")
    'Here it is train.epochs.'
    """
    key = str(name)
    return f"Here it is {NAMES[key]}." if key in NAMES else ADVICE.get(key)
