# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""AdamW for many tensors in one launch: each value that the update needs is read once and written once.

For a float32 parameter p with gradient g (bfloat16 or float32), which a scalar c scales (clipping):

    m <- b1 m + (1 - b1) c g,   v <- b2 v + (1 - b2) (c g)^2
    p <- p - lr wd p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps),   rounded <- bfloat16(p)

That is 28 bytes a parameter with a bfloat16 gradient and a rounded copy, and 2 for the norm. Torch's parts (the
gradient in float32, its norm and scaling, fused AdamW, the rounding) take 52.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
MOST_BLOCKS = 16  # for 1.5 billion parameters they take 9 MB each
WIDTHS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def update_block(
    p_pointer, m_pointer, v_pointer, g_pointer, r_pointer, place, mask, step_size, root, scale, decay, beta1, beta2,
    rest1, rest2, eps, ROUNDS: tl.constexpr,
):  # fmt: skip
    g = tl.load(g_pointer + place, mask=mask).to(tl.float32) * scale
    p = tl.load(p_pointer + place, mask=mask)
    m = beta1 * tl.load(m_pointer + place, mask=mask) + rest1 * g
    v = beta2 * tl.load(v_pointer + place, mask=mask) + rest2 * g * g
    p -= decay * p
    p -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(m_pointer + place, m, mask=mask)
    tl.store(v_pointer + place, v, mask=mask)
    tl.store(p_pointer + place, p, mask=mask)
    if ROUNDS:
        tl.store(r_pointer + place, p.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["tensors", "first"])
