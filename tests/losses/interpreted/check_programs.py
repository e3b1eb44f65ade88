"""The graphs backend with launches in a graph's place, in Triton's own interpreter, on the CPU."""

import math
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from examples import assert_both, both, error, sample, small_blocks, some_of  # noqa: F401 (small_blocks)

import deftune
from battery import CONTEXT
from deftune import IGNORE_INDEX, linear_loss, token_loss, token_stats
from deftune.losses import graphs, triton_rows
from deftune.losses.backends import BACKENDS
from deftune.losses.chunks import balanced
from deftune.losses.compiled import linear_loss_op
from deftune.losses.head import Head
from deftune.losses.request import make_request
from deftune.losses.triton_backend import TritonBackend
from tolerances import assert_near, tolerance

with_graphs = partial(both, backend="graphs")
WRITTEN = ["nll", "deft", "eaft(k=5)", "deft | eos(nll)", "top(0.2) | floor(0.1)"]


class Stand:
    """In a graph's place: its work again, on what the workspace holds by then."""

    def __init__(self, workspace, work):
        self.replay = work


@pytest.fixture
def programs(monkeypatch):
    """The graphs backend has programs of 16 or 32 rows, captured at the second run."""
    monkeypatch.setattr(
        TritonBackend, "first_rows", staticmethod(lambda head, dtype, total, bound: balanced(total, 32))
    )
    monkeypatch.setattr(graphs.GraphsBackend, "reservation", staticmethod(lambda request: ""))
    monkeypatch.setattr(graphs, "PAD", 16)
    monkeypatch.setattr(graphs, "CAPTURE_AT", 2)
    monkeypatch.setattr(graphs, "refusing_reads", nullcontext)
    monkeypatch.setattr(graphs, "record", Stand)
    graphs.clear()
    yield lambda: [program for workspace in graphs._workspaces.values() for program in workspace.programs.values()]
    graphs.clear()


@pytest.mark.parametrize(
    "objective, rows", some_of([*product(WRITTEN, [16, 48])], [("deft", 16), ("top(0.2) | floor(0.1)", 48)])
)
def test_a_program_as_it_is_written(monkeypatch, programs, objective, rows):
    """Rows taken, fewer than the program's in the last chunk or in the only one.

    Ignored rows hold NaN, which must not come in with the padding.
    """
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: rows))
    monkeypatch.setattr(graphs, "CAPTURE_AT", 100)
    hidden, weight, targets = sample(50)
    softcap = None if "eaft" in objective else 6.0
    dirty = torch.where((targets == IGNORE_INDEX)[:, None], math.nan, hidden)
    for items in (None, 70):
        _, expected = with_graphs(hidden, weight, targets, objective, softcap=softcap, num_items=items)
        got, _ = with_graphs(dirty, weight, targets, objective, softcap=softcap, num_items=items)
        assert_both([got, expected])
    assert {program.rows for program in programs()} == {rows}


@pytest.mark.parametrize(
    "sizes", [(3, 3, 3, 24, 24, 3, 1), pytest.param((10, 10, 10, 40, 40, 10, 1), marks=pytest.mark.slow)]
)
def test_calls_of_many_sizes_one_after_the_other(programs, sizes):
    """A workspace that is too small is replaced, with its programs; a smaller call leaves the rest of it alone."""
    hidden, weight, targets = sample(40, width=8)
    weight.requires_grad_()
    objective = "eaft(k=5)"
    for tokens in sizes:
        inputs = [hidden[:tokens].clone().requires_grad_(), weight]
        loss, stats = linear_loss(*inputs, targets[:tokens], objective, backend="graphs", return_stats=True)
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
        loss = linear_loss(*inputs, targets, "deft", backend="graphs", **options, **chunk_rows)
        assert_both([(loss.detach(), torch.autograd.grad(loss, inputs)), (expected, truth)])
    assert any(all(part.graph for part in program.parts()) for program in programs())


def test_the_triton_backend_keeps_nothing(programs):
    hidden, weight, targets = sample(30, width=8)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    replayed, launched = (linear_loss(*inputs, targets, "deft", backend=name) for name in ("graphs", "triton"))
    assert len(programs()) == 1 and all(program.beginning.runs == 1 for program in programs())
    for one, other in zip(*(torch.autograd.grad(loss, inputs) for loss in (replayed, launched))):
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
        linear_loss(*inputs, targets, "deft", backend="graphs").backward()
        for x, want, expected in zip(inputs, wanted, truth):
            assert (x.grad is None) == (not want)
            assert x.grad is None or error(x.grad, expected) <= tolerance("fused gradient")
    assert len(programs()) == 1


def test_nothing_supervised_in_a_program(programs):
    hidden, weight, targets = sample(20, width=8)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    for _ in range(3):
        linear_loss(*inputs, targets, "deft", backend="graphs").backward()
        inputs[0].grad = inputs[1].grad = None
        loss = linear_loss(*inputs, torch.full_like(targets, IGNORE_INDEX), "deft", backend="graphs")
        loss.backward()
        assert loss == 0 and not inputs[0].grad.any() and not inputs[1].grad.any()


