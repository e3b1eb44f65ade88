"""`deftune doctor`: what the machine has, the backends by name, and checks that can fail."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from deftune.cli import main
from deftune.comparison.worker import FLAGS
from deftune.losses.torch_backend import TorchBackend
from deftune.training import doctor
from deftune.training.doctor import checkup, self_test, try_kernel

CPU = torch.device("cpu")


def lines_of(printed: str, title: str) -> list[str]:
    """The lines below a title, up to the next blank line."""
    return printed.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()[1:]


def test_it_prints_the_machine_and_what_a_run_takes(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "not" / "made"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__.partition("+")[0] in printed  # the package's version has no +cpu or +cu128
    loss = [line.split() for line in lines_of(printed, "linear_loss")]
    assert [(*line[:3], line[-1]) for line in loss] == [
        ("cpu", dtype, "torch", "works") for dtype in ("bfloat16", "float16", "float32", "float64")
    ]
    assert "the device is cpu, not cuda" in printed
    kernels = {line.split()[2]: line for line in lines_of(printed, "attention kernels")}
    assert list(kernels) == ["flash", "efficient", "math", "cudnn"]
    assert kernels["flash"].endswith("works") and kernels["math"].endswith("works")
    assert "not available for this device" in kernels["cudnn"]
    assert "compute dtype          fp32" in printed
    assert "train.attention: auto  sdpa with flash, math (no varlen: the kernel needs a GPU" in printed
    assert "train.weights: auto    float32\n" in printed
    assert "train.compile: auto    false (no varlen attention)" in printed
    assert f"{tmp_path / 'not' / 'made'}, " in printed and "GiB free" in printed
    assert printed.endswith("a run can start here\n")


def test_the_memory_is_that_of_a_container(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "memory_limit", lambda: 3 << 30)
    assert doctor.machine_facts()["memory"] == "3.0 GiB"


def test_varlen_agrees_with_plain_attention():
    """On a CPU the rows are computed one by one; the comparison is the one that a GPU's kernel goes through."""
    assert try_kernel("varlen", CPU, torch.float32).verdict == "works"


def attend_with(change):
    """`scaled_dot_product_attention`, whose float32 output ``change`` alters."""
    true = torch.nn.functional.scaled_dot_product_attention

    def attend(query, *args, **kwargs):
        out = true(query, *args, **kwargs)
        return change(out) if query.dtype == torch.float32 else out

    return attend


@pytest.mark.parametrize(("change", "verdict"), [
    (lambda out: 1.01 * out, "WRONG: attention off by"),
    (lambda out: out + 0 * torch.log(out.detach() * 0), "WRONG: output or gradients are not finite"),
])  # fmt: skip
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, change, verdict):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_with(change))
    found = checkup()
    assert [line.partition(": WRONG")[0] for line in found.broken] == [
        "attention kernel flash", "attention kernel math",
        "attention: no kernel of train.attention=auto works on a padded batch",
    ]  # fmt: skip
    assert verdict in found.broken[0]


def test_a_wrong_kernel_that_auto_leaves_out_breaks_nothing(monkeypatch: pytest.MonkeyPatch):
    true = doctor.try_kernel
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "try_kernel", lambda name, *place: (
        true(name, *place)._replace(verdict="WRONG: output or gradients are not finite") if name == "cudnn"
        else true(name, *place)
    ))  # fmt: skip
    assert checkup().broken == []


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    true = TorchBackend.over_classes
    monkeypatch.setattr(
        TorchBackend, "over_classes", lambda self, e: true(self, e) * (1 + (self.dtype != torch.float64))
    )
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: gradient off by" in printed and "BROKEN: fused loss on cpu bfloat16: WRONG" in printed


def test_an_exception_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TorchBackend, "measure", lambda *_: 1 / 0)
    assert self_test(CPU, torch.float32) == "FAILED: ZeroDivisionError: division by zero"


EXCLUSIVE = "CUDA error: all CUDA-capable devices are busy or unavailable\nFor debugging consider passing a variable"


def fails(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("error", [
    RuntimeError(EXCLUSIVE),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore advice"),
    RuntimeError(),
])  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys, error):
    """Its name is visible, and everything else fails: another process has it to itself, or its memory."""
    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    true = torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *a, **k: fails(error)() if "cuda" in str(k.get("device")) else true(*a, **k)
    )
    for name in ("init", "current_device", "mem_get_info", "get_device_capability", "get_device_name",
                 "get_device_properties", "is_bf16_supported"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fails(error))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"  gpu 0        cannot be used: {said}\n" in printed
    assert printed.endswith(f"\nBROKEN: the GPU cannot be used: {said}\n")
    assert "compute dtype          fp32: the GPU cannot be used" in printed and "Traceback" not in printed
    assert [line.split()[0] for line in lines_of(printed, "linear_loss")] == ["cpu"] * 4


def test_a_gpu_that_fills_up_meanwhile_is_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "make_request", fails(torch.OutOfMemoryError("CUDA out of memory.\nAdvice")))
    tried = doctor.try_loss(CPU, torch.float32)
    assert (tried.name, tried.verdict) == ("-", "FAILED: OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize("breaks", [False, True])
def test_it_leaves_the_state_of_the_process_alone(monkeypatch: pytest.MonkeyPatch, breaks):
    """The attention kernels that torch may take, the precision of products (TF32), the random state, the variables."""

    def state():
        precisions = {name: read() for name, (read, _) in FLAGS.items()}
        tf32 = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
        return precisions, tf32, torch.get_rng_state().tolist(), dict(os.environ), list(warnings.filters)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if breaks:
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails(RuntimeError("no kernel")))
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        before = state()
        assert bool(checkup().broken) is breaks
        assert state() == before and not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_it_needs_torch_only():
    """Without the extra for training it says what is missing, and checks the rest."""
    code = (
        "import sys\n"
        "for name in ('numpy', 'transformers', 'trl', 'datasets', 'pydantic', 'yaml', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "import importlib.util as util; true = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if sys.modules.get(name, 1) is None else true(name, *rest)\n"
        "from deftune.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'not installed: transformers, trl, datasets, pydantic; pip install "deftune[train]"' in done.stdout
    assert done.stdout.endswith("\nthe losses work here; training is not installed\n")


def test_a_name_that_needs_an_extra_says_so():
    code = "import sys; sys.modules['trl'] = None; import deftune; deftune.DeftSFTTrainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "deftune.DeftSFTTrainer needs an extra: pip install 'deftune[train]'" in done.stderr


def test_commands_on_results_need_the_extra():
    for command in (["list"], ["compare", "a", "b"], ["show", "a"]):
        code = (
            "import sys, importlib.util as util; util.find_spec = lambda name, *rest: None\n"
            f"from deftune.cli import main; sys.exit(main(['eval', *{command}]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("deftune: this command needs trl, "), done.stderr