def adamw_kernel(
    addresses, gradients, sizes, owners, starts, step_sizes, roots, scale, tensors, first, decay, beta1, beta2, rest1,
    rest2, eps, GRADIENT: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner, start = tl.load(owners + program), tl.load(starts + program)
    size = tl.load(sizes + owner)
    step_size, root = tl.load(step_sizes + owner - first), tl.load(roots + owner - first)
    p_pointer = tl.load(addresses + owner).to(tl.pointer_type(tl.float32))
    m_pointer = tl.load(addresses + tensors + owner).to(tl.pointer_type(tl.float32))
    v_pointer = tl.load(addresses + 2 * tensors + owner).to(tl.pointer_type(tl.float32))
    g_pointer = tl.load(gradients + owner).to(tl.pointer_type(GRADIENT))
    r_pointer = p_pointer
    if ROUNDS:
        r_pointer = tl.load(addresses + 3 * tensors + owner).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:  # with whole blocks: loads and stores of 16 bytes
        p_pointer, m_pointer = tl.multiple_of(p_pointer, 16), tl.multiple_of(m_pointer, 16)
        v_pointer, g_pointer = tl.multiple_of(v_pointer, 16), tl.multiple_of(g_pointer, 16)
        r_pointer = tl.multiple_of(r_pointer, 16)
    place = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        update_block(p_pointer, m_pointer, v_pointer, g_pointer, r_pointer, place, None, step_size, root,
                     tl.load(scale), decay, beta1, beta2, rest1, rest2, eps, ROUNDS)  # fmt: skip
    else:
        update_block(p_pointer, m_pointer, v_pointer, g_pointer, r_pointer, place, place < size, step_size, root,
                     tl.load(scale), decay, beta1, beta2, rest1, rest2, eps, ROUNDS)  # fmt: skip


@triton.jit
def squares_kernel(
    gradients, sizes, owners, starts, sums, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    owner, start = tl.load(owners + program), tl.load(starts + program)
    pointer = tl.load(gradients + owner).to(tl.pointer_type(GRADIENT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    place, size = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK), tl.load(sizes + owner)
    if start + BLOCK <= size:
        g = tl.load(pointer + place).to(tl.float32)
        tl.store(sums + program, tl.sum(g * g))
    else:
        g = tl.load(pointer + place, mask=place < size, other=0.0).to(tl.float32)
        tl.store(sums + program, tl.sum(g * g))


class Blocks:
    """Which program of a launch works on which values of which tensor.

    Args:
        sizes: of all tensors.
        chosen: the tensors of the launch.
        device: of the result.
    """

    def __init__(self, sizes: Sequence[int], chosen: Sequence[int], device: torch.device):
        counts = torch.tensor([triton.cdiv(sizes[owner], BLOCK) for owner in chosen])
        owners = torch.repeat_interleave(torch.tensor(chosen, dtype=torch.int32), counts)
        starts = (torch.arange(len(owners)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)) * BLOCK
        self.owners, self.starts, self.programs = owners.to(device), starts.to(device), len(owners)


class Table:
    """The addresses of parameters, moments and rounded copies, which stay; those of the gradients change every step.

    Args:
        parameters: float32, contiguous and on one device, as are the moments; updated in place.
        first: m of each parameter.
        second: v of each parameter.
        rounded: the bfloat16 copy of each parameter, or None.
    """

    def __init__(
        self, parameters: Sequence[Tensor], first: list[Tensor], second: list[Tensor], rounded: Sequence[Tensor | None]
    ):
        self.first, self.rounds = first, [copy is not None for copy in rounded]
        self.device = device = parameters[0].device
        self.numbers = [parameter.numel() for parameter in parameters]
        self.sizes = torch.tensor(self.numbers, dtype=torch.int64, device=device)
        self.columns = parameters, first, second, rounded
        self.known = self._look_up()
        self.aligned = not any(address % 16 for column in self.known for address in column)
        self.addresses = torch.tensor(self.known, dtype=torch.int64, device=device)
        self.one = torch.ones((), device=device)
        self.blocks: dict[tuple[int, ...], Blocks] = {}  # by the tensors of a launch
        self._seen: tuple[list[Tensor | None], Tensor, bool] | None = None
        self._with: tuple[list[bool], Tensor] | None = None

    def _look_up(self) -> list[list[int]]:
        return [[0 if tensor is None else tensor.data_ptr() for tensor in column] for column in self.columns]

    def has_moved(self) -> bool:
        """Whether a tensor is no longer where it was."""
        return self._look_up() != self.known

    def forget_gradients(self) -> None:
        self._seen = None

    def has_gradient(self, gradients: list[Tensor | None]) -> Tensor:
        """1 for each parameter with a gradient, else 0, as float32."""
        found = [gradient is not None for gradient in gradients]
        if self._with is None or self._with[0] != found:
            self._with = found, torch.tensor(found, dtype=torch.float32, device=self.device)
        return self._with[1]

    def norm(self, gradients: list[Tensor | None]) -> Tensor:
        """The Euclidean norm of the gradients, in float32."""
        addresses, aligned = self._addresses_of(gradients)
        sums: list[Tensor] = []
        for (dtype, _), blocks in self._launches(gradients, range(len(gradients))):
            sums.append(torch.empty(blocks.programs, device=self.device))
            squares_kernel[(blocks.programs,)](
                addresses, self.sizes, blocks.owners, blocks.starts, sums[-1], GRADIENT=WIDTHS[dtype], ALIGNED=aligned,
                BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
        return torch.cat(sums).double().sum().sqrt().float() if sums else 0 * self.one

    def update(
        self, gradients: list[Tensor | None], places: range, steps: Tensor, group: dict[str, Any], scale: Tensor | None,
        skipped: Tensor | None,
    ) -> None:  # fmt: skip
        """Update the parameters at ``places`` that have a gradient.

        Args:
            gradients: of all parameters.
            places: of the group's parameters.
            steps: t of each of them.
            group: lr, betas, eps and weight_decay.
            scale: float32 scalar that multiplies the gradients; None: 1.
            skipped: float32 scalar; nothing is changed unless it is 0.
        """
        addresses, aligned = self._addresses_of(gradients)
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        t = steps.double()  # 1 - b^t is small, and a float32 b^t has few digits of it
        step_sizes, roots = (lr / (1 - beta1**t)).float(), (1 - beta2**t).sqrt().float()
        sizes = self.sizes if skipped is None else torch.where(skipped == 0, self.sizes, 0)
        for (dtype, rounds), blocks in self._launches(gradients, places):
            adamw_kernel[(blocks.programs,)](
                self.addresses, addresses, sizes, blocks.owners, blocks.starts, step_sizes, roots,
                self.one if scale is None else scale, len(self.numbers), places.start, lr * group["weight_decay"],
                beta1, beta2, 1 - beta1, 1 - beta2, group["eps"], GRADIENT=WIDTHS[dtype], ROUNDS=rounds,
                ALIGNED=aligned, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip

    def _addresses_of(self, gradients: list[Tensor | None]) -> tuple[Tensor, bool]:
        """The gradients' addresses on the device, and whether all tensors lie on 16 bytes."""
        if self._seen is None or self._seen[0] is not gradients:
            for place, gradient in enumerate(gradients):
                if gradient is not None and not gradient.is_contiguous():
                    gradients[place] = gradient.contiguous()
            found = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
            addresses = torch.tensor(found, dtype=torch.int64)
            if self.device.type == "cuda":
                addresses = addresses.pin_memory().to(self.device, non_blocking=True)
            self._seen = gradients, addresses, self.aligned and not any(address % 16 for address in found)
        return self._seen[1], self._seen[2]

    def _launches(
        self, gradients: list[Tensor | None], places: Iterable[int]
    ) -> list[tuple[tuple[torch.dtype, bool], Blocks]]:
        """The launches for the parameters at ``places``: one for each dtype of gradients, with and without copies."""
        found: dict[tuple[torch.dtype, bool], list[int]] = {}
        for place in places:
            if (gradient := gradients[place]) is not None and self.numbers[place]:
                found.setdefault((gradient.dtype, self.rounds[place]), []).append(place)
        launches: list[tuple[tuple[torch.dtype, bool], Blocks]] = []
        for kind, chosen in found.items():
            key = tuple(chosen)
            if key not in self.blocks:
                if len(self.blocks) == MOST_BLOCKS:  # other parameters have gradients in each step: experts
                    self.blocks.clear()
                self.blocks[key] = Blocks(self.numbers, chosen, self.device)
            launches.append((kind, self.blocks[key]))
        return launches