def test_a_second_call_before_the_backward_of_the_first(programs):
    """Also twice the same backward: what a call returned is its own."""
    examples = [sample(10, width=8, seed=seed) for seed in range(2)]
    alone = [with_graphs(*example, "eaft(k=5)")[0] for example in examples]
    inputs = [[x.clone().requires_grad_() for x in example[:2]] for example in examples]
    results = [
        linear_loss(*leaves, example[2], "eaft(k=5)", context=CONTEXT, backend="graphs", return_stats=True)
        for leaves, example in zip(inputs, examples)
    ]
    tops = [stats.top_log_p(5).clone() for _, stats in results]
    for (loss, stats), leaves, (expected, truth), top in zip(results, inputs, alone, tops):
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert loss == expected and all(torch.equal(a, b) for a, b in zip(grads, truth))
        assert torch.equal(stats.top_log_p(5), top)
        again = torch.autograd.grad(loss, leaves)
        assert all(error(a, b) <= tolerance("fused gradient") for a, b in zip(again, truth))


def test_two_threads_do_not_share_a_workspace(monkeypatch, programs):
    """Between the rows that a call takes and its work on them, another thread makes a call of its own."""
    examples = [sample(30, width=8, seed=seed) for seed in range(2)]
    expected = [with_graphs(*example, "deft")[0] for example in examples]

    def run(example):
        hidden, weight, targets = example
        request = make_request(
            hidden, Head(weight), targets, deftune.objective("deft"), num_items=24, context=CONTEXT,
            wanted=(True, True, False),
        )  # fmt: skip
        return graphs.GraphsBackend.run(request)

    poll, other = graphs.Workspace.poll, threading.Thread(target=lambda: run(examples[1]))

    def interrupted(workspace):
        if threading.current_thread() is not other:
            other.start()
            other.join()
        return poll(workspace)

    monkeypatch.setattr(graphs.Workspace, "poll", interrupted)
    result = run(examples[0])
    assert len(graphs._workspaces) == 2 and torch.equal(result.loss, expected[0][0])
    for got, want in zip((result.gradients.hidden, result.gradients.weight), expected[0][1]):
        assert torch.equal(got, want)


def test_rows_left_over_in_a_workspace_are_not_looked_at(programs):
    """A longer call's NaN stands where a shorter one has no row: neither its flag nor its results see it."""
    hidden, weight, targets = sample(30, width=8)
    weight.requires_grad_()
    targets.clamp_(min=0)
    dirty = hidden.clone()
    dirty[25] = math.nan
    with pytest.raises(ValueError, match="25"):
        linear_loss(dirty, weight, targets, "deft", backend="graphs")
    (workspace,) = graphs._workspaces.values()
    assert workspace.facts[1] == 1
    few = torch.where(torch.arange(30) < 10, targets, IGNORE_INDEX)
    assert_both(with_graphs(hidden, weight.detach(), few, "deft"))
    assert graphs._workspaces.popitem()[1] is workspace and workspace.facts.tolist() == [10, 0]


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
            loss = linear_loss(hidden, weight, targets, objective, backend="graphs,triton")
            assert_near(loss, expected, "fused loss", condition=10)
    assert not programs()
    with pytest.raises(ValueError, match=r"backend='graphs' cannot be used here: .* is not one of deftune's own"):
        linear_loss(hidden, weight, targets, mine, backend="graphs")
    linear_loss(hidden, weight, targets, "deft", backend="graphs,triton")
    assert len(programs()) == 1


REFUSED = {
    "no gradients": ({"weight": False}, {}, "whose gradients are made in the same pass"),
    "none": ({}, {"reduction": "none"}, "whose gradients are made in the same pass"),
    "weights": ({}, {"weights": torch.ones(10)}, "no external weights"),
    "a bias": ({}, {"bias": torch.ones(37)}, "a head without bias"),
    "sparse": ({}, {"sparse": deftune.Sparse(0.5)}, "no sparse mode"),
    "a step": ({}, {"objective": "clip"}, "`clip` depends on the step"),
    "progress": ({}, {"objective": "deft | warmup(0.1)", "context": CONTEXT}, "depends on the step or on progress"),
}


@pytest.mark.parametrize(("trained", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_requests_that_a_graph_cannot_run_are_refused(programs, trained, options, text):
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_(trained.get("weight", True))
    with pytest.raises(ValueError, match=f"backend='graphs' cannot be used here: .*{text}"):
        linear_loss(hidden, weight, targets, backend="graphs", **options)
    assert not programs()


def test_the_gate_and_the_loss_of_each_token(monkeypatch, programs):
    """As the objective gives them for the statistics of the same pass; over several chunks, launched and replayed."""
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 16))
    hidden, weight, targets = sample(22, width=8)  # 17 of them supervised: a chunk of 16 rows and one of one
    for name, spec in product(("graphs", "triton", "torch"), ("deft", "eaft(k=5)")):
        for _ in range(3 if name == "graphs" else 1):
            request = make_request(
                hidden, Head(weight), targets, deftune.objective(spec), gates=True, wanted=(True, True, False)
            )
            result = BACKENDS[name].run(request)
            gate, value = deftune.objective(spec).evaluate(result.stats)
            # top_entropy of the Triton kernel is not that of the log-probabilities to the last bit
            assert_near(result.gate, gate, "log p", condition=10)
            assert_near(result.values, value, "log p", condition=10)


