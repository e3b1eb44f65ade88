"""`deftune doctor`: the backends by name, and a self-test that can fail."""

import pytest
import torch

from deftune.cli import doctor, main
from deftune.losses.torch_backend import TorchBackend


def test_it_prints_the_backend_and_why(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__.partition("+")[0] in printed  # the package's version has no +cpu or +cu128
    lines = [line.split() for line in printed.splitlines() if line.startswith("  cpu ")]
    assert [(line[1], line[2], line[-1]) for line in lines] == [
        (dtype, "torch", "works") for dtype in ("bfloat16", "float16", "float32", "float64")
    ]
    assert "the device is cpu, not cuda" in printed


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    true = TorchBackend.over_classes
    monkeypatch.setattr(
        TorchBackend, "over_classes", lambda self, e: true(self, e) * (1 + (self.dtype != torch.float64))
    )
    assert main(["doctor"]) == 1
    assert "WRONG: gradient off by" in capsys.readouterr().out


def test_an_exception_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TorchBackend, "measure", lambda *_: 1 / 0)
    assert doctor.self_test(torch.device("cpu"), torch.float32) == "FAILED: ZeroDivisionError: division by zero"
