"""LLaMA-Factory with an objective: ``deftune-llamafactory train x.yaml``, whose key ``deft_objective`` names it."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from deftune.adapters.versions import OLDEST, need_version

STACK = "LLaMA-Factory"
USAGE = """usage: deftune-llamafactory train FILE [key=value ...]

llamafactory-cli train with one more key, deft_objective: "deft | floor(0.2)", or any other objective of
`deftune objectives`. FILE is a YAML or JSON file of LLaMA-Factory; key=value overrides a key of it. For the other
commands of LLaMA-Factory use llamafactory-cli."""


def check_arguments(args: Any) -> None:
    """Refuse finetuning arguments under which another loss, or another trainer, would run.

    Raises:
        ValueError: no or a wrong ``deft_objective``, a stage that is not SFT, a second loss, or another backend.
    """
    from deftune.adapters.check import parse_supported

    if args.deft_objective is None:
        raise ValueError(
            f'{STACK}: deft_objective is missing; add deft_objective: "deft" to the file, or use llamafactory-cli'
        )
    parse_supported(STACK, args.deft_objective)
    if args.stage != "sft":
        raise ValueError(f"{STACK}: stage={args.stage} cannot be combined with deft_objective; set stage: sft")
    for name, instead in {
        "use_dft_loss": 'drop it (DFT is deft_objective: "dft")',
        "use_eaft_loss": 'drop it (EAFT as in LLaMA-Factory is deft_objective: "eaft(norm=3)")',
        "use_asft_loss": "drop one of the two losses",
        "use_hyper_parallel": "its trainer has a loss of its own",
    }.items():
        if getattr(args, name):
            raise ValueError(f"{STACK}: {name} cannot be combined with deft_objective: {instead}")


def install() -> None:
    """Add ``deft_objective`` to LLaMA-Factory's arguments, and the objective to its SFT trainer, in this process."""
    need_version("llamafactory")
    from llamafactory.hparams import parser
    from llamafactory.hparams.finetuning_args import FinetuningArguments
    from llamafactory.train.sft import workflow

    from deftune.adapters.check import TrainerLoss
    from deftune.objectives import IGNORE_INDEX

    if FinetuningArguments not in parser._TRAIN_ARGS:
        return

    @dataclass
    class DeftFinetuningArguments(FinetuningArguments):
        deft_objective: str | None = field(default=None, metadata={"help": "An objective of deftune, e.g. deft."})

        def __post_init__(self) -> None:
            super().__post_init__()
            check_arguments(self)

    class DeftTrainer(workflow.CustomSeq2SeqTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            stop_words = self.data_collator.template.stop_words
            spec = self.finetuning_args.deft_objective
            TrainerLoss(STACK, self, spec, self.processing_class, end_tokens=stop_words)

        def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
            for batch in batch_samples:  # the first token is no target; transformers before 5.15 counts it
                batch["labels"][..., 0] = IGNORE_INDEX
            return super()._get_num_items_in_batch(batch_samples, device)

    parser._TRAIN_ARGS[parser._TRAIN_ARGS.index(FinetuningArguments)] = DeftFinetuningArguments
    workflow.CustomSeq2SeqTrainer = DeftTrainer


def main() -> None:
    """``deftune-llamafactory train x.yaml [key=value ...]``: ``llamafactory-cli train`` with ``deft_objective``."""
    need_version("llamafactory")
    asked = not {"-h", "--help"}.isdisjoint(sys.argv)
    if asked or sys.argv[1:2] != ["train"] or len(sys.argv) < 3:
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    try:
        from llamafactory import launcher
    except ModuleNotFoundError as error:
        if error.name != "llamafactory":
            raise
        raise SystemExit(
            f"{STACK} is not installed beside this deftune; pip install llamafactory=={OLDEST['llamafactory']}"
        ) from None
    from llamafactory.extras.misc import is_env_enabled
    from llamafactory.train.tuner import run_exp

    for name in ("USE_V1", "USE_RAY", "USE_MCA"):
        if is_env_enabled(name):
            raise SystemExit(f"{STACK}: {name} runs another trainer, without the objective; unset it")
    install()
    if "LOCAL_RANK" in os.environ:  # a rank of torchrun
        del sys.argv[1]
        run_exp()
        gc.collect()  # the trainer, a cycle, holds threads of gloo, which may abort the process while Python exits
    else:  # trains here, or starts torchrun with this module: several GPUs, or FORCE_TORCHRUN=1
        launcher.__file__ = f"-m {__spec__.name} train"
        launcher.launch()


if __name__ == "__main__":
    main()
