"""`deftune doctor`: the installed packages, the backend that the fused loss takes here and why, and a self-test."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "matplotlib", "transformers", "trl", "peft", "accelerate", "liger-kernel")


def add_to(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what is installed, which backend the fused loss takes, and why")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from deftune._version import __version__
    from deftune.losses.backends import choose
    from deftune.losses.head import Head
    from deftune.losses.request import make_request
    from deftune.losses.triton_backend import interpreted
    from deftune.objectives import objective

    print(f"deftune {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        try:
            print(f"  {name:14} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name:14} not installed")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
        print(f"  cuda           {torch.cuda.get_device_name()}, {torch.version.cuda}")
    if interpreted():
        print("  TRITON_INTERPRET=1: Triton kernels run in the interpreter, slowly")
    print("\nlinear_loss, backend='auto':")
    failed = False
    for device in devices:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            hidden, weight = (torch.empty(rows, 64, dtype=dtype, device=device) for rows in (48, 300))
            targets = torch.zeros(48, dtype=torch.int64, device=device)
            request = make_request(hidden, Head(weight), targets, objective("deft"), wanted=(True, True, False))
            backend, why = choose("auto", request)
            verdict = self_test(device, dtype)
            failed = failed or verdict != "works"
            print(f"  {device.type:5} {str(dtype).removeprefix('torch.'):9} {backend.name:7} {why:60} {verdict}")
    return 1 if failed else 0


def self_test(device: Any, dtype: Any) -> str:
    """Compare a small loss and its gradient with float64: 'works', or the error."""
    import torch

    from deftune.losses import linear_loss, raise_pending

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(48, 64, generator=generator), torch.randn(300, 64, generator=generator) / 8
    targets = torch.randint(300, (48,), generator=generator)

    def gradient(of: Any, head: Any, where: Any) -> Any:
        of = of.to(where).detach().clone().requires_grad_()
        linear_loss(of, head.to(where), targets.to(where), "deft").backward()
        return of.grad.double().cpu()

    try:
        got = gradient(hidden.to(dtype), weight.to(dtype), device)
        raise_pending()
    except Exception as error:  # a diagnosis reports whatever it meets
        return f"FAILED: {type(error).__name__}: {error}"
    want = gradient(hidden.to(dtype).double(), weight.to(dtype).double(), torch.device("cpu"))
    off = float((got - want).norm() / want.norm())
    limit = 8 * torch.finfo(dtype).eps
    return "works" if off < limit else f"WRONG: gradient off by {off:.1e}, at most {limit:.1e} expected"
