"""Small heads: the work on a chunk as one CUDA graph.

Where the GPU needs less than a millisecond for a chunk, the host takes longer than that to launch its two dozen
kernels. A `Program` is most of them, from the rows to their gates, on tensors that stay where they are: it runs as it
is written the first times, then it is captured, and from there on replayed by a single launch. How many rows there are
is read on the device, so that a call's first chunk is under way before the host knows. What a call has that the next
one has not (its rows, its scale, the gradients) goes in and out by launches beside it.

An objective is replayed as it was evaluated when it was captured, so only one that depends on nothing else is: one of
deftune's own, without progress or statistics of the step. A user's may read a schedule or a counter of its own, which a
replay would not see. What looks at values on the host, or copies to the device, cannot be captured: it runs as written.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deftune.kernels.backends import Gradients, Supervised, TritonBackend, product
from deftune.kernels.head import Head
from deftune.kernels.statistics import log_p_of, stats_of
from deftune.objectives import Context, Objective

if TYPE_CHECKING:
    from deftune.kernels.call import Call

SMALL = 1e12  # operations of a chunk: 1.5 ms of an H200's tensor cores
MOST_COPIED = 1 << 27  # elements of a weight of another dtype: its copy stays in the room
CAPTURE_AT = 3  # the run of a program that captures it: what comes once or twice is not worth it
MOST = 64  # programs kept in a room: weights that move (FSDP) make new ones all the time
ROOMS = 2  # rooms kept on a device
PAD = 128  # rows of a program are a multiple of this: few programs, little padding


class Place(NamedTuple):
    """What a head's tensors look like, and the stream and thread that work on them, one call after the other."""

    device: torch.device
    stream: int
    thread: int
    dtype: torch.dtype
    vocab_size: int
    width: int
    copied: bool  # the weight is not as the GEMMs need it


