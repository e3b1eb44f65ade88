"""verl's SFT trainer with a deftune objective: ``torchrun -m deftune.adapters.verl ... deft.objective=deft``."""

# pyright: reportMissingImports=false
from __future__ import annotations

import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

from deftune.adapters.verl_check import checked_worker
from deftune.adapters.verl_loss import ObjectiveLoss, choose_source
from deftune.adapters.versions import need_version
from deftune.data.encoding import end_tokens_of
from deftune.objectives import Objective
from deftune.objectives import objective as parse_objective

SETTINGS = {"objective": "deft", "ray": False}


def settings(config: Any) -> dict[str, Any]:
    """The keys below ``deft`` of verl's config, with defaults.

    >>> settings({"deft": {"objective": "cayley"}})
    {'objective': 'cayley', 'ray': False}
    """
    given = dict(config.get("deft") or {})
    if unknown := sorted(set(given) - set(SETTINGS)):
        raise ValueError(f"deftune: unknown key deft.{unknown[0]}; known: {', '.join(f'deft.{k}' for k in SETTINGS)}")
    return SETTINGS | given


def first_step_line(metrics: dict[str, Any], objective: Objective) -> str:
    """A line on the first step, out of its metrics; takes the keys ``deft/...`` out of them.

    Raises:
        RuntimeError: the workers of this verl did not check the step (`verl_check.FirstStep`).
    """
    loss, nll, error = (_flat(metrics.pop(f"deft/{name}", [])) for name in ("loss", "nll", "error"))
    if not error:
        raise RuntimeError(
            f"deftune: verl's engine was not checked in its first step, so that it may train another loss than "
            f"`{objective}`; this verl is not supported"
        )
    return f"deftune: verl trains `{objective}`: loss {sum(loss):.6g} in its first step, NLL {sum(nll):.6g}" + (
        "" if max(error) < 0 else f"; gradient verified from the logits to {max(error):.1e}"
    )


def _flat(values: Any) -> list[float]:
    """Metrics of micro-batches, in a list per rank or not."""
    return [x for value in values for x in _flat(value)] if isinstance(values, list) else [values]


def trainer_class(base: Any) -> Any:
    """verl's SFTTrainer (the torchrun or the Ray one) with the loss of ``deft.objective``.

    The class changes one step of verl's: the engine is built in a worker that checks its first step, the loss function
    is replaced, and each batch gets the keys that the loss reads.
    """
    home: Any = sys.modules[base.__module__]

    class DeftSFTTrainer(base):
        def _build_engine(self) -> None:
            worker, home.TrainingWorker = home.TrainingWorker, checked_worker(home.TrainingWorker)
            try:
                super()._build_engine()
            finally:
                home.TrainingWorker = worker
            from verl.utils import tensordict_utils as tu

            ray = settings(self.config)["ray"]
            objective = parse_objective(settings(self.config)["objective"])
            source = choose_source(self.config, objective)
            special_ids = tuple(sorted(end_tokens_of(self.model_config.tokenizer).values()))
            vocab_size = self.model_config.hf_config.get_text_config().vocab_size
            loss = self.loss_fn = ObjectiveLoss(objective, source, special_ids, vocab_size)
            client = self.training_client
            client.set_loss_fn(loss_fn=loss)
            calls = {"train": client.train_batch, "infer": client.infer_batch}
            steps = 0  # of this process

            def call(name: str, phase: str, data: Any) -> Any:
                done = self.resume_global_step + steps
                tu.assign_non_tensor(
                    data, deft_phase=phase, deft_progress=min(1.0, done / max(1, self.total_training_steps)),
                    **loss.switches(),
                )  # fmt: skip
                output = calls[name](data)
                return output.get() if ray else output

            def run(name: str, data: Any) -> Any:
                nonlocal steps
                first = name == "train" and steps == 0
                if objective.kind != "local":  # a pass without gradients over the whole step
                    call("infer", "measure", data.copy())
                output = call(name, "first" if first else "loss", data)
                if first and output is not None:  # None: a rank whose outputs verl does not collect
                    line = first_step_line(tu.get(output, "metrics"), objective)
                    if ray or self.rank == 0:
                        print(line)
                steps += name == "train"
                return SimpleNamespace(get=lambda: output) if ray else output

            client.train_batch, client.infer_batch = partial(run, "train"), partial(run, "infer")

    return DeftSFTTrainer


def train(config: Any) -> None:
    """Run verl's SFT trainer on its config; ``deft.objective`` names the objective.

    Raises:
        ValueError: the objective is unknown, or verl cannot train it with this config.
    """
    choose_source(config, parse_objective(settings(config)["objective"]))  # before the model is loaded
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    if settings(config)["ray"]:
        import ray
        from verl.trainer.sft_trainer_ray import SFTTrainer

        ray.init()
        trainer_class(SFTTrainer)(config=config).fit()
        return
    from verl.trainer.sft_trainer import SFTTrainer
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    initialize_global_process_group()
    trainer_class(SFTTrainer)(config=config).fit()
    destroy_global_process_group()


def quoted(argument: str) -> str:
    """The argument with its spec in the quotes that hydra's grammar wants around `deft | floor(0.2)`.

    >>> quoted("deft.objective=deft | floor(0.2)")
    'deft.objective="deft | floor(0.2)"'
    """
    return re.sub(r"""^(\+*deft\.objective=)([^'"].*)$""", r'\1"\2"', argument)


def main() -> None:
    """verl's SFT command with two more keys: ``deft.objective`` (a spec) and ``deft.ray`` (verl's Ray trainer)."""
    need_version("verl")
    import hydra
    from hydra.core.config_store import ConfigStore

    node = {"defaults": ["sft_trainer_engine", "_self_"], "deft": SETTINGS}
    ConfigStore.instance().store(name="deftune_sft", node=node)
    sys.argv[1:] = map(quoted, sys.argv[1:])
    hydra.main(config_path="pkg://verl.trainer.config", config_name="deftune_sft", version_base=None)(train)()


if __name__ == "__main__":
    main()
