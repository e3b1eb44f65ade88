"""`deftune train`: from a config to a run. What cannot be honoured is refused before the model is loaded."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rich.console import Console

from deftune.artifacts import checkpoints
from deftune.artifacts.config import RunConfig
from deftune.artifacts.display import quiet
from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import FolderError, disk_error, locked, sealed_folder
from deftune.artifacts.models import first_line
from deftune.artifacts.runs import Run, cut_metrics, find_run, open_run
from deftune.artifacts.terminal import line_printer
from deftune.tokens.head import base_of, detach_objective
from deftune.training.assembly import ScoreTasks, best_metric, load_base, make_trainer
from deftune.training.card import name_base_model, render_card
from deftune.training.display import StepDisplay
from deftune.training.plan import MOMENT_BYTES
from deftune.training.preparation import (
    ARRAYS,
    Prepared,
    base_dtype,
    data_ranks,
    facts,
    fingerprint,
    fingerprint_of_lists,
    is_main,
    precision_of,
    prepare,
    world_size,
)
from deftune.training.reuse import Reuse
from deftune.training.trackers import tracking

TRAINING = "training this run"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "finished", or "stopped" by a signal with a checkpoint to resume from."""

    state: str
    step: int
    run: Run
    begun: int = 0  # the step that this call started from
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # wall time of prepare, train, evaluate, save
    model: Any = None  # with save=False: the tuned model, ready to measure
    tokenizer: Any = None  # with save=False


def leave_ranks() -> None:
    """Leave the process group and end its threads before exit.

    A thread of gloo that still holds a tensor while Python exits may abort the process. The threads end with the last
    reference to the group, and the trainer's model, which is part of a cycle, has one.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def has_ranks() -> bool:
    """Whether torch.distributed runs, with several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_main(value: Any) -> Any:
    """The value that rank 0 has; every rank calls this once torch.distributed runs."""
    if not has_ranks():
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


# --- the trainer ------------------------------------------------------------------------------------------------------


def make_callback(
    run: Run, display: StepDisplay, stop: StopSignal, get_trainer: Callable[[], Any], save: bool = True
) -> Any:
    """A callback that writes the record of each step, updates the display, and stops the run after a signal.

    Without ``save`` the last step has no checkpoint, unless a signal asks for one.
    """
    from transformers import TrainerCallback

    class RunCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                display.start(state.global_step, state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not state.is_world_process_zero or not logs or "train_runtime" in logs:
                return
            kind = "eval" if "eval_loss" in logs else "train"
            record: dict[str, Any] = {"step": state.global_step, "kind": kind, **logs}
            if kind == "train":
                record["p_histogram"] = get_trainer().last_record.get("p_histogram")
                display.step(state.global_step, state.max_steps, logs)
            else:
                final = not get_trainer().is_in_train
                record |= {"final": True} if final else {}  # of the result, after the last step
                display.evaluation(state.global_step, state.max_steps, logs, final=final)
            with run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                if control.should_save:  # no checkpoint survives a power cut without the records before it
                    file.flush()
                    os.fsync(file.fileno())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in get_trainer().pinned:
                control.should_save = True
            if state.global_step == state.max_steps and args.metric_for_best_model is not None:
                control.should_evaluate = True  # the last step is a candidate too
            if state.global_step >= state.max_steps and not save:
                control.should_save = False
            if stop.heard_anywhere(args.device):
                control.should_save = True
                control.should_training_stop = True

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            display.stop()

    return RunCallback()


def make_profiler(run: Run, say: Callable[[str], None], get_trainer: Callable[[], Any]) -> Any:
    """A callback that prints the profile of some steps, and writes it into the run's folder on rank 0."""
    from deftune.training.profiling import StepProfiler

    def report(found: Any) -> None:
        for line in found.lines():
            say(line)

    return StepProfiler(get_trainer, report, run.folder / "profile.json" if is_main() else None)


def check_profile(left: int) -> None:
    """Refuse to profile a run that ends before its steps are measured."""
    from deftune.training.profiling import STEPS

    if left < STEPS:
        raise ValueError(
            f"--profile: needs {STEPS} steps, and the run has {left} left; raise train.max_steps or train.epochs, or "
            f"lower train.batch_size"
        )


class StopSignal:
    """SIGTERM and SIGINT: finish the step, save, stop. A second one is the usual sudden end."""

    last: ClassVar[StopSignal | None] = None  # the newest one that has listened in this process

    def __init__(self) -> None:
        self.heard = self.listens = False
        self.number: int = signal.SIGTERM  # the signal, where one was heard

    def _hear(self, number: int, frame: Any) -> None:
        self.heard, self.number = True, number
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)

    @contextmanager
    def listening(self) -> Generator[None]:
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        StopSignal.last, self.listens = self, True
        try:
            yield
        finally:
            self.listens = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def heard_anywhere(self, device: Any) -> bool:
        """Whether any rank received the signal; all ranks stop at the same step."""
        if not has_ranks():
            return self.heard
        flag = torch.tensor(int(self.heard), device=device)
        dist.all_reduce(flag)
        return bool(flag)


