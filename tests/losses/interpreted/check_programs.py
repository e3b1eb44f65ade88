"""Programs, what a CUDA graph would be captured from, in Triton's own interpreter, on the CPU."""

import math
import threading
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from examples import assert_both, both, error, sample, small_blocks, some_of  # noqa: F401 (small_blocks)

import deftune
from battery import CONTEXT
from deftune import IGNORE_INDEX, linear_loss, linear_loss_with_stats, token_loss, token_stats
from deftune.losses import call, linear, replay, triton_rows
from deftune.losses.call import prepare
from deftune.losses.chunks import balanced
from deftune.losses.compiled import linear_loss_op
from deftune.losses.triton_backend import TritonBackend
from tolerances import assert_near, tolerance

WRITTEN = ["nll", "deft", "eaft(k=5)", "deft | eos(nll)", "top(0.2) | floor(0.1)"]


class Stand:
    """In a graph's place: its work again, on what the room holds by then."""

    def __init__(self, room, work):
        self.replay = work


@pytest.fixture
def programs(monkeypatch):
    """Every call whose objective can be replayed goes through programs of 16 or 32 rows, captured at the second run."""
    monkeypatch.setattr(
        TritonBackend, "first_rows", staticmethod(lambda head, dtype, total, bound: balanced(total, 32))
    )
    monkeypatch.setattr(
        call, "suits", lambda head, objective, context, weights, *_: weights is None and replay.constant(objective)
    )
    monkeypatch.setattr(replay, "PAD", 16)
    monkeypatch.setattr(replay, "CAPTURE_AT", 2)
    monkeypatch.setattr(replay, "refusing_reads", nullcontext)
    monkeypatch.setattr(replay, "record", Stand)
    replay.clear()
    yield lambda: [program for room in replay._rooms.values() for program in room.programs.values()]
    replay.clear()


@pytest.mark.parametrize(
    "objective, rows", some_of([*product(WRITTEN, [16, 48])], [("deft", 16), ("top(0.2) | floor(0.1)", 48)])
)
def test_a_program_as_it_is_written(monkeypatch, programs, objective, rows):
    """Rows taken, fewer than the program's in the last chunk or in the only one.

    Ignored rows hold NaN, which must not come in with the padding.
    """
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: rows))
    monkeypatch.setattr(replay, "CAPTURE_AT", 100)
    hidden, weight, targets = sample(50)
    softcap = None if "eaft" in objective else 6.0
    dirty = torch.where((targets == IGNORE_INDEX)[:, None], math.nan, hidden)
    for items in (None, 70):
        _, expected = both(hidden, weight, targets, objective, softcap=softcap, num_items=items)
        got, _ = both(dirty, weight, targets, objective, softcap=softcap, num_items=items)
        assert_both([got, expected])
    assert {program.rows for program in programs()} == {rows}


@pytest.mark.parametrize(
    "sizes", [(3, 3, 3, 24, 24, 3, 1), pytest.param((10, 10, 10, 40, 40, 10, 1), marks=pytest.mark.slow)]
)
def test_calls_of_many_sizes_one_after_the_other(programs, sizes):
    """A room that is too small is made anew, with programs of its own; a smaller call leaves the rest of it alone."""
    hidden, weight, targets = sample(40, width=8)
    weight.requires_grad_()
    objective = "eaft(k=5)"
    for tokens in sizes:
        inputs = [hidden[:tokens].clone().requires_grad_(), weight]
        loss, stats = linear_loss_with_stats(*inputs, targets[:tokens], objective, backend="triton")
        reference = [x.detach().double().requires_grad_() for x in inputs]
        expected = token_loss(reference[0] @ reference[1].T, targets[:tokens], objective)
        assert_both(
            [(loss.detach(), torch.autograd.grad(loss, inputs)), (expected, torch.autograd.grad(expected, reference))]
        )
        truth = token_stats((hidden[:tokens] @ weight.detach().T).double(), targets[:tokens])
        assert_near(stats.log_p, truth.log_p, "float32 entropy", condition=60)
        assert_near(stats.top_log_p(5), truth.top_log_p(5), "float32 entropy", condition=60)
    assert any(all(part.graph for part in program.parts()) for program in programs())