class Room:
    """The tensors that the programs of one place work on, which stay where they are, and the programs."""

    def __init__(self, place: Place, rows: int):
        def new(*size: int, dtype: torch.dtype = place.dtype) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=place.device)

        width = place.width
        self.rows = rows
        self.programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self.x, self.scaled, self.u = new(rows, width), new(rows, width), new(rows, width, dtype=torch.float32)
        self.e = new(rows, -(-place.vocab_size // 64) * 64)
        self.weight = new(place.vocab_size, width) if place.copied else None
        self.index = torch.arange(rows, device=place.device)
        self.y = new(rows, dtype=torch.int64)
        self.facts = new(2, dtype=torch.int64)  # as those of a call: rows that are there, a NaN among them
        self.record = new(7, rows, dtype=torch.float64)  # the five columns, value and gate
        self.aside = torch.cuda.Stream(place.device) if place.device.type == "cuda" else None


@dataclass
class Program:
    """A chunk of at most ``rows`` rows in a `Room`: statistics and objective.

    Room and head are those it was made for; not kept, lest a model stay in memory for its programs.
    """

    rows: int
    objective: Objective
    context: Context
    top: int
    runs: int = 0
    graph: Any = None
    capturable: bool = True
    vectors: Tensor | None = None  # [4, rows]: as `target_logits` makes them
    likeliest: Tensor | None = None

    def work(self, room: Room, head: Head) -> None:
        rows = self.rows
        some = Supervised(room.x[:rows], room.index[:rows], room.y[:rows], room.facts)
        backend = TritonBackend(head, room.x.dtype, some)
        backend.e, self.vectors = room.e, backend.vectors
        chunk = backend.measure(slice(0, rows), room.record[:5, :rows], True, self.top)
        self.likeliest = None if chunk.top is None else log_p_of(chunk.top, chunk.columns)
        stats = stats_of(chunk.columns, self.likeliest, chunk.y, head.vocab_size)
        room.record[6, :rows], room.record[5, :rows] = self.objective.evaluate(stats, self.context)

    def run(self, room: Room, head: Head) -> None:
        self.runs += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.runs < CAPTURE_AT or not self.capturable:
            self.work(room, head)
        else:
            self.capture(room, head)

    def capture(self, room: Room, head: Head) -> None:
        """Run once more, refusing reads of the device, then record the launches and replay them."""
        try:
            with refusing_reads():
                self.work(room, head)
            self.graph = record(self, room, head)
        except RuntimeError:
            self.capturable = False
            self.work(room, head)  # what was more than a read, or no memory for a graph, is raised here
        else:
            self.graph.replay()


@contextmanager
def refusing_reads() -> Generator[None]:
    """What waits for the device is an error: under a capture it would spoil more than itself."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def record(program: Program, room: Room, head: Head) -> torch.cuda.CUDAGraph:
    """The launches of a program's work as a graph.

    Graphs of a room share their memory, which they use one after the other; what they return is copied. It is named by
    one of them: a pool whose last graph is gone cannot be used again.
    """
    graph, here, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), room.aside
    assert aside is not None
    graphs = (other.graph for other in room.programs.values())
    pool = next((other.pool() for other in graphs if other is not None), None)
    with _lock:  # one capture at a time
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                program.work(room, head)
            finally:
                graph.capture_end()  # whatever happened: the stream must not be left capturing
        here.wait_stream(aside)
    return graph


_lock = threading.Lock()
_rooms: OrderedDict[Place, Room] = OrderedDict()


def clear() -> None:
    """Forget every program and free what they hold."""
    _rooms.clear()


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
        and constant(objective)
        and 6 * rows * head.weight.numel() < SMALL
        and (head.weight.dtype == dtype or head.weight.numel() < MOST_COPIED)
        and not torch.cuda.is_current_stream_capturing()
    )


def constant(value: object) -> bool:
    """Whether an objective is known to be what its type and numbers say, and so are its parts: one of deftune's own.

    A user's may read anything, and one that is no dataclass of its own compares equal to another with other numbers.
    """
    if isinstance(value, Objective):
        own = type(value).__module__.startswith("deftune.")
        return own and all(constant(getattr(value, field.name)) for field in fields(value))
    return isinstance(value, (int, float, str))


def room_for(place: Place, rows: int) -> Room:
    """One for each place, as large as was needed; the last few places of a device keep theirs."""
    with _lock:
        room = _rooms.pop(place, None)
        if room is not None and room.rows < rows:
            room = None  # freed before the larger one is made
        others = [other for other in _rooms if other.device == place.device]
        for other in others[: max(0, len(others) - ROOMS + 1)]:
            del _rooms[other]
        room = _rooms[place] = room or Room(place, rows)
    return room


class Replay:
    """One call: its rows are taken into a room and worked on there, chunk by chunk, the first of them at once."""

    def __init__(
        self, rows: Supervised, head: Head, dtype: torch.dtype, size: int, objective: Objective, context: Context,
        top: int,
    ):  # fmt: skip
        weight, hidden = head.weight, rows.hidden
        copied = weight.dtype != dtype or not weight.is_contiguous()
        stream = torch.cuda.current_stream().cuda_stream if hidden.is_cuda else 0
        place = Place(hidden.device, stream, threading.get_ident(), dtype, head.vocab_size, head.width, copied)
        self.size = -(-size // PAD) * PAD
        self.room = room_for(place, self.size)
        self.head, self.all = head, rows
        if self.room.weight is not None:
            self.head = replace(head, weight=self.room.weight.copy_(weight))
        if not hidden.is_contiguous():
            self.all = replace(rows, hidden=hidden.contiguous())
        self.program = self.program_for(objective, context, top)
        self.measure(0)  # before the host knows how many there are

    def program_for(self, objective: Objective, context: Context, top: int) -> Program:
        ids, head, programs = context.special_ids, self.head, self.room.programs
        key = (head.weight.data_ptr(), head.scale, head.softcap, self.size, objective, ids)
        if key not in programs:
            programs[key] = Program(self.size, objective, Context(special_ids=ids), top)
        programs.move_to_end(key)
        if len(programs) > MOST:
            programs.popitem(last=False)
        return programs[key]

    def measure(self, first: int) -> None:
        """Statistics and gates of the rows from ``first`` on."""
        from deftune.kernels.triton_rows import take_rows

        rows, room = self.all, self.room
        assert rows.facts is not None
        take_rows(rows.hidden, rows.index, rows.y, rows.facts, first, room.x[: self.size], room.y, room.facts)
        self.program.run(room, self.head)

    def run(
        self, call: Call, wanted: Sequence[bool], scale: Tensor | float
    ) -> tuple[Tensor, Gradients, Tensor, Tensor | None]:
        """As `linear.fused`."""
        from deftune.kernels.triton_rows import aligned, sort_targets, subtract_targets

        room, count = self.room, call.count
        into = call.new_gradients(wanted)
        # many small kernels that wait for each other: beside the chunks. The host has seen the count, so all that came
        # before this call is done, and nothing has to be waited for
        with torch.cuda.stream(room.aside) if room.aside is not None else nullcontext():
            runs = sort_targets(call.targets, self.head.vocab_size) if into.weight is not None else None
        record = aligned(6, count, torch.float64, room.x.device)
        targets = torch.empty(count, dtype=torch.float32, device=room.x.device)  # t of every row
        tops: list[Tensor] = []
        for start in range(0, count, self.size):
            if start:
                self.measure(start)
            part = slice(start, min(start + self.size, count))
            rows = part.stop - start
            if self.program.likeliest is not None:
                tops.append(self.program.likeliest[:rows].clone())
            self.spread(call, part, scale, into, targets[part])
            if into.weight is not None:
                e = room.e[:rows, : self.head.vocab_size]
                product(e.T, room.scaled[:rows], into.weight, add=start > 0)
            record[:, part] = room.record[:6, :rows]
        if into.weight is not None and runs is not None and count:
            if room.aside is not None:
                torch.cuda.current_stream().wait_stream(room.aside)
            subtract_targets(self.all.hidden, call.index, runs, targets, into.weight)
        elif into.weight is not None:
            into.weight.zero_()
        loss = record[5].sum() * scale if count else record.new_zeros(())
        assert call.facts is not None
        call.facts[1:] = room.facts[1:]
        call.check_nan(record[0])
        top = None if not call.top else torch.cat(tops) if tops else call.top_log_p([], record)
        return loss.float(), into, record[:5], top

    def spread(self, call: Call, part: slice, scale: Tensor | float, into: Gradients, targets: Tensor) -> None:
        """A chunk's rows of dX, t of its targets, and v X for dW."""
        from deftune.kernels.triton_rows import finish_rows

        room, rows, vectors = self.room, part.stop - part.start, self.program.vectors
        assert vectors is not None
        gate, u, scaled = room.record[6, :rows], None, None
        if isinstance(scale, Tensor):
            gate, scale = gate * scale, 1.0
        if into.hidden is not None:
            u = room.u[:rows]
            product(room.e[:rows, : self.head.vocab_size], self.head.weight, u)
        if into.weight is not None:
            scaled = room.scaled[:rows]
        z_y, reference, v, _ = vectors[:, :rows].unbind()
        finish_rows(
            gate, room.record[:5, :rows], reference, z_y, v, targets, room.x[:rows], room.y[:rows], call.index[part],
            self.head, scale, u, into.hidden, scaled,
        )  # fmt: skip
