"""The backends of the fused loss by name, and the choice among them."""

from __future__ import annotations

from deftune.losses.chunks import Backend
from deftune.losses.graphs import GraphsBackend
from deftune.losses.request import Request
from deftune.losses.torch_backend import TorchBackend
from deftune.losses.triton_backend import TritonBackend

BACKENDS: dict[str, type[Backend]] = {"graphs": GraphsBackend, "triton": TritonBackend, "torch": TorchBackend}


def choose(wanted: str, request: Request) -> tuple[type[Backend], str]:
    """(backend, why) for ``auto``, a name, or several names in order of preference: ``"triton,torch"``.

    ``auto`` is all of them in the order of `BACKENDS`. The first that can run the request is taken; one with a
    reservation only if it is the last.

    Raises:
        ValueError: a name is unknown, or none of the named backends can run the request.
    """
    names = list(BACKENDS) if wanted == "auto" else [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ValueError(
            f"backend: auto, or one or more of {', '.join(BACKENDS)} with commas between them, got {unknown[0]!r}"
        )
    against: list[str] = []
    for name in names:
        backend = BACKENDS[name]
        why = backend.refusal(request) or (backend.reservation(request) if name != names[-1] else "")
        if not why:
            return backend, "; ".join(dict.fromkeys(against)) or ("the first choice" if len(names) > 1 else "asked for")
        against.append(why)
    raise ValueError(
        f"backend={wanted!r} cannot be used here: {'; '.join(dict.fromkeys(against))}; use backend='torch' or 'auto'"
    )