def ask_to_stop() -> None:
    """Stop this process as a first SIGTERM does; a run that has been asked already goes on to save."""
    last = StopSignal.last
    if last is not None and (last.listens or last.heard):
        last.heard = True
    else:
        os.kill(os.getpid(), signal.SIGTERM)


# --- a run ------------------------------------------------------------------------------------------------------------


def train_run(
    config: RunConfig, console: Console | None = None, *, title: str = "train", score_tasks: ScoreTasks | None = None,
    restart: bool = False, save: bool = True, reuse: Reuse | None = None, profile: bool = False,
    alike: Sequence[Run] = (),
) -> Outcome:  # fmt: skip
    """Train a run to its end, from the newest checkpoint that verifies if there is one.

    Every rank of a distributed launch calls it. Returns early, with a checkpoint, on SIGTERM.

    Args:
        config: the run.
        console: where progress is shown; standard error by default.
        title: the name in front of the progress bar.
        score_tasks: ``score_tasks(model, tokenizer)`` is {task: score} for the tasks of ``data.tasks``;
            `deftune.evaluation.in_training.task_scorer` makes one.
        restart: begin at step 0 whatever is there; the checkpoints are renamed, not removed.
        save: False writes neither the last step's checkpoint nor the model's folder; the outcome has the tuned
            ``model`` and ``tokenizer`` instead, as `load_result` would load them, but on the device of the training.
            A run whose model is in its folder already has an outcome without them.
        reuse: keeps the data and the untrained model for the next run of this process; one rank only.
        profile: print where the time of a step goes (`deftune.training.profiling`), and write profile.json into the
            run's folder; the training does not change.
        alike: runs, begun or not, that must have the same tokens and masks, because they will be compared.

    Raises:
        ValueError: the data is not that of a run in ``alike``; ``save=False`` together with `train.best`,
            `train.push_to_hub`, several ranks or a base that is not float32, which need files; ``profile`` in a run
            that is finished or has too few steps left.
    """
    if not save and not fits_in_memory(config):
        raise ValueError(
            "save=False: several ranks, train.best, train.push_to_hub, train.fsdp, a frozen base in fewer bits and "
            "model.attention_implementation need saved files"
        )
    if config.data.tasks and score_tasks is None:
        raise ValueError("data.tasks: pass score_tasks=deftune.evaluation.in_training.task_scorer(config)")
    console = console or Console(stderr=True)
    say: Callable[[str], None] = line_printer(console) if is_main() else (lambda _: None)
    with quiet():
        run = find_run(config) if is_main() else Run(Path(config.run))
        if run.has_result():
            if restart:
                raise ValueError(f"--restart: {run.folder} is finished; train anew in another folder, --set run=...")
            if profile:
                raise ValueError(f"--profile: {run.folder} is finished; profile another folder, --set run=...")
            say(f"{run.folder}: already finished; its model is in {run.model}")
            step = run.status()["step"]
            return Outcome("finished", step, run, step)
        begin = time.perf_counter()
        with ExitStack() as held:
            old = run.config.exists()
            if is_main() and old:  # before the data is read, which may take long
                held.enter_context(locked(run.folder, TRAINING))
            prepared = (reuse.prepare if reuse else prepare)(config, say, read_time([run, *alike]))
            refuse_other_rows(prepared, alike)
            if is_main() and not old:  # wrong data leaves no folder behind
                held.enter_context(locked(run.folder, TRAINING))
                open_run(config)
            with tracking(config.train.report_to, run.folder / "logs"):
                return _train(prepared, run, console, say, title, score_tasks, restart, save, reuse, profile, begin)


