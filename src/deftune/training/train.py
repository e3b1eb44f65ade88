"""`deftune train`: from a config to a run. What cannot be honoured is refused before the model is loaded."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deftune.artifacts import checkpoints
from deftune.artifacts.config import RunConfig
from deftune.artifacts.display import duration, quiet
from deftune.artifacts.folders import locked
from deftune.artifacts.models import first_line
from deftune.artifacts.runs import Run, cut_metrics, find_run, open_run
from deftune.artifacts.terminal import line_printer
from deftune.training.assembly import ScoreTasks, load_base, make_trainer
from deftune.training.data_record import compare_ranks, facts, read_time, record_data, refuse_other_rows
from deftune.training.display import StepDisplay
from deftune.training.ending import Untrained, keep_best, push, save_result, take_model
from deftune.training.machine import base_dtype, data_ranks, from_main, is_main, precision_of, world_size
from deftune.training.plan import MOMENT_BYTES
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
    start_step: int = 0  # the step that this call started from
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # wall time of prepare, train, evaluate, save
    model: Any = None  # with save=False: the tuned model, ready to measure
    tokenizer: Any = None  # with save=False


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
    run = find_run(config) if is_main() else Run(Path(config.run))
    if run.has_result():
        if restart:
            raise ValueError(f"--restart: {run.folder} is finished; train anew in another folder, --set run=...")
        if profile:
            raise ValueError(f"--profile: {run.folder} is finished; profile another folder, --set run=...")
        say(f"{run.folder}: already finished; its model is in {run.model}")
        step = run.status()["step"]
        return Outcome("finished", step, run, step)
    display = StepDisplay(console, title, [task.name for task in config.data.tasks])
    with quiet():
        return Job(config, run, say, display, score_tasks, restart, save, reuse, profile, alike).execute()


def fits_in_memory(config: RunConfig) -> bool:
    """Whether a run can end without files: nothing is read back from a checkpoint, uploaded or sharded.

    Frozen weights in bfloat16 or 4 bits, or another attention, are not what `load_result` loads.
    """
    train = config.train
    model = config.model
    whole = base_dtype(config) == "float32" and model.quantization is None and model.attention_implementation == "auto"
    return whole and train.best == "none" and not train.push_to_hub and not train.fsdp and world_size() == 1


class Clock:
    """The wall seconds of the parts of a call, one after the other."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.last = now - self.last, now