def test_a_capture_that_fails_is_given_up(monkeypatch, programs):
    """Half-way, with the program's tensors overwritten: the call is right all the same, and none is tried again."""
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    tried = []

    def fails(workspace, work):
        tried.append(work)
        for program in workspace.programs.values():  # what the first half writes; the second, v and v X
            (program.likeliest if len(tried) == 1 else program.vectors[2]).fill_(math.nan)
        (workspace.record if len(tried) == 1 else workspace.scaled).fill_(math.nan)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphs, "record", fails)
    losses = [linear_loss(hidden, weight, targets, "eaft(k=5)", backend="graphs").item() for _ in range(4)]
    # its first half, with the survey, and its second
    assert len(set(losses)) == 1 and len(tried) == 2 and math.isfinite(losses[0])


@pytest.mark.parametrize(
    "form", [torch.Tensor.int, lambda targets: torch.cat([targets[:1], targets])[1:]], ids=["int32", "odd"]
)
def test_targets_that_had_to_be_copied(monkeypatch, programs, form):
    """The survey runs twice when it is captured: its targets are still there."""
    hidden, weight, targets = sample(30, width=8)
    alive, ask, survey = [], graphs.Workspace.set_inputs, triton_rows.survey_told

    def asked(workspace, hidden, targets, earlier):
        asked.targets = weakref.ref(targets)
        return ask(workspace, hidden, targets, earlier)

    def surveyed(*given):
        alive.append(asked.targets() is not None)
        return survey(*given)

    monkeypatch.setattr(graphs.Workspace, "set_inputs", asked)
    monkeypatch.setattr(triton_rows, "survey_told", surveyed)
    for _ in range(3):
        assert_both(with_graphs(hidden, weight, form(targets), "deft"))
    assert len(alive) >= 3 and all(alive)


def test_a_program_that_was_half_made(monkeypatch, programs):
    """No memory for the last of its tensors: the next call makes them all."""
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(triton_rows, "aligned", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        with pytest.raises(torch.OutOfMemoryError):
            linear_loss(hidden, weight, targets, "eaft(k=5)", backend="graphs")
    _, stats = linear_loss(hidden, weight, targets, "eaft(k=5)", backend="graphs", return_stats=True)
    truth = token_stats(hidden.double() @ weight.detach().double().T, targets)
    assert_near(stats.top_log_p(5), truth.top_log_p(5), "log p", condition=10)


def test_a_survey_that_tells_nothing_is_not_waited_for(monkeypatch):
    """The host looks at what it is told while the queue is busy, and no longer."""
    place = graphs.WorkspaceKey(torch.device("cpu"), 0, 0, torch.float32, 64, 16, False)
    workspace, looked = graphs.Workspace(place, 16), []

    class Stream:
        def query(self) -> bool:
            looked.append(1)
            if len(looked) == 3 and told:
                workspace.report.copy_(torch.tensor(told))
            return len(looked) > 3

    monkeypatch.setattr(graphs, "POLLS", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    for told in ([5, 9, 0], []):
        workspace.reported[:] = graphs.NOT_WRITTEN
        looked.clear()
        if told:
            assert workspace.poll() == told and len(looked) == 3
        else:
            with pytest.raises(RuntimeError, match="without a report"):
                workspace.poll()


def test_few_workspaces_are_kept(programs):
    for width in (4, 8, 12):
        hidden, weight, targets = sample(10, width=width)
        assert_both(with_graphs(hidden, weight, targets, "deft"))
    assert [place.width for place in graphs._workspaces] == [8, 12]


def test_weights_that_move_leave_few_programs(monkeypatch, programs):
    """As under FSDP: another address at every step."""
    monkeypatch.setattr(graphs, "MOST_PROGRAMS", 3)
    hidden, weight, targets = sample(10, width=8)
    weights = [weight.clone().requires_grad_() for _ in range(5)]
    for moved in weights:
        linear_loss(hidden, moved, targets, "deft", backend="graphs").backward()
    assert len(programs()) == 3
    assert all(torch.equal(moved.grad, weights[0].grad) for moved in weights)


def test_float16_hidden_states_in_a_program(programs):
    """dX is float32 until the upstream, a loss scale, has come in."""
    hidden, weight, targets = sample(20, width=8)
    half = hidden.half()
    options = [None, None, None, "deft", "mean", None, 1.0, None, None, "graphs", torch.float32, [True, True, False]]
    loss, d_hidden, d_weight, _ = linear_loss_op(half, weight, targets, *options)
    assert d_hidden.dtype == torch.float32 and programs()
    assert_both([(loss, (d_hidden, d_weight)), with_graphs(half.float(), weight, targets, "deft")[1]])
