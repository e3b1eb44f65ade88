"""The sparse mode: what it keeps exact, what it replaces by a mean, and whether it says how much that matters."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import deftune
from deftune import IGNORE_INDEX, Sparse, linear_loss
from deftune.losses.sparse import Products, kept_of

SPECS = ["nll", "deft", "eaft(k=5)", "deft | mean_one"]


def sample(tokens=300, vocab_size=500, width=16, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = 1.5 * torch.randn(tokens, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=dtype)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


def gradients(hidden, weight, targets, spec, **options):
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = linear_loss(*inputs, targets, spec, **options)
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def written_out(hidden, weight, targets, spec, share, rows):
    """The definition, chunk by chunk, from the whole matrix of gate x error."""
    keep = targets != IGNORE_INDEX
    x, y = hidden[keep], targets[keep]
    stats = deftune.token_stats(x @ weight.T, y)
    gate = deftune.objective(spec).gate(stats) / len(y)
    dz = gate[:, None] * (x @ weight.T).softmax(1)
    dz.scatter_(1, y[:, None], 0.0)
    t = gate * -torch.expm1(stats.log_p)
    d_hidden, d_weight = -t[:, None] * weight[y], torch.zeros_like(weight).index_add_(0, y, -t[:, None] * x)
    for some in torch.arange(len(y)).split(rows):
        part, mass = dz[some], dz[some].sum(0)
        kept = torch.zeros(len(weight), dtype=torch.bool)
        kept[mass.topk(max(1, round(share * len(weight)))).indices] = True
        q = torch.where(kept, 0.0, mass)
        q = q / q.sum() if q.sum() else q
        about = torch.where(kept, part, part[:, ~kept].sum(1, keepdim=True) * q)
        d_hidden[some] += about @ weight
        d_weight += about.T @ x[some]
    return torch.zeros_like(hidden).index_copy_(0, keep.nonzero()[:, 0], d_hidden), d_weight


@pytest.mark.parametrize("rows", [1000, 64, 5])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.5, 0.998])
@pytest.mark.parametrize("spec", ["nll", "deft", "eaft(k=5)"])
def test_it_is_what_is_written(spec, share, rows):
    inputs = sample()
    _, d_hidden, d_weight = gradients(*inputs, spec, sparse=Sparse(share), chunk_rows=rows)
    expected = written_out(*inputs, spec, share, rows)
    assert_close(d_hidden, expected[0], rtol=1e-10, atol=1e-14)
    assert_close(d_weight, expected[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("rows", [None, 64])
@pytest.mark.parametrize("spec", SPECS)
def test_the_loss_its_statistics_and_the_sums_over_classes_are_exact(spec, rows):
    hidden, weight, targets = sample()
    exact = gradients(hidden, weight, targets, spec, chunk_rows=rows)
    loss, d_hidden, d_weight = gradients(hidden, weight, targets, spec, chunk_rows=rows, sparse=Sparse(0.05))
    assert torch.equal(loss, exact[0]) and not torch.equal(d_weight, exact[2])
    assert_close(d_weight.sum(0), exact[2].sum(0), rtol=0, atol=1e-15)
    assert not d_hidden[targets == IGNORE_INDEX].any()
    inputs = [hidden.requires_grad_(), weight]
    stats = [linear_loss(*inputs, targets, spec, sparse=how, return_stats=True)[1] for how in (None, Sparse(0.05))]
    assert torch.equal(stats[0].log_p, stats[1].log_p) and torch.equal(stats[0].entropy, stats[1].entropy)


@pytest.mark.parametrize("spec", SPECS)
def test_all_classes_are_all_of_it(spec):
    inputs, sparse = sample(), Sparse(1.0)
    for got, exact in zip(gradients(*inputs, spec, sparse=sparse), gradients(*inputs, spec)):
        assert_close(got, exact, rtol=1e-12, atol=1e-15)
    assert sparse.report() == (0.0, 0.0, 0.0) or max(sparse.report()) < 1e-12


@pytest.mark.parametrize("rows", [None, 100])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("spec", ["nll", "deft"])
def test_the_report_is_the_error(spec, share, rows):
    """The sample's errors are within a half of the true ones."""
    inputs, sparse = sample(2000, 3000), Sparse(share)
    exact = gradients(*inputs, spec, chunk_rows=rows)
    _, *got = gradients(*inputs, spec, chunk_rows=rows, sparse=sparse)
    report = sparse.report()
    for found, true, estimate in zip(got, exact[1:], report[1:]):
        error = float((found - true).norm() / true.norm())
        assert error / 1.5 <= estimate <= error * 1.5, (error, estimate)
    assert 0 < report.dropped < 1


def test_means_do_not_pile_up_with_the_chunks(monkeypatch):
    """Each of a chunk's has V numbers: of 48 chunks no more than 32 wait."""
    waiting = []
    add_means = Products.add_means

    def watched(self, to):
        waiting.append(len(self.means))
        add_means(self, to)

    monkeypatch.setattr(Products, "add_means", watched)
    gradients(*sample(), "deft", chunk_rows=5, sparse=Sparse(0.2))
    assert waiting == [32, 16]