def fits_in_memory(config: RunConfig) -> bool:
    """Whether a run can end without files: nothing is read back from a checkpoint, uploaded or sharded.

    Frozen weights in bfloat16 or 4 bits, or another attention, are not what `load_result` loads.
    """
    train = config.train
    model = config.model
    whole = base_dtype(config) == "float32" and model.quantization is None and model.attention_implementation == "auto"
    return whole and train.best == "none" and not train.push_to_hub and not train.fsdp and world_size() == 1


def _train(
    prepared: Prepared, run: Run, console: Console, say: Callable[[str], None], title: str,
    score_tasks: ScoreTasks | None, restart: bool, save: bool, reuse: Reuse | None, profile: bool, begin: float,
) -> Outcome:  # fmt: skip
    config = prepared.config
    clock = Clock(begin)
    for line in facts(prepared):
        say(line)
    if is_main():
        record_data(prepared, run)
    # rank 0 verifies the checkpoint and sends the result to the others
    resumed = checkpoints.latest(run.checkpoints, say) if is_main() and not restart else None
    if restart and is_main() and (aside := checkpoints.set_aside(run.checkpoints)):
        say(f"training from the beginning; the checkpoints are in {aside}")
    stop = StopSignal()
    trainer: Any = None
    display = StepDisplay(console, title, [task.name for task in config.data.tasks])
    callback = make_callback(run, display, stop, lambda: trainer, save)
    load = reuse.load_base if reuse else None if save else load_base
    base = None if load is None else load(prepared)  # else the trainer loads it, after torch.distributed has started
    untrained = None if save else Settings.of(base)
    profiler = make_profiler(run, say, lambda: trainer) if profile else None
    trainer = make_trainer(prepared, run, [callback, *([profiler] if profiler else [])], score_tasks, base)
    resumed = from_main(resumed)
    compare_ranks(prepared)
    begun = step = checkpoints.step_of(resumed) or 0 if resumed else 0
    if profiler is not None:
        check_profile(prepared.steps - begun)
    clock.end("prepare")
    if is_main():
        checkpoints.clear_staging(run.checkpoints)
        cut_metrics(run, step)
        run.set_status("running", step=step)
        if step:
            say(f"resuming from {resumed}")
    try:
        with stop.listening(), profiler or nullcontext():
            trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    except BaseException as error:
        display.stop()
        if is_main():
            with suppress(OSError):  # a full disk has been named already
                run.set_status("failed", step=trainer.state.global_step, error=str(error).splitlines()[:1])
        unusual = isinstance(error, Exception) and not isinstance(error, ValueError | OSError)
        if is_main() and resumed and display.task is None and unusual:
            # before the first step: what a verified checkpoint holds is not what a run writes there
            raise ValueError(
                f"{resumed}: cannot be resumed from ({type(error).__name__}: {first_line(error)[:200]}); restore it, "
                f"or train from the beginning with --restart"
            ) from error
        raise
    step = trainer.state.global_step
    clock.end("train")
    if is_main():  # again: a kill may have come between the last checkpoint and its predecessor's removal
        trainer.rotate_checkpoints()
    if stop.heard_anywhere(trainer.args.device):
        if not save and not (run.checkpoints / f"{checkpoints.PREFIX}{step}").is_dir():  # a signal at the last step
            trainer._save_checkpoint(trainer.model, None)
        if is_main():
            run.set_status("stopped", step=step)
        say(f"stopped at step {step} with a checkpoint; the same command resumes")
        return Outcome("stopped", step, run, begun, clock.seconds)
    kept = keep_best(trainer, config, run)
    if prepared.eval is not None:
        trainer.evaluate()
    clock.end("evaluate")
    if untrained is not None:
        model = take_model(trainer, untrained)
        run.set_status("finished", step=step, **asdict(kept))
        say(f"finished: in memory are {kept}")
        clock.end("save")
        return Outcome("finished", step, run, begun, clock.seconds, model, prepared.tokenizer)
    save_result(trainer, prepared, run, kept)
    clock.end("save")
    if is_main():
        run.set_status("finished", step=step, **asdict(kept))
    say(f"finished: {run.model} holds {kept}")
    if config.train.push_to_hub and is_main():
        push(run, config.train.push_to_hub, say, private=config.train.push_private)
    return Outcome("finished", step, run, begun, clock.seconds)


class Clock:
    """The wall seconds of the parts of a call, one after the other."""

    def __init__(self, begin: float):
        self.last = begin
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.last = now - self.last, now


