"""Small heads: the work on a chunk as two CUDA graphs.

Where the GPU needs less than a millisecond for a chunk, the host takes longer than that to launch its two dozen
kernels. A `Program` is all of them but the gradients' GEMMs, on tensors that stay where they are: it runs as it is
written the first times, then it is captured, and from there on each half, from the rows to their gates and from the
gates to what the GEMMs need, is replayed by a single launch. What a call has that the next one has not (its rows, its
scale, where its gradients go) stands in a table on the device, filled by the survey and a copy; which chunk's turn it
is the kernels count there themselves. How many rows there are is read on the device too, so that a call's first chunk
is under way before the host knows.

An objective is replayed as it was evaluated when it was captured, so only one that depends on nothing else is: one of
deftune's own, without progress or statistics of the step. A user's may read a schedule or a counter of its own, which a
replay would not see. What looks at values on the host, or copies to the device, cannot be captured: it runs as written.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deftune.losses.chunks import Gradients, Supervised
from deftune.losses.head import Head
from deftune.losses.statistics import stats_of
from deftune.losses.triton_backend import TritonBackend, product
from deftune.objectives import Context, Objective
from deftune.objectives.stats import IGNORE_INDEX

if TYPE_CHECKING:
    from deftune.losses.call import Call

SMALL = 1e12  # operations of a chunk: 1.5 ms of an H200's tensor cores
MOST_COPIED = 1 << 27  # elements of a weight of another dtype: its copy stays in the room
CAPTURE_AT = 3  # the run of a program that captures it: what comes once or twice is not worth it
MOST = 64  # programs kept in a room: weights that move (FSDP) make new ones all the time
ROOMS = 2  # rooms kept on a device
NOTHING = (-1, -1, -1)  # told yet
LOOKS = 1000  # of the host at what it is told, before it looks less often
SLOTS, CHUNK = 15, 8  # of the table in `triton_table`: how many, and the one that its kernels write
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


class Asked(NamedTuple):
    """The survey of a call's targets by a program; held while their addresses are used."""

    room: Room
    hidden: Tensor
    targets: Tensor
    found: Tensor  # places, labels and facts as `triton_rows.survey` has them, in one piece
    pitch: int  # between the first two

    def answer(self) -> tuple[list[int], tuple[Tensor, Tensor, Tensor]]:
        """What the host is told, and the places, the labels and the facts on the device; waits for them."""
        told = self.room.hear()
        count, pitch, found = told[0], self.pitch, self.found
        return told, (found[:count], found[pitch : pitch + count], found[2 * pitch :])


class Recorded:
    """Launches on tensors that stay where they are: run as written the first times, then captured, then replayed."""

    def __init__(self):
        self.runs, self.graph, self.capturable = 0, None, True

    def run(self, room: Room, work: Callable[[], None]) -> bool:
        """Whether it ran twice: once more to be captured."""
        self.runs += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.runs < CAPTURE_AT or not self.capturable:
            work()
        else:
            self.capture(room, work)
            return True
        return False

    def capture(self, room: Room, work: Callable[[], None]) -> None:
        """Run once more, refusing reads of the device, then record the launches and replay them."""
        try:
            with refusing_reads():
                work()
            self.graph = record(room, work)
        except RuntimeError:
            self.capturable = False
            work()  # what was more than a read, or no memory for a graph, is raised here
        else:
            self.graph.replay()