@dataclass
class Job:
    """One call of `train_run`, with its arguments."""

    config: RunConfig
    run: Run
    say: Callable[[str], None]
    display: StepDisplay
    score_tasks: ScoreTasks | None
    restart: bool
    save: bool
    reuse: Reuse | None
    profile: bool
    alike: Sequence[Run]
    stop: StopSignal = field(default_factory=StopSignal)
    clock: Clock = field(default_factory=Clock)

    def execute(self) -> Outcome:
        """Prepare, train and end the run. Meanwhile no other process trains in its folder."""
        run, save = self.run, self.save
        with ExitStack() as stack:
            prepared = self.prepare(stack)
            stack.enter_context(tracking(self.config.train.report_to, run.folder / "logs"))
            resumed = self.find_checkpoint()
            base = self.reuse.load_base(prepared) if self.reuse else None if save else load_base(prepared)
            untrained = None if save else Untrained.of(base)
            trainer = make_trainer(prepared, run, self.score_tasks, base)
            resumed = from_main(resumed)  # torch.distributed runs since the trainer is made
            if trainer.compile_layers:
                self.say("the decoder layers are compiled, which takes some seconds of the first steps")
            elif prepared.checkpointing.needs_compiled:
                self.say("gradient checkpointing is on: this model's layers are not compiled, and need more memory")
            compare_ranks(prepared)
            start_step = checkpoints.step_of(resumed) or 0 if resumed else 0
            profiler = self.make_profiler(trainer, prepared.steps - start_step) if self.profile else nullcontext()
            self.clock.end("prepare")
            self.train(trainer, resumed, start_step, profiler)
            self.clock.end("train")
            step = trainer.state.global_step
            if self.stop.received_anywhere(trainer.args.device):
                self.end_stopped(trainer)
                return Outcome("stopped", step, run, start_step, self.clock.seconds)
            model = self.end(trainer, prepared, untrained)
            return Outcome(
                "finished", step, run, start_step, self.clock.seconds, model, None if save else prepared.tokenizer
            )

    def prepare(self, stack: ExitStack) -> Prepared:
        """Read the data, open and lock the run's folder, print and record what the data is."""
        lock = locked(self.run.folder, TRAINING)
        exists = self.run.config.exists()
        if is_main() and exists:  # before the data is read, which may take long
            stack.enter_context(lock)
        read = self.reuse.prepare if self.reuse else prepare
        prepared = read(self.config, self.say, read_time([self.run, *self.alike]))
        refuse_other_rows(prepared, self.alike)
        if is_main() and not exists:  # wrong data leaves no folder behind
            stack.enter_context(lock)
        if is_main():
            for change in open_run(self.config)[1]:
                self.say(f"changed since the run began: {change}")
        for line in facts(prepared):
            self.say(line)
        if is_main():
            record_data(prepared, self.run)
        return prepared

    def find_checkpoint(self) -> Path | None:
        """The checkpoint to resume from, which rank 0 verifies; None on the other ranks."""
        if not is_main():
            return None
        if not self.restart:
            return checkpoints.latest(self.run.checkpoints, self.say)
        if renamed := checkpoints.set_aside(self.run.checkpoints):
            self.say(f"training from the beginning; the checkpoints are in {renamed}")
        return None

    def make_profiler(self, trainer: Any, left: int) -> AbstractContextManager[Any]:
        """Print the profile of some steps, and write it into the run's folder; ``left`` are the steps of this call."""
        from deftune.training.profiling import STEPS, StepProfiler

        if left < STEPS:
            raise ValueError(
                f"--profile: needs {STEPS} steps, and the run has {left} left; raise train.max_steps or train.epochs, "
                f"or lower train.batch_size"
            )

        def report(profile: Any) -> None:
            for line in profile.lines():
                self.say(line)

        profiler = StepProfiler(lambda: trainer, report, self.run.folder / "profile.json" if is_main() else None)
        trainer.add_callback(profiler)
        return profiler

    def train(self, trainer: Any, resumed: Path | None, start_step: int, profiler: AbstractContextManager[Any]) -> None:
        """Run the optimizer steps after step ``start_step``, to the end or to a signal."""
        from deftune.training.recording import RunCallback

        run = self.run
        trainer.add_callback(RunCallback(trainer, run, self.display, self.stop, self.save))
        if is_main():
            checkpoints.clear_staging(run.checkpoints)
            cut_metrics(run, start_step)
            run.set_status("running", step=start_step)
            if start_step:
                self.say(f"resuming from {resumed}")
        try:
            with failures_recorded(run, trainer), self.stop.handling(), profiler:
                trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
        except BaseException as error:
            self.display.stop()
            unusual = isinstance(error, Exception) and not isinstance(error, ValueError | OSError)
            if is_main() and resumed and self.display.task is None and unusual:
                # before the first step: what a verified checkpoint holds is not what a run writes there
                raise ValueError(
                    f"{resumed}: cannot be resumed from ({type(error).__name__}: {first_line(error)[:200]}); restore "
                    f"it, or train from the beginning with --restart"
                ) from error
            raise
        if is_main():  # again: a kill may have come between the last checkpoint and its predecessor's removal
            trainer.rotate_checkpoints()

    def end_stopped(self, trainer: Any) -> None:
        """A signal stopped the run, which can be resumed."""
        step = trainer.state.global_step
        if not self.save and not (self.run.checkpoints / f"{checkpoints.PREFIX}{step}").is_dir():  # at the last step
            trainer._save_checkpoint(trainer.model, None)
        if is_main():
            self.run.set_status("stopped", step=step)
        self.say(f"stopped at step {step} with a checkpoint; the same command resumes")

    def end(self, trainer: Any, prepared: Prepared, untrained: Untrained | None) -> Any:
        """Choose the weights that stay, evaluate and save them; without ``save``, return their model."""
        run, train, step, model = self.run, self.config.train, trainer.state.global_step, None
        with failures_recorded(run, trainer):
            kept = keep_best(trainer, self.config, run)
            if prepared.eval is not None:
                trainer.evaluate()
            self.clock.end("evaluate")
            if untrained is None:
                save_result(trainer, prepared, run, kept)
        if untrained is not None:
            model = take_model(trainer, untrained)
        if is_main():
            run.set_status("finished", step=step, **asdict(kept))
        self.clock.end("save")
        self.say(f"finished: in memory are {kept}" if untrained else f"finished: {run.model} holds {kept}")
        if train.push_to_hub and is_main():
            push(run, train.push_to_hub, self.say, private=train.push_private)
        return model


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


# --- a dry run --------------------------------------------------------------------------------------------------------


def dry_run(config: RunConfig, say: Callable[[str], None]) -> None:
    """One micro-batch forward and backward: what a run would take, without a run's folder."""
    from deftune.training.attention import attention_kernels
    from deftune.training.nonfinite import StepInputs
    from deftune.training.trainer import peak_gib

    with quiet(), tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, say)
        for line in facts(prepared):
            say(line)
        trainer = make_trainer(prepared, Run(Path(folder)))
        model = trainer.model
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        everything = sum(p.numel() for p in model.parameters())
        batches = iter(trainer.get_train_dataloader())
        first, seconds = next(batches), 0.0
        supervised = int((first["labels"] != -100).sum())
        say(f"first micro-batch: {tuple(first['input_ids'].shape)} tokens, {supervised:,} of them supervised")
        with attention_kernels(trainer.attention, model), trainer.layers_compiled():
            for _ in range(2):  # the first time warms up
                trainer._inputs = StepInputs(1, [first], max(1, supervised))
                start = time.perf_counter()
                with trainer.accelerator.autocast():
                    loss = trainer.compute_loss(model.train(), trainer._prepare_inputs(dict(first)))
                loss.backward()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                model.zero_grad(set_to_none=False)
        state = MOMENT_BYTES[config.train.optimizer] * trainable / 2**30
        accumulation = config.train.batch_size // (config.train.micro_batch_size * data_ranks(config))
        say(f"{trainable:,} of {everything:,} parameters are trained, in {precision_of(config)}")
        say(f"memory about {peak_gib(trainer.accelerator.device) + state:.1f} GiB, {state:.1f} of it the optimizer's")
        step = seconds * accumulation
        more = ", without its evaluations" if config.train.eval_steps else ""
        shown = f"{step:.1f} s" if step >= 1 else duration(step)
        say(f"a step takes about {shown}, the run {duration(step * prepared.steps)}{more}")