OPTIONS = {
    "sum": {"reduction": "sum"},
    "a count on the host": {"num_items": torch.tensor(70)},
    "a count in one dimension": {"num_items": torch.tensor([70.0])},
    "chunks of no multiple of the padding": {"chunk_rows": 20},
    "chunks smaller than the padding": {"chunk_rows": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_program_under_every_option(programs, options):
    hidden, weight, targets = sample(30, width=8)
    chunk_rows = {"chunk_rows": options["chunk_rows"]} if "chunk_rows" in options else {}
    options = {key: value for key, value in options.items() if key != "chunk_rows"}
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    reference = [x.detach().double().requires_grad_() for x in inputs]
    expected = token_loss(reference[0] @ reference[1].T, targets, "deft", **options)
    truth = torch.autograd.grad(expected, reference)
    for _ in range(3):
        loss = linear_loss(*inputs, targets, "deft", backend="triton", **options, **chunk_rows)
        assert_both([(loss.detach(), torch.autograd.grad(loss, inputs)), (expected, truth)])
    assert any(all(part.graph for part in program.parts()) for program in programs())


def test_without_graphs_nothing_is_kept(programs):
    hidden, weight, targets = sample(30, width=8)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    with_graphs, without = (linear_loss(*inputs, targets, "deft", backend="triton", graphs=on) for on in (True, False))
    assert len(programs()) == 1 and all(program.beginning.runs == 1 for program in programs())
    for one, other in zip(*(torch.autograd.grad(loss, inputs) for loss in (with_graphs, without))):
        assert error(one, other) <= tolerance("fused gradient")


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["frozen head", "frozen hidden"])
def test_the_gradients_that_are_wanted_after_a_program(programs, trained):
    """One program, whatever is wanted of the rows it measured."""
    *inputs, targets = sample(20, width=8)
    reference = [x.double().requires_grad_() for x in inputs]
    truth = torch.autograd.grad(token_loss(reference[0] @ reference[1].T, targets, "deft"), reference)
    for wanted in [trained, (True, True)] * 3:
        for x, want in zip(inputs, wanted):
            x.requires_grad_(want).grad = None
        linear_loss(*inputs, targets, "deft", backend="triton").backward()
        for x, want, expected in zip(inputs, wanted, truth):
            assert (x.grad is None) == (not want)
            assert x.grad is None or error(x.grad, expected) <= tolerance("fused gradient")
    assert len(programs()) == 1


def test_nothing_supervised_in_a_program(programs):
    hidden, weight, targets = sample(20, width=8)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    for _ in range(3):
        linear_loss(*inputs, targets, "deft", backend="triton").backward()
        inputs[0].grad = inputs[1].grad = None
        loss = linear_loss(*inputs, torch.full_like(targets, IGNORE_INDEX), "deft", backend="triton")
        loss.backward()
        assert loss == 0 and not inputs[0].grad.any() and not inputs[1].grad.any()


def test_a_second_call_before_the_backward_of_the_first(programs):
    """Also twice the same backward: what a call returned is its own."""
    examples = [sample(10, width=8, seed=seed) for seed in range(2)]
    alone = [both(*example, "eaft(k=5)")[0] for example in examples]
    inputs = [[x.clone().requires_grad_() for x in example[:2]] for example in examples]
    results = [
        linear_loss_with_stats(*leaves, example[2], "eaft(k=5)", context=CONTEXT, backend="triton")
        for leaves, example in zip(inputs, examples)
    ]
    tops = [stats.top_log_p(5).clone() for _, stats in results]
    for (loss, stats), leaves, (expected, truth), top in zip(results, inputs, alone, tops):
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert loss == expected and all(torch.equal(a, b) for a, b in zip(grads, truth))
        assert torch.equal(stats.top_log_p(5), top)
        again = torch.autograd.grad(loss, leaves)
        assert all(error(a, b) <= tolerance("fused gradient") for a, b in zip(again, truth))


def test_two_threads_do_not_share_a_room(programs):
    """Between the rows that a call takes and its work on them, another thread makes a call of its own."""
    examples = [sample(30, width=8, seed=seed) for seed in range(2)]
    expected = [both(*example, "deft")[0] for example in examples]

    def begun(example):
        hidden, weight, targets = example
        return prepare(
            hidden, weight, targets, deftune.objective("deft"), None, None, 1.0, None, CONTEXT, "triton", keep=True
        )

    first = begun(examples[0])
    assert first.replay is not None
    thread = threading.Thread(target=lambda: linear.fused(begun(examples[1]), [True, True, False], 1 / 24))
    thread.start()
    thread.join()
    loss, grads, _, _ = linear.fused(first, [True, True, False], 1 / 24)
    assert torch.equal(loss, expected[0][0])
    assert torch.equal(grads.hidden, expected[0][1][0]) and torch.equal(grads.weight, expected[0][1][1])


def test_rows_left_over_in_a_room_are_not_looked_at(programs):
    """A longer call's NaN stands where a shorter one has no row: neither its flag nor its results see it."""
    hidden, weight, targets = sample(30, width=8)
    weight.requires_grad_()
    targets.clamp_(min=0)
    dirty = hidden.clone()
    dirty[25] = math.nan
    with pytest.raises(ValueError, match="25"):
        linear_loss(dirty, weight, targets, "deft", backend="triton")
    (room,) = replay._rooms.values()
    assert room.facts[1] == 1
    few = torch.where(torch.arange(30) < 10, targets, IGNORE_INDEX)
    assert_both(both(hidden, weight.detach(), few, "deft"))
    assert replay._rooms.popitem()[1] is room and room.facts.tolist() == [10, 0]


class Scheduled(deftune.Focus):
    """A user's own, no dataclass: all of these compare equal, and a schedule changes them."""

    def __init__(self, a):
        self.a = a

    def focus(self, stats, context=CONTEXT):
        return torch.full_like(stats.log_p, self.a)


def test_a_users_objective_is_evaluated_at_every_call(programs):
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    mine = Scheduled(0.0)
    assert mine == Scheduled(7.0)
    for a in (0.0, 0.4, 0.8):
        mine.a = a
        expected = token_loss(hidden @ weight.T, targets, f"alpha({a})")
        for objective in (mine, Scheduled(a), deftune.MODIFIERS["floor"](Scheduled(a), 0.0)):
            loss = linear_loss(hidden, weight, targets, objective, backend="triton")
            assert_near(loss, expected, "fused loss", condition=10)
    assert not programs()


def test_a_capture_that_fails_is_given_up(monkeypatch, programs):
    """Half-way, with the program's tensors overwritten: the call is right all the same, and none is tried again."""
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    tried = []

    def fails(room, work):
        tried.append(work)
        for program in room.programs.values():  # what the first half writes; the second, v and v X
            (program.likeliest if len(tried) == 1 else program.vectors[2]).fill_(math.nan)
        (room.record if len(tried) == 1 else room.scaled).fill_(math.nan)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(replay, "record", fails)
    losses = [linear_loss(hidden, weight, targets, "eaft(k=5)", backend="triton").item() for _ in range(4)]
    # its first half, with the survey, and its second
    assert len(set(losses)) == 1 and len(tried) == 2 and math.isfinite(losses[0])


@pytest.mark.parametrize(
    "form", [torch.Tensor.int, lambda targets: torch.cat([targets[:1], targets])[1:]], ids=["int32", "odd"]
)
def test_targets_that_had_to_be_copied(monkeypatch, programs, form):
    """The survey runs twice when it is captured: its targets are still there."""
    hidden, weight, targets = sample(30, width=8)
    alive, ask, survey = [], replay.Room.ask, triton_rows.survey_told

    def asked(room, hidden, targets, earlier):
        asked.targets = weakref.ref(targets)
        return ask(room, hidden, targets, earlier)

    def surveyed(*given):
        alive.append(asked.targets() is not None)
        return survey(*given)

    monkeypatch.setattr(replay.Room, "ask", asked)
    monkeypatch.setattr(triton_rows, "survey_told", surveyed)
    for _ in range(3):
        assert_both(both(hidden, weight, form(targets), "deft"))
    assert len(alive) >= 3 and all(alive)


def test_a_program_that_was_half_made(monkeypatch, programs):
    """No memory for the last of its tensors: the next call makes them all."""
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(triton_rows, "aligned", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        with pytest.raises(torch.OutOfMemoryError):
            linear_loss(hidden, weight, targets, "eaft(k=5)", backend="triton")
    _, stats = linear_loss_with_stats(hidden, weight, targets, "eaft(k=5)", backend="triton")
    truth = token_stats(hidden.double() @ weight.detach().double().T, targets)
    assert_near(stats.top_log_p(5), truth.top_log_p(5), "log p", condition=10)


def test_a_survey_that_tells_nothing_is_not_waited_for(monkeypatch):
    """The host looks at what it is told while the queue is busy, and no longer."""
    place = replay.Place(torch.device("cpu"), 0, 0, torch.float32, 64, 16, False)
    room, looked = replay.Room(place, 16), []

    class Stream:
        def query(self) -> bool:
            looked.append(1)
            if len(looked) == 3 and told:
                room.told.copy_(torch.tensor(told))
            return len(looked) > 3

    monkeypatch.setattr(replay, "LOOKS", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    for told in ([5, 9, 0], []):
        room.heard[:] = replay.NOTHING
        looked.clear()
        if told:
            assert room.hear() == told and len(looked) == 3
        else:
            with pytest.raises(RuntimeError, match="told nothing"):
                room.hear()


def test_few_rooms_are_kept(programs):
    for width in (4, 8, 12):
        hidden, weight, targets = sample(10, width=width)
        assert_both(both(hidden, weight, targets, "deft"))
    assert [place.width for place in replay._rooms] == [8, 12]


def test_weights_that_move_leave_few_programs(monkeypatch, programs):
    """As under FSDP: another address at every step."""
    monkeypatch.setattr(replay, "MOST", 3)
    hidden, weight, targets = sample(10, width=8)
    weights = [weight.clone().requires_grad_() for _ in range(5)]
    for moved in weights:
        linear_loss(hidden, moved, targets, "deft", backend="triton").backward()
    assert len(programs()) == 3
    assert all(torch.equal(moved.grad, weights[0].grad) for moved in weights)


def test_float16_hidden_states_in_a_program(programs):
    """dX is float32 until the upstream, a loss scale, has come in."""
    hidden, weight, targets = sample(20, width=8)
    half = hidden.half()
    options = [None, None, None, "deft", "mean", None, 1.0, None, None, "triton", torch.float32, [True, True, False]]
    loss, d_hidden, d_weight, _ = linear_loss_op(half, weight, targets, *options)
    assert d_hidden.dtype == torch.float32 and programs()
    assert_both([(loss, (d_hidden, d_weight)), both(half.float(), weight, targets, "deft")[1]])