def test_a_learned_distribution_needs_few_classes():
    """Rows that are sure of one of a few classes: a twentieth of them is exact within float32's rounding."""
    hidden, weight, targets = sample(400, 2000, dtype=torch.float32)
    weight[:60] *= 6
    sparse = Sparse(0.05)
    exact = gradients(hidden, weight, targets, "deft")
    got = gradients(hidden, weight, targets, "deft", sparse=sparse)
    error = float((got[2] - exact[2]).norm() / exact[2].norm())
    assert error < 1e-3 and sparse.report().dropped < 1e-3


@pytest.mark.parametrize(
    ("classes", "share", "kept"),
    [
        (4, 0.5, 2),
        (500, 0.0001, 1),
        (2000, 0.5, 1000),
        (2050, 0.5, 1088),
        (1100, 0.99, 1100),
        (151936, 0.05, 7616),
        (151936, 1.0, 151936),
    ],
)
def test_many_classes_are_kept_by_whole_64s(classes, share, kept):
    """A GEMM with 7597 columns of bfloat16 goes ten times slower than one with 7616."""
    assert kept_of(classes, share) == kept


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["frozen head", "frozen hidden"])
def test_only_what_is_wanted(trained):
    hidden, weight, targets = sample()
    inputs = [x.requires_grad_(want) for x, want in zip((hidden, weight), trained)]
    sparse = Sparse(0.2)
    linear_loss(*inputs, targets, "deft", sparse=sparse).backward()
    assert [x.grad is not None for x in inputs] == list(trained)
    report = sparse.report()
    assert [not math.isnan(error) for error in report[1:]] == list(trained)


def test_weights_scale_and_bias():
    """Negative and zero weights, a logit scale and a bias, whose gradient is exact."""
    hidden, weight, targets = sample()
    bias = torch.randn(500, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(300, dtype=torch.float64)
    weights[3] = 0
    options = {"bias": bias, "weights": weights, "logit_scale": 0.7}
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), bias]
    exact, full, some = (
        torch.autograd.grad(linear_loss(hidden, weight, targets, "deft", **options, sparse=how), inputs)
        for how in (None, Sparse(1.0), Sparse(0.3))
    )
    for a, b in zip(exact, full):
        assert_close(a, b, rtol=1e-10, atol=1e-14)
    assert_close(some[2], exact[2], rtol=1e-10, atol=1e-14)
    assert float((some[0] - exact[0]).norm() / exact[0].norm()) < 0.2


def test_a_sample_whose_gates_are_shut_says_nothing():
    """The rows that the error of d hidden is measured on are the first chunk's: no number is better than 0."""
    hidden, weight, targets = sample(40)
    targets[:] = targets.clamp(min=0)
    weights, sparse = (torch.arange(40) >= 10).double(), Sparse(0.2)
    gradients(hidden, weight, targets, "deft", weights=weights, chunk_rows=10, sparse=sparse)
    assert math.isnan(sparse.report().error_hidden) and sparse.report().error_weight > 0
    gradients(hidden, weight, targets, "deft", weights=torch.zeros(40), sparse=sparse)
    assert sparse.report().dropped == 0 and math.isnan(sparse.report().error_weight)


def test_nothing_supervised_and_nothing_reported():
    hidden, weight, targets = sample()
    sparse = Sparse()
    linear_loss(hidden.requires_grad_(), weight, targets, "deft", sparse=sparse)
    assert sparse.report().dropped > 0
    loss = linear_loss(hidden, weight, torch.full_like(targets, IGNORE_INDEX), "deft", sparse=sparse)
    assert loss == 0
    with pytest.raises(ValueError, match="nothing to report"):
        sparse.report()
    with pytest.raises(ValueError, match="nothing to report"):
        Sparse().report()


def test_under_torch_compile():
    hidden, weight, targets = sample(dtype=torch.float32)
    sparse = Sparse(0.3)

    def step(hidden):
        return linear_loss(hidden * 1.0, weight, targets, "deft", sparse=sparse)

    expected = step(hidden.clone().requires_grad_())
    assert_close(torch.compile(step, backend="aot_eager")(hidden.requires_grad_()), expected, rtol=1e-6, atol=0)
    assert sparse.report().dropped > 0


@pytest.mark.parametrize(("options", "message"), [
    ({"softcap": 5.0}, "cannot be combined with a softcap"),
    ({"reduction": "none"}, 'needs reduction="mean" or "sum"'),
    ({"sparse": 0.15}, r"a deftune.Sparse\(share=...\), got float"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(options, message):
    hidden, weight, targets = sample(10, 20)
    with pytest.raises(ValueError, match=message):
        linear_loss(hidden.requires_grad_(), weight, targets, "deft", **{"sparse": Sparse(0.5), **options})


@pytest.mark.parametrize("share", [0, -0.1, 1.5, math.nan])
def test_a_share_is_a_share(share):
    with pytest.raises(ValueError, match="share is that of the classes, above 0 and at most 1, got"):
        Sparse(share)