@dataclass(frozen=True)
class Settings:
    """What trainers change in a model's configs: the cache, and the special tokens, which generation stops at."""

    config: dict[str, Any]
    generation: Any

    @classmethod
    def of(cls, model: Any) -> Settings:
        names = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
        text = model.config.get_text_config()
        found = {name: getattr(text, name) for name in names if hasattr(text, name)}
        return cls(found, copy.deepcopy(getattr(model, "generation_config", None)))


def take_model(trainer: Any, untrained: Settings) -> Any:
    """The trained model as `load_result` would load it from the run's folder; the trainer is of no use afterwards.

    The model is in evaluation mode, without the forwards, hooks and checkpointing of the training. The optimizer's
    state and the gradients are freed, so that a GPU has their memory for what follows.
    """
    import gc

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    base = base_of(model)
    if trainer.masters is not None:
        trainer.masters.release()
    detach_objective(base)
    for name in ("forward", "_original_forward"):  # accelerate's autocast, around PEFT's wrapper if there is one
        model.__dict__.pop(name, None)
    if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        old, new = "gradient_checkpointing_disable", "activation_checkpointing_disable"  # since transformers 5.23
        getattr(base, new if hasattr(base, new) else old)()
    for module in base.modules():  # TRL and transformers both add this hook, and keep the handle of one
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                del module._forward_hooks[key]
    text = base.config.get_text_config()
    if model is base:  # its own configs are saved with it, but the cache is switched off for the training alone
        if "use_cache" in untrained.config:
            base.config.use_cache = text.use_cache = untrained.config["use_cache"]
    else:  # an adapter is loaded into the untrained model, for inference
        for name, value in untrained.config.items():
            setattr(text, name, value)
        base.generation_config = untrained.generation
        model.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    trainer.optimizer.state.clear()
    trainer.accelerator.free_memory()
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model.eval()


@dataclass(frozen=True)
class Kept:
    """The step whose weights the run ends with, and by which measure (``train.best``) it was chosen."""

    kept: int
    by: str = "none"
    value: float | None = None
    last: float | None = None  # the measure at the last step
    stopped_early: str | None = None  # why the run ended before its steps were done

    def __str__(self) -> str:
        if self.by == "none":
            return f"the weights of step {self.kept}, the last"
        text = f"the weights of step {self.kept}: best {self.by} {self.value:.4g}"
        if self.value != self.last:
            text += f" (last step: {self.last:.4g})"
        return text + (f"; stopped early: {self.stopped_early}" if self.stopped_early else "")


def keep_best(trainer: Any, config: RunConfig, run: Run) -> Kept:
    """Load the weights that ``train.best`` asks for into the model; by default those of the last step stay."""
    step, best = trainer.state.global_step, trainer.state.best_global_step
    metric = best_metric(config.train.best)
    if metric is None:
        return Kept(step)
    assert best is not None, "the last step is evaluated"
    last = next(r[metric] for r in reversed(trainer.state.log_history) if metric in r)
    if best != step:
        trainer.load_checkpoint_weights(run.checkpoints / f"{checkpoints.PREFIX}{best}")
    early = None
    if trainer.has_stopped_early and step < trainer.state.max_steps:
        number = config.train.stop_after
        early = (
            f"{number} evaluation{'s' * (number != 1)} without improvement at step {step} of {trainer.state.max_steps}"
        )
    return Kept(best, config.train.best, float(trainer.state.best_metric), float(last), early)


def read_fingerprint(run: Run) -> str | None:
    """The fingerprint of the data that a run began with; None for a run that has not begun."""
    path = run.folder / "data.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["fingerprint"]) if path.is_file() else None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path}: is damaged; restore it, or start another run with --set run=...") from None


def read_time(runs: Sequence[Run]) -> datetime:
    """The time that the chat template wrote into the data of the first of ``runs`` that has one; else now."""
    for run in runs:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return datetime.fromisoformat(json.loads((run.folder / "data.json").read_text(encoding="utf-8"))["now"])
    return datetime.now()


def refuse_other_rows(prepared: Prepared, alike: Sequence[Run]) -> None:
    """Refuse data that is not that of runs which this one will be compared with."""
    begun = {run.folder: found for run in alike if (found := read_fingerprint(run)) and found.startswith(ARRAYS)}
    now = fingerprint(prepared) if begun else None
    if other := next((folder for folder, before in begun.items() if before != now), None):
        raise ValueError(
            f"{other}: was trained on other rows (tokens or masks differ), so the runs cannot be compared; restore the "
            f"data, or begin another comparison with --set folder=..."
        )


