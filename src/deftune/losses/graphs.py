"""The fused loss of small heads: the Triton backend's kernels for a chunk, replayed as two CUDA graphs.

Where the GPU needs less than a millisecond for a chunk, the host takes longer than that to launch its two dozen
kernels. A `Program` has all of them but the gradients' GEMMs, on buffers that stay allocated. It launches them one by
one the first times, then captures two graphs: one from the rows to their gates, one from the gates to the inputs of
the GEMMs. From then on a chunk is two graph launches and two GEMMs. The values that differ from call to call (the
addresses of its rows and gradients, its scale) are in a table on the device, which the survey kernel and a copy fill;
the kernels count the chunks in that table. They read the number of rows on the device too, so that the first chunk is
launched before the host knows that number.

A graph replays the objective as it was when it was captured. So only objectives that depend on nothing else are
replayed: deftune's own, without progress or statistics of the step. A user's objective may read a schedule or a
counter. An objective that reads values on the host, or copies to the device, cannot be captured: its kernels are
launched one by one.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deftune.losses.chunks import Supervised, check_nan, new_gradients
from deftune.losses.head import Head
from deftune.losses.request import Request, Result, Rows
from deftune.losses.statistics import COLUMNS, LOG_P, plain, stats_of
from deftune.losses.triton_backend import Survey, TritonBackend, product
from deftune.objectives import Context, Objective
from deftune.objectives.stats import IGNORE_INDEX

SMALL = 1e12  # operations of a chunk: 1.5 ms of an H200's tensor cores
MOST_COPIED = 1 << 27  # elements of a weight of another dtype, whose copy stays allocated
CAPTURE_AT = 3  # the run of a program that captures it: programs that run once or twice are not worth it
MOST_PROGRAMS = 64  # kept in a workspace: weights that move (FSDP) make new ones all the time
MOST_WORKSPACES = 2  # kept on a device
NOT_WRITTEN = (-1, -1, -1)  # the survey's report before the kernel has written it
POLLS = 1000  # of the report, before the host sleeps between them
SLOTS, CHUNK = 15, 8  # of the table in `triton_table`: how many, and the one that its kernels write
PAD = 128  # rows of a program are a multiple of this: few programs, little padding


class WorkspaceKey(NamedTuple):
    """The shapes of a head's buffers, and the stream and thread whose calls use them one after the other."""

    device: torch.device
    stream: int
    thread: int
    dtype: torch.dtype
    vocab_size: int
    width: int
    copied: bool  # the weight has another dtype than the GEMMs, or is not contiguous


class SurveyTensors(NamedTuple):
    """The inputs and outputs of a survey kernel; held while the table has their addresses."""

    hidden: Tensor
    targets: Tensor
    found: Tensor  # positions, labels and facts as in `triton_rows.survey`, in one tensor
    pitch: int  # from the positions to the labels

    def rows(self, count: int) -> Rows:
        pitch, found = self.pitch, self.found
        return Rows(found[:count], found[pitch : pitch + count], found[2 * pitch :])


class Replayable:
    """Launches on buffers that stay allocated: one by one the first times, then captured, then replayed."""

    def __init__(self):
        self.runs, self.graph, self.capturable = 0, None, True

    def run(self, workspace: Workspace, work: Callable[[], None]) -> bool:
        """Returns whether the work ran twice, once of it to be captured."""
        self.runs += 1
        if self.graph is not None:
            self.graph.replay()
        elif self.runs < CAPTURE_AT or not self.capturable:
            work()
        else:
            self.capture(workspace, work)
            return True
        return False

    def capture(self, workspace: Workspace, work: Callable[[], None]) -> None:
        """Run the work while synchronisation is an error, then capture its launches and replay them."""
        try:
            with refusing_reads():
                work()
            self.graph = record(workspace, work)
        except RuntimeError:
            self.capturable = False
            work()  # an error that is not due to the capture is raised here
        else:
            self.graph.replay()


