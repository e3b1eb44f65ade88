"""`deftune train`: from a config to a run. What cannot be honoured is refused before the model is loaded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from deftune.artifacts import checkpoints
from deftune.artifacts.config import RunConfig
from deftune.artifacts.display import quiet
from deftune.artifacts.folders import locked
from deftune.artifacts.models import first_line
from deftune.artifacts.runs import Run, cut_metrics, find_run, open_run
from deftune.artifacts.terminal import line_printer
from deftune.training.assembly import ScoreTasks, load_base, make_trainer
from deftune.training.data_record import compare_ranks, facts, read_time, record_data, refuse_other_rows
from deftune.training.display import StepDisplay
from deftune.training.ending import Settings, keep_best, push, save_result, take_model
from deftune.training.machine import base_dtype, from_main, is_main, world_size
from deftune.training.preparation import Prepared, prepare
from deftune.training.reuse import Reuse
from deftune.training.stopping import StopSignal
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
            state.save_steps = args.save_steps  # transformers would go on with that of the checkpoint
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


# --- a run ------------------------------------------------------------------------------------------------------------


def train_run(
    config: RunConfig, console: Console | None = None, *, title: str = "train", score_tasks: ScoreTasks | None = None,
    restart: bool = False, save: bool = True, reuse: Reuse | None = None, profile: bool = False,
    alike: Sequence[Run] = (),
) -> Outcome:  # fmt: skip
    """Train a run to its end. An existing run is resumed from its newest valid checkpoint.

    Every rank of a distributed launch calls this function. On SIGTERM it saves a checkpoint and returns early.

    Args:
        config: the run.
        console: where progress is shown; standard error by default.
        title: the name in front of the progress bar.
        score_tasks: ``score_tasks(model, tokenizer)`` is {task: score} for the tasks of ``data.tasks``;
            `deftune.evaluation.in_training.task_scorer` makes one.
        restart: train from step 0; existing checkpoints are renamed, not removed.
        save: False: write neither the last checkpoint nor the model folder. The outcome then has the tuned ``model``
            and ``tokenizer``, on the device of the training, unless the run's folder already has a model.
        reuse: keeps the data and the untrained model for the next run in this process; one rank only.
        profile: print where the time of a step goes (`deftune.training.profiling`), and write profile.json into the
            run's folder; the training does not change.
        alike: other runs that must have the same tokens and masks, because they will be compared; a run that has not
            started yet is skipped.

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
    if reuse is not None and world_size() > 1:
        raise ValueError("reuse: every rank of a distributed launch loads its own part of the model; leave reuse out")
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
            if is_main():
                for change in open_run(config)[1]:
                    say(f"changed since the run began: {change}")
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
        with failures_recorded(run, trainer), stop.listening(), profiler or nullcontext():
            trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    except BaseException as error:
        display.stop()
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
    with failures_recorded(run, trainer):
        kept = keep_best(trainer, config, run)
        if prepared.eval is not None:
            trainer.evaluate()
        clock.end("evaluate")
        if untrained is None:
            save_result(trainer, prepared, run, kept)
    if untrained is not None:
        model = take_model(trainer, untrained)
        run.set_status("finished", step=step, **asdict(kept))
        say(f"finished: in memory are {kept}")
        clock.end("save")
        return Outcome("finished", step, run, begun, clock.seconds, model, prepared.tokenizer)
    clock.end("save")
    if is_main():
        run.set_status("finished", step=step, **asdict(kept))
    say(f"finished: {run.model} holds {kept}")
    if config.train.push_to_hub and is_main():
        push(run, config.train.push_to_hub, say, private=config.train.push_private)
    return Outcome("finished", step, run, begun, clock.seconds)


@contextmanager
def failures_recorded(run: Run, trainer: Any) -> Generator[None]:
    """Record an error in the status of the run."""
    try:
        yield
    except BaseException as error:
        if is_main():
            with suppress(OSError):  # a full disk has been named already
                run.set_status("failed", step=trainer.state.global_step, error=str(error).splitlines()[:1])
        raise


class Clock:
    """The wall seconds of the parts of a call, one after the other."""

    def __init__(self, begin: float):
        self.last = begin
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.last = now - self.last, now
