"""Small heads: the work on a chunk as one CUDA graph.

Where the GPU needs about a millisecond for a chunk, the host takes longer than that to launch its two dozen
kernels. A `Program` is that work, from the rows to their gradients, on tensors that stay where they are: it runs as it
is written the first times, then it is captured, and from there on replayed by a single launch. What a call has that the
next one has not (its rows, its scale, dW) goes in and out by copies beside it.

An objective is replayed as it was evaluated when it was captured, so only what depends on nothing else is: no progress,
no statistics of the step. One that looks at its values on the host (`.item()`) cannot be captured: it runs as written.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deftune.kernels.backends import Gradients, Supervised, TritonBackend, balanced, product
from deftune.kernels.head import Head
from deftune.kernels.statistics import log_p_of, stats_of
from deftune.objectives import Context, Objective

if TYPE_CHECKING:
    from deftune.kernels.call import Call

SMALL = 1e12  # operations of a chunk: 1.5 ms of an H200's tensor cores
CAPTURE_AT = 3  # the run of a program that captures it: what comes once or twice is not worth it
MOST = 64  # programs kept
PAD = 128  # rows of a program are a multiple of this: few programs, little padding


class Place(NamedTuple):
    """What a head's tensors look like, and the stream on which they are worked on."""

    device: torch.device
    stream: int
    dtype: torch.dtype
    hidden_dtype: torch.dtype
    vocab_size: int
    width: int
    copied: bool  # the weight is not as the GEMMs need it