def compare_ranks(prepared: Prepared) -> None:
    """Refuse ranks with different data, on all of them: machines may have files of their own."""
    if not has_ranks():
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fingerprint(prepared))
    if others := [rank for rank, one in enumerate(found) if one != found[0]]:
        raise ValueError(
            f"rank {others[0]} has other rows than rank 0 (tokens or masks differ); give every machine the same files, "
            f"and leave them as they are while the run starts"
        )


def record_data(prepared: Prepared, run: Run) -> None:
    """Write what the data was; a resumed run whose data changed is refused."""
    now: dict[str, Any] = {"fingerprint": fingerprint(prepared), "facts": facts(prepared)}
    if prepared.now is not None:
        now["now"] = prepared.now.isoformat()
    before = read_fingerprint(run)
    # a run that an earlier version began has the other kind
    own = fingerprint_of_lists(prepared) if before and not before.startswith(ARRAYS) else now["fingerprint"]
    if before is not None and before != own:
        raise ValueError(
            f"{run.folder}: the data is not what the run began with (tokens or masks differ); restore it, or start "
            f"another run with --set run=..."
        )
    write_atomic(run.folder / "data.json", json.dumps(now, indent=1))
    if prepared.bad.skip and prepared.bad.rows:
        prepared.bad.write(run.folder / "bad_rows.jsonl")


def save_result(trainer: Any, prepared: Prepared, run: Run, kept: Kept) -> None:
    """The tuned model (or adapter) and its tokenizer, sealed, with a card."""
    trainer.accelerator.wait_for_everyone()
    staging = run.folder / f".model-{os.environ.get('MASTER_PORT', '0')}"
    main = is_main()
    try:
        with sealed_folder(staging, run.model) if main else nullcontext():
            trainer.accelerator.wait_for_everyone()
            trainer.save_model(str(staging))
            trainer.accelerator.wait_for_everyone()
            if main:
                prepared.tokenizer.save_pretrained(staging)
                # what the trainer keeps for itself
                (staging / "training_args.bin").unlink(missing_ok=True)
                card = render_card(prepared, run, kept=kept.kept, holds=str(kept))
                (staging / "README.md").write_text(card, encoding="utf-8")
                name_base_model(staging, prepared.config)
    except (OSError, RuntimeError) as error:
        if reason := disk_error(error):
            raise FolderError(f"{run.model}: could not be written ({reason})") from error
        raise
    trainer.accelerator.wait_for_everyone()


def push(run: Run, hub_id: str, say: Callable[[str], None], *, private: bool = False) -> None:
    """Upload the result, on request; ``private`` is for a repository that this call makes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(hub_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=hub_id, folder_path=str(run.model))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(f"push_to_hub: {hub_id}: {error}; the model is safe in {run.model}") from error
    say(f"uploaded to {hub_id}")


def dry_run(config: RunConfig, say: Callable[[str], None]) -> None:
    """One micro-batch forward and backward: what a run would take, without a run's folder."""
    import tempfile

    from deftune.training.trainer import StepInputs, peak_gib

    with quiet(), tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, say)
        for line in facts(prepared):
            say(line)
        trainer = make_trainer(prepared, Run(Path(folder)), [])
        model = trainer.model
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        everything = sum(p.numel() for p in model.parameters())
        batches = iter(trainer.get_train_dataloader())
        first, seconds = next(batches), 0.0
        supervised = int((first["labels"] != -100).sum())
        say(f"first micro-batch: {tuple(first['input_ids'].shape)} tokens, {supervised:,} of them supervised")
        for _ in range(2):  # the first time warms up
            trainer._inputs = StepInputs(1, [first], max(1, supervised))
            start = time.perf_counter()
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model.train(), trainer._prepare_inputs(dict(first)))
            loss.backward()
            seconds = time.perf_counter() - start if not torch.cuda.is_available() else _synced(start)
            model.zero_grad(set_to_none=False)
        state = MOMENT_BYTES[config.train.optimizer] * trainable / 2**30
        accumulation = config.train.batch_size // (config.train.micro_batch_size * data_ranks(config))
        say(f"{trainable:,} of {everything:,} parameters are trained, in {precision_of(config)}")
        say(f"memory about {peak_gib(trainer.accelerator.device) + state:.1f} GiB, {state:.1f} of it the optimizer's")
        step = seconds * accumulation
        say(f"a step takes about {step:.1f} s, the run {step * prepared.steps / 60:.0f} min")


def _synced(start: float) -> float:
    torch.cuda.synchronize()
    return time.perf_counter() - start