class Workspace:
    """The buffers that the programs of one key work on, which stay allocated, and the programs."""

    def __init__(self, key: WorkspaceKey, rows: int):
        def new(*size: int, dtype: torch.dtype = key.dtype) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=key.device)

        width, cuda = key.width, key.device.type == "cuda"
        self.rows, self.vocab_size = rows, key.vocab_size
        self.programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self.x, self.scaled, self.u = new(rows, width), new(rows, width), new(rows, width, dtype=torch.float32)
        self.e = new(rows, -(-key.vocab_size // 64) * 64)
        self.weight = new(key.vocab_size, width) if key.copied else None
        self.index = torch.arange(rows, device=key.device)
        self.y = new(rows, dtype=torch.int64)
        self.facts = new(2, dtype=torch.int64)  # of the chunk: the number of its rows, and the NaN flag
        self.record = new(len(COLUMNS) + 2, rows, dtype=torch.float64)  # and the value and the gate
        self.side_stream = torch.cuda.Stream(key.device) if cuda else None
        # The host overwrites either half of its table only after the device has read it: a call waits for its survey,
        # which reads the first half and comes after the previous call's copy of the second
        self.table = new(SLOTS, dtype=torch.int64)
        self.report = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self.reported = (ctypes.c_int64 * 3).from_address(self.report.data_ptr())
        self.host_table = torch.zeros(SLOTS, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self.slots = (ctypes.c_int64 * SLOTS).from_address(self.host_table.data_ptr())
        self.factor = ctypes.c_double.from_buffer(self.slots, 8 * (SLOTS - 1))
        self.scale = self.table.view(torch.float64)[-1:]
        half = slice(CHUNK + 1, SLOTS)  # the slot between the halves is written by the kernels
        self.second_half = self.table[half], self.host_table[half]

    def set_inputs(self, hidden: Tensor, targets: Tensor, earlier: Tensor | None) -> SurveyTensors:
        """Write the first half of the host's table: the inputs and outputs of the survey kernel."""
        tokens = targets.shape[0]
        pitch = -(-tokens // 16) * 16
        found = torch.empty(2 * pitch + 2, dtype=torch.int64, device=self.y.device)
        at = found.data_ptr()
        self.slots[:CHUNK] = (
            targets.data_ptr(), tokens, 0 if earlier is None else earlier.data_ptr(), at, at + 8 * pitch,
            at + 16 * pitch, hidden.data_ptr(), 0,
        )  # fmt: skip
        self.reported[:] = NOT_WRITTEN
        return SurveyTensors(hidden, targets, found, pitch)

    def poll(self) -> list[int]:
        """The survey's report (count, first bad label, earlier flag), while the program that it belongs to goes on.

        No event can be recorded inside a graph, so the host polls until all three numbers are written.
        """
        polls = 0
        while min(self.reported) < 0:
            polls += 1
            if polls % POLLS == 0 and torch.cuda.current_stream(self.y.device).query() and min(self.reported) < 0:
                raise RuntimeError("graphs: the survey kernel has ended without a report; this is a bug of deftune")
            time.sleep(0.0 if polls < POLLS else 2e-5)  # the stream's queue is long
        return list(self.reported)

    def set_outputs(
        self, out: Tensor | None, targets: Tensor, record: Tensor, top: Tensor | None, scale: Tensor | float
    ) -> None:
        """Write the second half of the table: the addresses of dX, t, record and top, and the scale of the gates."""
        if isinstance(scale, Tensor) and scale.device.type == "cpu":
            scale = float(scale)  # a copy from pageable memory would wait for the device
        self.slots[CHUNK + 1 : SLOTS - 1] = (
            0 if out is None else out.data_ptr(), targets.data_ptr(), record.data_ptr(), record.stride(0),
            0 if top is None else top.data_ptr(),
        )  # fmt: skip
        if not isinstance(scale, Tensor):
            self.factor.value = scale
        table, host = self.second_half
        table.copy_(host, non_blocking=True)
        if isinstance(scale, Tensor):
            self.scale.copy_(scale.reshape(1))

    def graphs(self) -> Iterator[Any]:
        for part in (part for program in self.programs.values() for part in program.parts()):
            if part.graph is not None:
                yield part.graph

    def views(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(E, E^T, u, v X) of a chunk of ``rows`` rows."""
        e = self.e[:rows, : self.vocab_size]
        return e, e.T, self.u[:rows], self.scaled[:rows]


@dataclass
class Program:
    """The kernels for a chunk of at most ``rows`` rows in a `Workspace`: up to the gates, then from the gates on.

    Every call passes the workspace and the head again: a program that kept them would keep a model in memory.
    """

    rows: int
    dtype: torch.dtype  # of the hidden states
    objective: Objective
    context: Context
    top: int
    beginning: Replayable = field(default_factory=Replayable)
    measuring: Replayable = field(default_factory=Replayable)
    finishing: dict[tuple[bool, bool], Replayable] = field(default_factory=dict[tuple[bool, bool], Replayable])
    vectors: Tensor | None = None  # [4, rows]: as `target_logits` makes them
    likeliest: Tensor | None = None  # [rows, k]: of `top`

    def parts(self) -> Iterator[Replayable]:
        """The parts that have run."""
        yield from (part for part in (self.beginning, self.measuring, *self.finishing.values()) if part.runs)

    def begin(self, workspace: Workspace, head: Head) -> None:
        """The survey of a call, and the statistics and gates of its first chunk."""
        twice = self.beginning.run(workspace, partial(self.begin_work, workspace, head))
        if twice and workspace.side_stream is not None:  # the second survey must not write into the next call's report
            torch.cuda.current_stream().record_event().synchronize()

    def begin_work(self, workspace: Workspace, head: Head) -> None:
        from deftune.losses.triton_rows import survey_told

        survey_told(workspace.host_table, workspace.table, workspace.report, head.vocab_size, IGNORE_INDEX)
        self.work(workspace, head)

    def measure(self, workspace: Workspace, head: Head) -> None:
        """The statistics and gates of the next chunk."""
        self.measuring.run(workspace, partial(self.work, workspace, head))

    def work(self, workspace: Workspace, head: Head) -> None:
        from deftune.losses.triton_rows import aligned, take_rows

        rows, k, device = self.rows, min(self.top, head.vocab_size), workspace.x.device
        if self.vectors is None:
            likeliest = torch.empty(rows, k, dtype=torch.float64, device=device) if k else None
            self.vectors, self.likeliest = aligned(4, rows, torch.float32, device), likeliest
        x, y = workspace.x[:rows], workspace.y[:rows]
        take_rows(workspace.table, self.dtype, x, y, workspace.facts)
        given = Supervised(x, workspace.index[:rows], y, workspace.facts)
        backend = TritonBackend(head, workspace.x.dtype, given, self.vectors, self.likeliest)
        backend.e = workspace.e
        chunk = backend.measure(slice(0, rows), workspace.record[:-2, :rows], True, self.top)
        stats = stats_of(chunk.columns, chunk.top, chunk.y, head.vocab_size, chunk.top_entropy)
        workspace.record[-1, :rows], workspace.record[-2, :rows] = self.objective.evaluate(stats, self.context)

    def finish(self, workspace: Workspace, head: Head, out: torch.dtype | None, weight: bool) -> None:
        """The chunk's rows of dX (``out`` None: not wanted), t of its targets, v X for dW, and its record."""
        recorded = self.finishing.setdefault((out is not None, weight), Replayable())
        recorded.run(workspace, partial(self.finish_work, workspace, head, out, weight))

    def finish_work(self, workspace: Workspace, head: Head, out: torch.dtype | None, weight: bool) -> None:
        from deftune.losses.triton_rows import finish_told

        rows, vectors, space = self.rows, self.vectors, workspace
        assert vectors is not None
        finish_told(
            space.table, space.record[:, :rows], vectors, space.x[:rows], space.y[:rows], space.facts, head,
            None if out is None else space.u, out or self.dtype, space.scaled if weight else None, self.likeliest,
        )  # fmt: skip


@contextmanager
def refusing_reads() -> Generator[None]:
    """Synchronisation is an error: during a capture it would break more than this capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def record(workspace: Workspace, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the launches of some work as a graph.

    The graphs of a workspace share one memory pool, since they run one after the other and their results are copied.
    The pool is found through one of them: a pool whose last graph is gone cannot be used again.
    """
    graph, stream, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), workspace.side_stream
    assert side is not None
    pool = next((other.pool() for other in workspace.graphs()), None)
    with _lock:  # one capture at a time
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()  # after an error too: the stream must not be left capturing
        stream.wait_stream(side)
    return graph


_lock = threading.Lock()
_workspaces: OrderedDict[WorkspaceKey, Workspace] = OrderedDict()


def clear() -> None:
    """Free the workspaces with their programs and graphs."""
    _workspaces.clear()


def constant(value: object) -> bool:
    """Whether the type and the fields of an objective determine it: true of deftune's own objectives and modifiers.

    A user's objective may read anything, and two that are not dataclasses compare equal whatever their numbers.
    """
    if isinstance(value, Objective):
        own = type(value).__module__.startswith("deftune.")
        return own and all(constant(getattr(value, field.name)) for field in fields(value))
    return isinstance(value, (int, float, str))


def addressable(tensor: Tensor) -> Tensor:
    """The tensor contiguous and aligned to 16 bytes, as kernels assume of the table's pointers."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def workspace_for(head: Head, dtype: torch.dtype, rows: int, stream: int) -> Workspace:
    """The workspace of a head, stream and thread, enlarged if needed; a device keeps the last few."""
    weight = head.weight
    copied = weight.dtype != dtype or not weight.is_contiguous()
    key = WorkspaceKey(weight.device, stream, threading.get_ident(), dtype, head.vocab_size, head.width, copied)
    rows = -(-rows // PAD) * PAD
    with _lock:
        workspace = _workspaces.pop(key, None)
        if workspace is not None and workspace.rows < rows:
            workspace = None  # freed before the larger one is made
        others = [other for other in _workspaces if other.device == key.device]
        for other in others[: max(0, len(others) - MOST_WORKSPACES + 1)]:
            del _workspaces[other]
        workspace = _workspaces[key] = workspace or Workspace(key, rows)
    return workspace


class GraphsBackend(TritonBackend):
    """`TritonBackend` with its kernels replayed as CUDA graphs; for losses with gradients."""

    name = "graphs"

    @staticmethod
    def refusal(request: Request) -> str:
        if against := TritonBackend.refusal(request):
            return against
        objective = request.objective
        if objective is None or not any(request.wanted):
            return "graphs are for a loss whose gradients are made in the same pass"
        if request.head.shard is not None:
            return "graphs are for a whole vocabulary on one device"
        if request.weights is not None or request.head.bias is not None or request.sparse is not None:
            return "graphs are for a head without bias, no external weights and no sparse mode"
        if objective.kind != "local" or request.context.step is not None or "progress" in objective.requires:
            return f"`{objective}` depends on the step or on progress, which a graph would not see"
        if not constant(objective):
            return f"`{objective}` is not one of deftune's own objectives, and may read what a graph would not see"
        if request.hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            return "the stream is being captured already"
        return ""

    @staticmethod
    def reservation(request: Request) -> str:
        weight, dtype = request.head.weight, request.dtype
        rows = TritonBackend.first_rows(request.head, dtype, len(request.targets), request.chunk_rows)
        if 6 * rows * weight.numel() >= SMALL:
            return "a chunk keeps the GPU busy for longer than its launches take the host"
        if weight.dtype != dtype and weight.numel() >= MOST_COPIED:
            return f"a {dtype} copy of the weight would stay allocated"
        return TritonBackend.reservation(request)

    @classmethod
    def run(cls, request: Request) -> Result:
        if request.rows is not None or not len(request.targets):
            return TritonBackend.run(request)  # a second backward, or nothing to do
        head, tokens = request.head, len(request.targets)
        size = TritonBackend.first_rows(head, request.dtype, tokens, request.chunk_rows)
        with plain(request.hidden.device):
            with Survey(request) as survey:
                stream = survey.stream.cuda_stream if survey.stream else 0
                workspace = workspace_for(head, request.dtype, size, stream)
                hidden, targets = addressable(request.hidden), addressable(request.targets.long())
                tensors = workspace.set_inputs(hidden, targets, survey.flag)
                replay = Replay(workspace, tensors.hidden, request, size)
                count, bad, flag = workspace.poll()
                survey.check(bad, flag)
            request = request.located(tensors.rows(count))
            return replay.run(request, request.scale())


class Replay:
    """One request in a workspace; making it launches the first chunk, before the number of rows is known."""

    def __init__(self, workspace: Workspace, hidden: Tensor, request: Request, size: int):
        self.size = -(-size // PAD) * PAD
        self.workspace, self.hidden, self.head = workspace, hidden, request.head
        if workspace.weight is not None:
            self.head = replace(self.head, weight=workspace.weight.copy_(self.head.weight))
        self.program = self.program_for(request)
        # kernels skip the rows beyond the number of rows
        self.program.begin(workspace, self.head)
        self.measured = torch.cuda.current_stream().record_event() if workspace.side_stream is not None else None
        self.multiplied = request.wanted[0]
        if self.multiplied:  # over all rows of the chunk in any case: a GEMM of another shape has other last bits
            self.multiply(self.size)

    def multiply(self, rows: int) -> None:
        """u = E W."""
        e, _, u, _ = self.workspace.views(rows)
        product(e, self.head.weight, u)

    def program_for(self, request: Request) -> Program:
        ids, head, programs, dtype = request.context.special_ids, self.head, self.workspace.programs, self.hidden.dtype
        objective = request.objective
        assert objective is not None
        key = (head.weight.data_ptr(), head.scale, head.softcap, self.size, dtype, objective, ids)
        if key not in programs:
            programs[key] = Program(self.size, dtype, objective, Context(special_ids=ids), request.top_k)
        programs.move_to_end(key)
        if len(programs) > MOST_PROGRAMS:
            programs.popitem(last=False)
        return programs[key]

    def run(self, request: Request, scale: Tensor | float) -> Result:
        """The chunks, and the result of the located request."""
        from deftune.losses.triton_rows import aligned, sort_targets, subtract_targets

        workspace, head, device, rows_found = self.workspace, self.head, self.workspace.x.device, request.supervised
        count, side = request.count, workspace.side_stream
        into = new_gradients(request, request.wanted)
        record = aligned(len(COLUMNS) + 1, count, torch.float64, device)
        targets = torch.empty(count, dtype=torch.float32, device=device)  # t of every row
        k = min(request.top_k, head.vocab_size)
        top = torch.empty(count, k, dtype=torch.float64, device=device) if k else None
        gate = record.new_empty(count) if request.gates else None
        workspace.set_outputs(into.hidden, targets, record, top, scale)
        out, views = None if into.hidden is None else into.hidden.dtype, workspace.views(self.size)
        for start in range(0, count, self.size):
            if start:
                self.program.measure(workspace, head)
            rows = min(self.size, count - start)
            _, turned, _, scaled = views if rows == self.size else workspace.views(rows)
            if into.hidden is not None and not (self.multiplied and start == 0):
                self.multiply(rows)
            self.program.finish(workspace, head, out, into.weight is not None)
            if into.weight is not None:
                product(turned, scaled, into.weight, add=start > 0)
            if gate is not None:
                gate[start : start + rows] = workspace.record[-1, :rows]
        if into.weight is not None and count:
            # a sort is many small kernels that wait for each other: on a stream beside the chunks
            with torch.cuda.stream(side) if side is not None else nullcontext():
                if side is not None and self.measured is not None:
                    side.wait_event(self.measured)
                runs = sort_targets(rows_found.labels, head.vocab_size)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
                for part in runs:  # allocated on one stream, read on the other
                    part.record_stream(torch.cuda.current_stream())
            subtract_targets(self.hidden, rows_found.index, runs, targets, into.weight)
        elif into.weight is not None:
            into.weight.zero_()
        loss = record[-1].sum() * scale if count else record.new_zeros(())
        check_nan(record[LOG_P], request)
        stats = stats_of(record[:-1], top, rows_found.labels, head.vocab_size)
        return Result(loss.float(), into, stats, request, gate, record[-1])
