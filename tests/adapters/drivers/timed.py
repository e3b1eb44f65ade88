"""Train with a stack, and write the CPU time of its steps: timed.py FOLDER STACK NAME STEPS

FOLDER/runs.json holds {NAME: arguments}, as for recorded.py, titan_trajectory.py and megatron_trajectory.py; where NAME
is `stock`, the stack trains its own NLL, without deftune. The process writes FOLDER/NAME.json after the last step and
ends there: nothing is saved. A step is the time from the end of an optimizer step to the end of the next.
"""

import itertools
import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def end_after(path: Path, steps: int) -> None:
    """Ends this process after so many optimizer steps, with its figures at ``path``."""
    ends: list[float] = []

    def record(optimizer, *_):
        if type(optimizer) is not torch.optim.AdamW:  # torchtitan's container, an optimizer around the optimizers
            return
        ends.append(time.process_time())  # user and system time of all threads of this process
        if len(ends) < steps:
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradient = sum(float(grad.double().abs().sum()) for grad in gradients)  # which loss was trained
        seconds = [after - before for before, after in itertools.pairwise(ends)]
        path.write_text(json.dumps({"seconds": seconds, "peak_mib": peak, "gradient": gradient}))
        sys.stdout.flush()
        os._exit(0)

    register_optimizer_step_post_hook(record)


def main(folder: str, stack: str, name: str, steps: str) -> None:
    torch.set_num_threads(1)
    end_after(Path(folder, f"{name}.json"), int(steps))
    arguments = json.loads(Path(folder, "runs.json").read_text())[name]
    if stack == "llamafactory" and name == "stock":
        from llamafactory.train.tuner import run_exp

        sys.argv = ["llamafactory-cli", *arguments]
        run_exp()
    elif stack in ("llamafactory", "swift", "axolotl"):
        from recorded import run

        run(stack, arguments)
    else:
        script = {"torchtitan": "titan_trajectory.py", "megatron": "megatron_trajectory.py"}[stack]
        sys.argv = [script, folder, stack, name]
        runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
    raise SystemExit(f"{stack} ended before step {steps}")


if __name__ == "__main__":
    main(*sys.argv[1:])
