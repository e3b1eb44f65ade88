"""`hf_loss` under DeepSpeed goes the way of a plain loop; `DeftSFTTrainer` refuses DeepSpeed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack_runs import assert_trains, make_files, needs_stack, read_run


@needs_stack("deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hf_loss_trains_as_a_plain_loop(stage, tmp_path, monkeypatch):
    """Two ranks of ZeRO, two micro-batches a step: each step divides by the tokens of all four."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # DeepSpeed sets it where it is imported
    make_files(tmp_path)
    driver = Path(__file__).parent / "drivers" / "deepspeed_steps.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                   "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    done = subprocess.run(
        [*torchrun, str(driver), str(tmp_path), str(stage), "deft"], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    run = read_run(tmp_path, f"zero{stage}", ranks=2)
    assert max(len(step) for step in run["steps"]) == 4
    assert_trains(tmp_path / "model", run, "deft")


def test_our_trainer_refuses_deepspeed():
    pytest.importorskip("trl", minversion="1.15", reason="DeftSFTTrainer needs TRL 1.15")
    from types import SimpleNamespace

    from deftune.objectives import objective
    from deftune.training.refusals import check_arguments

    with pytest.raises(ValueError, match="DeepSpeed updates the weights inside the backward pass"):
        check_arguments(objective("deft"), SimpleNamespace(deepspeed={"zero_optimization": {"stage": 2}}), {})
