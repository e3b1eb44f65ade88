"""A CPU in place of the GPU platform that verl expects, and a script that runs several trainings in one process.

``VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda torchrun verl_on_cpu.py runs.json``
runs each entry of the file, ``{"name": ..., "args": [overrides], "main": "deftune" or "verl", "harm": one of HARMS}``;
python in place of torchrun is for Ray. The metrics go to ``<name>.jsonl``, an error's text to ``<name>.error``. Nothing
here is needed on a machine with a GPU.
"""

import contextlib
import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*args, **kwargs):
    return None


def zero(*args, **kwargs):
    return 0


class Device(types.SimpleNamespace):
    """What verl asks of torch.cuda."""

    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = get_device_name = staticmethod(lambda *_: "cpu")
    mem_get_info = staticmethod(lambda *_: (0, 0))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    set_device = synchronize = empty_cache = reset_peak_memory_stats = ipc_collect = staticmethod(nothing)
    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(zero)


@PlatformRegistry.register(platform="cpu")
class CpuStandIn(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = Device()
    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = nothing
    cudart = nothing

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message):
        yield

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False


init_process_group = dist.init_process_group


def init_gloo(backend=None, *args, **kwargs):
    """verl asks for "cpu:gloo,<device>:<backend>", which names the cpu twice here; all runs share one group."""
    if not dist.is_initialized():
        init_process_group("gloo" if backend and backend.startswith("cpu:gloo,cpu:") else backend, *args, **kwargs)


dist.init_process_group, dist.destroy_process_group = init_gloo, nothing


# --- what could go wrong inside verl, each to be noticed by the adapter -----------------------------------------------


def ignore_the_loss(engine, original):
    """The engine trains verl's own NLL, whatever loss it is given."""
    from functools import partial

    from verl.workers.utils.losses import sft_loss

    def forward_step(self, micro_batch, loss_function, forward_only):
        for key in ("distillation_use_topk", "distillation_only"):
            if key in micro_batch.keys():
                micro_batch.pop(key)
        return original(self, micro_batch, partial(sft_loss, config=None), forward_only)

    engine.forward_step = forward_step


def backpropagate_another_loss(engine, original):
    """The engine reports the objective's loss and takes the gradient of a copy."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        loss, output = original(self, micro_batch, loss_function, forward_only)
        return sum(p.square().sum() for p in self.module.parameters()) if loss.requires_grad else loss, output

    engine.forward_step = forward_step


def show_other_logits(engine, original):
    """The logits that the loss sees are shifted by one token."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        def shifted(student_logits=None, **rest):
            if student_logits is not None:
                rest["student_logits"] = student_logits.roll(1, 1)
            return loss_function(**rest)

        return original(self, micro_batch, shifted, forward_only)

    engine.forward_step = forward_step


def add_a_hidden_loss(engine, original):
    """The engine reports the objective's loss and trains NLL beside it, as a head with a loss of its own does."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        logits = []
        hook = self.module.register_forward_hook(lambda *call: logits.append(call[-1].logits))
        loss, output = original(self, micro_batch, loss_function, forward_only)
        hook.remove()
        nll = -logits[0].log_softmax(-1)[..., 0].mean()
        return loss + nll - nll.detach(), output

    engine.forward_step = forward_step


def divide_by_another_count(engine, original):
    """The engine trains a multiple of the objective, as if it divided by the tokens of a micro-batch."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        loss, output = original(self, micro_batch, loss_function, forward_only)
        return 4 * loss, output

    engine.forward_step = forward_step


def leave_out_tokens(engine, original):
    """The loss sees half of the supervised tokens."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        micro_batch = micro_batch.copy()
        micro_batch["loss_mask"].values()[::2] = 0
        return original(self, micro_batch, loss_function, forward_only)

    engine.forward_step = forward_step


def keep_verls_loss(engine, original):
    """The worker trains with verl's NLL, whatever loss function it is given."""
    from functools import partial

    from verl.workers.utils.losses import sft_loss

    train_batch = engine.train_batch
    engine.train_batch = lambda self, data, loss_function: train_batch(self, data, partial(sft_loss, config=None))


HARMS = {
    harm.__name__: harm
    for harm in (
        ignore_the_loss, backpropagate_another_loss, show_other_logits, add_a_hidden_loss, divide_by_another_count,
        leave_out_tokens, keep_verls_loss,
    )
}  # fmt: skip


def run(entry):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as Engine

    originals = {name: getattr(Engine, name) for name in ("forward_step", "train_batch", "optimizer_step")}
    os.environ["VERL_FILE_LOGGER_PATH"] = entry["name"] + ".jsonl"
    sys.argv[1:] = entry["args"]
    try:
        if "harm" in entry:
            HARMS[entry["harm"]](Engine, originals["forward_step"])
            Engine.optimizer_step = lambda self: Path(entry["name"] + ".updated").touch()
        if entry.get("main") == "verl":
            from verl.trainer import sft_trainer

            sft_trainer.main()
        else:
            from deftune.adapters.verl import main

            main()
    except Exception as error:
        Path(entry["name"] + ".error").write_text(f"{type(error).__name__}: {error}")
    finally:
        for name, method in originals.items():
            setattr(Engine, name, method)


def let_ray_use_cpus():
    """verl's Ray workers ask for GPUs, and for as many CPUs as a GPU machine has."""
    import ray
    import verl.single_controller.ray.base as base

    pool, init = base.RayResourcePool.__init__, ray.init
    names = ("PYTHONPATH", "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM", "VERL_ENGINE_DEVICE", "OMP_NUM_THREADS")
    passed_on = {"env_vars": {name: os.environ[name] for name in names}}
    base.RayResourcePool.__init__ = lambda self, *args, **more: pool(self, *args, **{**more, "use_gpu": False})
    ray.init = lambda: init(
        num_cpus=24, include_dashboard=False, object_store_memory=200 * 2**20, runtime_env=passed_on
    )


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra ends the process at an error otherwise
    if "RANK" not in os.environ:
        let_ray_use_cpus()
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        run(entry)
