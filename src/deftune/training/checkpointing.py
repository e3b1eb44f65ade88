"""Checkpoints of a trainer: written under a temporary name, sealed with checksums, renamed, rotated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from deftune.artifacts import checkpoints
from deftune.tokens.head import base_of
from deftune.training import sharded
from deftune.training.machine import has_ranks
from deftune.training.optimizers import Masters


class CheckpointingTrainer(SFTTrainer):
    """TRL's SFTTrainer; below ``checkpoint_root`` its checkpoints are sealed folders that verify before they are read.

    Without a ``checkpoint_root`` everything is as in SFTTrainer.
    """

    checkpoint_root: Path | None = None
    keep: int | None = None  # newest checkpoints that stay; None: all
    pinned: frozenset[int] = frozenset()  # steps whose checkpoints stay, too
    distributed_checkpoints: bool = False  # each rank writes its shards
    async_checkpoints: bool = False  # by a thread, while training goes on; with several ranks
    masters: Masters | None = None  # the float32 copies of bfloat16 weights: what is saved and loaded
    _staging: Path | None = None  # where the checkpoint that is being written lies
    _group: Any = None  # of the threads that write shards
    _shards: Future[Any] | None = None  # that are being written into the staging folder
    _unfinished: Future[None] | None = None  # the checkpoint that is being written
    _clock: float = 0.0  # when the last step was logged; the time of a save is not the next step's

    def load_checkpoint_weights(self, folder: Path) -> None:
        """Replace the weights (or the adapter) by those of a verified checkpoint."""
        self.finish_checkpoint()
        checkpoints.verify(folder)
        if sharded.is_sharded(folder):
            sharded.load(folder, self.model)
            return
        self.state.best_model_checkpoint = str(folder)
        with self.whole_weights():
            super()._load_best_model()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside, the model's parameters are what checkpoints hold."""
        return contextlib.nullcontext() if self.masters is None else self.masters.in_model()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run writes its own card."""
        if self.checkpoint_root is None:
            super().create_model_card(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging.parent)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's checkpoint; below ``checkpoint_root`` it is written under a temporary name, sealed and renamed."""
        if self.checkpoint_root is None:
            super()._save_checkpoint(model, trial)
            return
        clock = time.perf_counter()
        self.finish_checkpoint()
        root, step, best = self.checkpoint_root, self.state.global_step, self.state.best_global_step
        main = self.accelerator.is_main_process
        # every rank writes into the staging folder of the main one, which seals it when all are done
        staging = root / f"{checkpoints.STAGING}{step}" / f"{checkpoints.PREFIX}{step}"
        with ExitStack() as stack:
            if main:
                stack.enter_context(checkpoints.staged(root, step))
            self.accelerator.wait_for_everyone()
            self._staging = staging
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            self.accelerator.wait_for_everyone()
            if main:
                self._save_state(staging, root)
            sealing, (shards, self._shards) = stack.pop_all(), (self._shards, None)

        def finish() -> None:
            with sealing:
                if shards is not None:
                    shards.result()
                if main:
                    flatten(staging)
            if main:
                checkpoints.rotate(root, self.keep, best, newest=step, pinned=self.pinned)

        if shards is None:
            finish()
            self.accelerator.wait_for_everyone()
        else:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._unfinished = thread.submit(finish)
            thread.shutdown(wait=False)
        self._clock += time.perf_counter() - clock

    def finish_checkpoint(self) -> None:
        """Wait until a checkpoint that is being written is whole; every rank calls this.

        Raises:
            FolderError: on rank 0, if the checkpoint could not be written; the one before is untouched.
        """
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            unfinished.result()
            self.accelerator.wait_for_everyone()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; afterwards no checkpoint is being written."""
        try:
            output = super().train(*args, **kwargs)
        except BaseException:
            if self._unfinished is not None:  # its threads use a process group, which the caller may leave
                self._unfinished.exception()
            raise
        self.finish_checkpoint()
        return output

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.distributed_checkpoints:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.async_checkpoints and has_ranks():
            if self._group is None:
                self._group = dist.new_group(backend="gloo")
            self._shards = sharded.start_saving(Path(output_dir), self.model, self.optimizer, self._group)
        else:
            sharded.save(Path(output_dir), self.model, self.optimizer)
        scheduler: Any = self.lr_scheduler
        if self.args.should_save:
            torch.save(scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not sharded.is_sharded(Path(resume_from_checkpoint)):  # otherwise together with the optimizer's state
            with self.whole_weights():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not sharded.is_sharded(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        sharded.load(Path(checkpoint), self.model, self.optimizer)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))

    def rotate_checkpoints(self) -> None:
        """Remove the checkpoints below ``checkpoint_root`` that are not to be kept."""
        assert self.checkpoint_root is not None
        step, best = self.state.global_step, self.state.best_global_step
        checkpoints.rotate(self.checkpoint_root, self.keep, best, newest=step, pinned=self.pinned)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As in transformers; the path of the best checkpoint follows a run's folder that was moved."""
        epochs, skipped = super()._init_training_state(*args, **kwargs)
        if self.checkpoint_root is not None and (best := self.state.best_global_step) is not None:
            self.state.best_model_checkpoint = str(self.checkpoint_root / f"{checkpoints.PREFIX}{best}")
        return epochs, skipped

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in transformers; tied weights, which sharded models gather twice, are written once."""
        if state_dict is None and self.get_tp_size() > 1:  # every rank is here
            parts: dict[str, Any] = base_of(self.model).state_dict()
            state_dict = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in parts.items()}
        if state_dict is not None:
            tied: dict[str, str] = getattr(base_of(self.model), "all_tied_weights_keys", {})
            state_dict = {k: v for k, v in state_dict.items() if tied.get(k) not in state_dict}
        with self.whole_weights():
            super()._save(output_dir, state_dict=state_dict)

    def _save_state(self, written: Path, root: Path) -> None:
        """Save the state anew, with the final place of the best checkpoint."""
        if (best := self.state.best_global_step) is not None:
            self.state.best_model_checkpoint = str(root / f"{checkpoints.PREFIX}{best}")
        self.state.save_to_json(str(written / "trainer_state.json"))


def flatten(written: Path) -> None:
    """The checkpoint's files one level up, where the sealed folder wants them."""
    for path in list(written.iterdir()):
        path.rename(written.parent / path.name)
    written.rmdir()


@contextlib.contextmanager
def unsaved(args: Any) -> Generator[None]:
    """transformers refuses to save the optimizer of a model that was divided at its loading; `sharded.save` can."""
    if args is None:
        yield
        return
    before, args.save_only_model = args.save_only_model, True
    try:
        yield
    finally:
        args.save_only_model = before