class Room:
    """The tensors that the programs of one place work on, which stay where they are, and the programs."""

    def __init__(self, place: Place, rows: int):
        def new(*size: int, dtype: torch.dtype = place.dtype) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=place.device)

        width, cuda = place.width, place.device.type == "cuda"
        self.rows, self.vocab_size = rows, place.vocab_size
        self.programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self.x, self.scaled, self.u = new(rows, width), new(rows, width), new(rows, width, dtype=torch.float32)
        self.e = new(rows, -(-place.vocab_size // 64) * 64)
        self.weight = new(place.vocab_size, width) if place.copied else None
        self.index = torch.arange(rows, device=place.device)
        self.y = new(rows, dtype=torch.int64)
        self.facts = new(2, dtype=torch.int64)  # as those of a call: rows that are there, a NaN among them
        self.record = new(7, rows, dtype=torch.float64)  # the five columns, value and gate
        self.aside = torch.cuda.Stream(place.device) if cuda else None
        # Each half of what the host writes has been read when it is written anew: a call waits for its survey, which
        # takes the first half and comes after the last call's copy of the second
        self.table = new(SLOTS, dtype=torch.int64)
        self.told = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self.heard = (ctypes.c_int64 * 3).from_address(self.told.data_ptr())
        self.here = torch.zeros(SLOTS, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self.slots = (ctypes.c_int64 * SLOTS).from_address(self.here.data_ptr())
        self.factor = ctypes.c_double.from_buffer(self.slots, 8 * (SLOTS - 1))
        self.scale = self.table.view(torch.float64)[-1:]
        half = slice(CHUNK + 1, SLOTS)  # the slot between them is the kernels' own
        self.rest = self.table[half], self.here[half]

    def ask(self, hidden: Tensor, targets: Tensor, earlier: Tensor | None) -> Asked:
        """Where the survey of a program will look, and leave what it finds."""
        tokens = targets.shape[0]
        pitch = -(-tokens // 16) * 16
        found = torch.empty(2 * pitch + 2, dtype=torch.int64, device=self.y.device)
        at = found.data_ptr()
        self.slots[:CHUNK] = (
            targets.data_ptr(), tokens, 0 if earlier is None else earlier.data_ptr(), at, at + 8 * pitch,
            at + 16 * pitch, hidden.data_ptr(), 0,
        )  # fmt: skip
        self.heard[:] = NOTHING
        return Asked(self, hidden, targets, found, pitch)

    def hear(self) -> list[int]:
        """What the survey tells, as soon as it has: the program that it is a part of goes on.

        No event stands between the two, so the host looks: all three numbers are there, in whatever order they came.
        """
        looks = 0
        while min(self.heard) < 0:
            looks += 1
            if looks % LOOKS == 0 and torch.cuda.current_stream(self.y.device).query() and min(self.heard) < 0:
                raise RuntimeError("the survey of a call has ended and told nothing")
            time.sleep(0.0 if looks < LOOKS else 2e-5)  # a long queue is before it
        return list(self.heard)

    def tell(
        self, out: Tensor | None, targets: Tensor, record: Tensor, top: Tensor | None, scale: Tensor | float
    ) -> None:
        """Where this call's dX, t, record and likeliest tokens go, and the scale of its gates."""
        if isinstance(scale, Tensor) and scale.device.type == "cpu":
            scale = float(scale)  # a copy from pageable memory would wait for the device
        self.slots[CHUNK + 1 : SLOTS - 1] = (
            0 if out is None else out.data_ptr(), targets.data_ptr(), record.data_ptr(), record.stride(0),
            0 if top is None else top.data_ptr(),
        )  # fmt: skip
        if not isinstance(scale, Tensor):
            self.factor.value = scale
        table, here = self.rest
        table.copy_(here, non_blocking=True)
        if isinstance(scale, Tensor):
            self.scale.copy_(scale.reshape(1))

    def graphs(self) -> Iterator[Any]:
        for recorded in (some for program in self.programs.values() for some in program.parts()):
            if recorded.graph is not None:
                yield recorded.graph

    def views(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(E, E^T, u, v X) of a chunk of so many rows."""
        e = self.e[:rows, : self.vocab_size]
        return e, e.T, self.u[:rows], self.scaled[:rows]


@dataclass
class Program:
    """A chunk of at most ``rows`` rows in a `Room`: statistics and objective, then what the gates do to its rows.

    Room and head are those it was made for; not kept, lest a model stay in memory for its programs.
    """

    rows: int
    dtype: torch.dtype  # of the hidden states
    objective: Objective
    context: Context
    top: int
    beginning: Recorded = field(default_factory=Recorded)
    measuring: Recorded = field(default_factory=Recorded)
    finishing: dict[tuple[bool, bool], Recorded] = field(default_factory=dict[tuple[bool, bool], Recorded])
    vectors: Tensor | None = None  # [4, rows]: as `target_logits` makes them
    likeliest: Tensor | None = None  # [rows, k]: of `top`

    def parts(self) -> Iterator[Recorded]:
        """Those that have run."""
        yield from (part for part in (self.beginning, self.measuring, *self.finishing.values()) if part.runs)

    def begin(self, room: Room, head: Head) -> None:
        """The survey of a call, and statistics and gates of its first chunk."""
        twice = self.beginning.run(room, partial(self.begin_work, room, head))
        if twice and room.aside is not None:  # the second time is not to tell the next call
            torch.cuda.current_stream().record_event().synchronize()

    def begin_work(self, room: Room, head: Head) -> None:
        from deftune.losses.triton_rows import survey_told

        survey_told(room.here, room.table, room.told, head.vocab_size, IGNORE_INDEX)
        self.work(room, head)

    def measure(self, room: Room, head: Head) -> None:
        """Statistics and gates of the next chunk."""
        self.measuring.run(room, partial(self.work, room, head))

    def work(self, room: Room, head: Head) -> None:
        from deftune.losses.triton_rows import aligned, take_rows

        rows, k, device = self.rows, min(self.top, head.vocab_size), room.x.device
        if self.vectors is None:
            likeliest = torch.empty(rows, k, dtype=torch.float64, device=device) if k else None
            self.vectors, self.likeliest = aligned(4, rows, torch.float32, device), likeliest
        x, y = room.x[:rows], room.y[:rows]
        take_rows(room.table, self.dtype, x, y, room.facts)
        given = Supervised(x, room.index[:rows], y, room.facts)
        backend = TritonBackend(head, room.x.dtype, given, self.vectors, self.likeliest)
        backend.e = room.e
        chunk = backend.measure(slice(0, rows), room.record[:5, :rows], True, self.top)
        stats = stats_of(chunk.columns, chunk.top, chunk.y, head.vocab_size, chunk.top_entropy)
        room.record[6, :rows], room.record[5, :rows] = self.objective.evaluate(stats, self.context)

    def finish(self, room: Room, head: Head, out: torch.dtype | None, weight: bool) -> None:
        """The chunk's rows of dX (None: not wanted), t of its targets, v X for dW, its record."""
        recorded = self.finishing.setdefault((out is not None, weight), Recorded())
        recorded.run(room, partial(self.finish_work, room, head, out, weight))

    def finish_work(self, room: Room, head: Head, out: torch.dtype | None, weight: bool) -> None:
        from deftune.losses.triton_rows import finish_told

        rows, vectors = self.rows, self.vectors
        assert vectors is not None
        finish_told(
            room.table, room.record[:, :rows], vectors, room.x[:rows], room.y[:rows], room.facts, head,
            None if out is None else room.u, out or self.dtype, room.scaled if weight else None, self.likeliest,
        )  # fmt: skip


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


def record(room: Room, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The launches of some work as a graph.

    Graphs of a room share their memory, which they use one after the other; what they return is copied. It is named by
    one of them: a pool whose last graph is gone cannot be used again.
    """
    graph, here, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), room.aside
    assert aside is not None
    pool = next((other.pool() for other in room.graphs()), None)
    with _lock:  # one capture at a time
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
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


def settled(tensor: Tensor) -> Tensor:
    """As the table's pointers need it: contiguous, on 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def room_for(head: Head, dtype: torch.dtype, rows: int, stream: int) -> Room:
    """One for each place, as large as was needed; the last few places of a device keep theirs."""
    weight = head.weight
    copied = weight.dtype != dtype or not weight.is_contiguous()
    place = Place(weight.device, stream, threading.get_ident(), dtype, head.vocab_size, head.width, copied)
    rows = -(-rows // PAD) * PAD
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
        self, asked: Asked, head: Head, size: int, objective: Objective, context: Context, top: int, multiply: bool
    ):
        self.size = -(-size // PAD) * PAD
        room, self.hidden = asked.room, asked.hidden
        self.room, self.head = room, head
        if room.weight is not None:
            self.head = replace(head, weight=room.weight.copy_(head.weight))
        self.program = self.program_for(objective, context, top)
        # before the host knows how many rows there are: what the others become is not looked at
        self.program.begin(room, self.head)
        self.begun = torch.cuda.current_stream().record_event() if room.aside is not None else None
        self.multiplied = multiply
        if multiply:  # always over all of them: a product of another shape would have other last bits
            self.multiply(self.size)

    def multiply(self, rows: int) -> None:
        """u = E W."""
        e, _, u, _ = self.room.views(rows)
        product(e, self.head.weight, u)

    def program_for(self, objective: Objective, context: Context, top: int) -> Program:
        ids, head, programs, dtype = context.special_ids, self.head, self.room.programs, self.hidden.dtype
        key = (head.weight.data_ptr(), head.scale, head.softcap, self.size, dtype, objective, ids)
        if key not in programs:
            programs[key] = Program(self.size, dtype, objective, Context(special_ids=ids), top)
        programs.move_to_end(key)
        if len(programs) > MOST:
            programs.popitem(last=False)
        return programs[key]

    def run(
        self, call: Call, wanted: Sequence[bool], scale: Tensor | float
    ) -> tuple[Tensor, Gradients, Tensor, Tensor | None]:
        """As `linear.fused`."""
        from deftune.losses.triton_rows import aligned, sort_targets, subtract_targets

        room, count, head, device = self.room, call.count, self.head, self.room.x.device
        into = call.new_gradients(wanted)
        record = aligned(6, count, torch.float64, device)
        targets = torch.empty(count, dtype=torch.float32, device=device)  # t of every row
        k = min(call.top, head.vocab_size)
        top = torch.empty(count, k, dtype=torch.float64, device=device) if k else None
        room.tell(into.hidden, targets, record, top, scale)
        out, views = None if into.hidden is None else into.hidden.dtype, room.views(self.size)
        for start in range(0, count, self.size):
            if start:
                self.program.measure(room, head)
            rows = min(self.size, count - start)
            _, turned, _, scaled = views if rows == self.size else room.views(rows)
            if into.hidden is not None and not (self.multiplied and start == 0):
                self.multiply(rows)
            self.program.finish(room, head, out, into.weight is not None)
            if into.weight is not None:
                product(turned, scaled, into.weight, add=start > 0)
        if into.weight is not None and count:
            # many small kernels that wait for each other: beside the chunks, once those are launched
            with torch.cuda.stream(room.aside) if room.aside is not None else nullcontext():
                if room.aside is not None and self.begun is not None:
                    room.aside.wait_event(self.begun)
                runs = sort_targets(call.targets, head.vocab_size)
            if room.aside is not None:
                torch.cuda.current_stream().wait_stream(room.aside)
                for part in runs:  # made there, read here
                    part.record_stream(torch.cuda.current_stream())
            subtract_targets(self.hidden, call.index, runs, targets, into.weight)
        elif into.weight is not None:
            into.weight.zero_()
        loss = record[5].sum() * scale if count else record.new_zeros(())
        call.check_nan(record[0])
        return loss.float(), into, record[:5], top