class Room:
    """The tensors that the programs of one place work on; they stay where they are."""

    def __init__(self, place: Place, rows: int):
        def new(*size: int, dtype: torch.dtype = place.dtype) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=place.device)

        width = place.width
        self.rows = rows
        self.x, self.scaled, self.u = new(rows, width), new(rows, width), new(rows, width, dtype=torch.float32)
        self.dx = new(rows, width, dtype=place.hidden_dtype)
        self.e = new(rows, -(-place.vocab_size // 64) * 64)
        self.weight = new(place.vocab_size, width) if place.copied else None
        self.index = torch.arange(rows, device=place.device)
        self.y = new(rows, dtype=torch.int64)
        self.live = new(1, dtype=torch.int64)  # rows that are there
        self.record = new(7, rows, dtype=torch.float64)  # the five columns, the value and t
        self.scale = new(1, dtype=torch.float64)


@dataclass
class Program:
    """A chunk of ``rows`` rows in a `Room`: statistics, objective, dX, and v X for dW."""

    room: Room
    rows: int
    objective: Objective
    context: Context
    top: int
    wanted: Sequence[bool]
    runs: int = 0
    graph: Any = None
    capturable: bool = True
    likeliest: Tensor | None = None

    def work(self, head: Head) -> None:
        room, rows = self.room, self.rows
        facts = torch.full((4,), rows, dtype=torch.int64, device=room.x.device)
        some = Supervised(room.x[:rows], room.index[:rows], room.y[:rows], facts)
        backend = TritonBackend(head, room.x.dtype, some)
        backend.e, backend.u, backend.scaled = room.e, room.u[:rows], room.scaled[:rows]
        chunk = backend.measure(slice(0, rows), room.record[:5, :rows], True, self.top)
        self.likeliest = None if chunk.top is None else log_p_of(chunk.top, chunk.columns)
        stats = stats_of(chunk.columns, self.likeliest, chunk.y, head.vocab_size)
        gate, value = self.objective.evaluate(stats, self.context)
        live = room.index[:rows] < room.live
        room.record[5, :rows] = torch.where(live, value, 0.0)
        hidden = room.dx[:rows] if self.wanted[0] else None
        backend.spread(chunk, torch.where(live, gate * room.scale, 0.0), 1.0, hidden, self.wanted[1])
        room.record[6, :rows] = backend.vectors[3]

    def run(self, head: Head) -> None:
        """``head`` is the one it is made for; not kept, lest a model stay in memory for its programs."""
        self.runs += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.runs < CAPTURE_AT or not self.capturable:
            self.work(head)
        else:
            self.capture(head)

    def capture(self, head: Head) -> None:
        """Run once more, refusing reads of the device, then record the launches and replay them."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            try:
                torch.cuda.set_sync_debug_mode("error")
                self.work(head)
            except RuntimeError:
                self.capturable = False
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if not self.capturable:
            return self.work(head)  # what was more than a read of the device is raised here
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        aside, pool = _shared(here.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self.work(head)
            graph.capture_end()
        here.wait_stream(aside)
        graph.replay()
        self.graph = graph


_rooms: dict[Place, Room] = {}
_programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
_streams: dict[torch.device, torch.cuda.Stream] = {}
_pools: dict[torch.device, Any] = {}


def _shared(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """Where to capture, and the memory that programs share: they never run side by side, what they return is copied.

    The stream is kept: cuBLAS holds 32 MiB for each that it has seen.
    """
    if device not in _pools:
        _streams.setdefault(device, torch.cuda.Stream(device))
        _pools[device] = torch.cuda.graph_pool_handle()
    return _streams[device], _pools[device]


def clear() -> None:
    """Forget every program and free what they hold."""
    _programs.clear()
    _rooms.clear()
    _pools.clear()


def suits(
    head: Head, objective: Objective, context: Context, weights: Tensor | None, dtype: torch.dtype, rows: int
) -> bool:
    """Whether a call that asks for gradients can be replayed, and is small enough for that to matter."""
    return (
        head.weight.device.type == "cuda"
        and dtype == torch.bfloat16
        and weights is None
        and head.bias is None
        and objective.kind == "local"
        and context.step is None
        and "progress" not in objective.requires
        and _hashable(objective)
        and 6 * rows * head.weight.numel() < SMALL
        and not torch.cuda.is_current_stream_capturing()
    )


def _hashable(objective: Objective) -> bool:
    """A user's own may hold a list."""
    try:
        hash(objective)
    except TypeError:
        return False
    return True


def room_for(place: Place, rows: int) -> Room:
    """One for each place, as large as was needed."""
    room = _rooms.get(place)
    if room is None or room.rows < rows:
        for key in [key for key, program in _programs.items() if program.room is room]:
            del _programs[key]
        _rooms.pop(place, None)
        room = _rooms[place] = Room(place, rows)
    return room


class Replay:
    """One call: its rows are taken into a room and worked on there, chunk by chunk."""

    def __init__(self, rows: Supervised, head: Head, dtype: torch.dtype, size: int):
        weight, hidden = head.weight, rows.hidden
        copied = weight.dtype != dtype or not weight.is_contiguous()
        stream = torch.cuda.current_stream().cuda_stream if hidden.is_cuda else 0
        place = Place(hidden.device, stream, dtype, hidden.dtype, head.vocab_size, head.width, copied)
        self.size = -(-size // PAD) * PAD
        self.room = room_for(place, self.size)
        if self.room.weight is not None:
            weight = self.room.weight.copy_(weight)
        self.head = Head(weight, None, head.scale, head.softcap)
        self.all = replace(rows, hidden=hidden.contiguous())
        self.take(0)  # before the host knows how many there are

    def take(self, first: int) -> None:
        from deftune.kernels.triton_rows import take_rows

        rows, room = self.all, self.room
        assert rows.facts is not None
        take_rows(rows.hidden, rows.index, rows.y, rows.facts, first, room.x[: self.size], room.y, room.live)

    def program(self, rows: int, call: Call, wanted: Sequence[bool]) -> Program:
        objective, ids, head = call.objective, call.context.special_ids, self.head
        assert objective is not None
        key = (id(self.room), head.weight.data_ptr(), head.scale, head.softcap, rows, objective, ids, *wanted)
        if key not in _programs:
            context = Context(special_ids=ids)
            _programs[key] = Program(self.room, rows, objective, context, call.top, tuple(wanted))
        _programs.move_to_end(key)
        if len(_programs) > MOST:
            _programs.popitem(last=False)
        return _programs[key]

    def run(
        self, call: Call, wanted: Sequence[bool], scale: Tensor | float
    ) -> tuple[Tensor, Gradients, Tensor, Tensor | None]:
        """As `linear.fused`."""
        from deftune.kernels.triton_rows import aligned, subtract_targets

        room, count = self.room, call.count
        into = call.new_gradients(wanted)
        if isinstance(scale, Tensor):
            room.scale.copy_(scale)
        else:
            room.scale.fill_(scale)
        record = aligned(7, count, torch.float64, room.x.device)
        tops: list[Tensor] = []
        size = balanced(count, self.size, PAD)
        for start in range(0, count, size):
            if start:
                self.take(start)
            rows = min(size, count - start)
            part = slice(start, start + rows)
            program = self.program(-(-rows // PAD) * PAD, call, wanted)
            program.run(self.head)
            record[:, part] = room.record[:, :rows]
            if program.likeliest is not None:
                tops.append(program.likeliest[:rows].clone())
            if into.hidden is not None:
                into.hidden.index_copy_(0, call.index[part], room.dx[:rows])
            if into.weight is not None:
                e = room.e[: program.rows, : self.head.vocab_size]
                product(e.T, room.scaled[: program.rows], into.weight, add=start > 0)
        if into.weight is not None and count:
            subtract_targets(self.all.hidden, call.index, call.targets, record[6], into.weight)
        elif into.weight is not None:
            into.weight.zero_()
        loss = record[5].sum() * scale if count else record.new_zeros(())
        assert call.facts is not None
        call.facts[3:] = record[0].isnan().any()
        call.check_nan(record[0])
        top = None if not call.top else torch.cat(tops) if tops else call.top_log_p([], record)
        return loss.float(), into, record[:5], top
