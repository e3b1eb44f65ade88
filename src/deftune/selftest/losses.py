"""Rows about losses and gradients, against float64 arithmetic written out here, independent of the package's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deftune.losses import linear_loss, raise_pending, token_loss, token_stats
from deftune.objectives import IGNORE_INDEX, OBJECTIVES, Context, Focus, Objective, TokenStats, Weight, step_stats
from deftune.objectives import objective as parse_objective
from deftune.objectives.base import deformed
from deftune.objectives.stats import from_columns
from deftune.selftest.check import Figure, NotHere, Size, counted, refusal

DEFAULTS = {"alpha": "alpha(0.7)", "top": "top(0.3)", "bottom": "bottom(0.3)"}  # of objectives that need a parameter
SPECS = [
    *(DEFAULTS.get(name, name) for name in OBJECTIVES),
    "deft | floor(0.1)", "deft | blend(nll, 0.25)", "deft | warmup(0.1)", "deft | eos(nll)", "deft | mean_one",
]  # fmt: skip
CONTEXT = Context(progress=0.15, special_ids=(1, 3))
VOCABULARIES = (1, 7, 1000, 32000, 49152, 128256, 151936, 152064, 262144)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sample(tokens: int, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits from flat to confident, rightly and wrongly; a target for each."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.2, 6.0, tokens)[:, None]
    logits = (torch.randn(tokens, vocab_size, generator=generator) * scale).to(dtype)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    return logits, torch.where(torch.arange(tokens) % 3 == 0, logits.argmax(-1), targets)


def gradient(logits: Tensor, targets: Tensor, spec: str | Objective, **options: object) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of `token_loss`."""
    logits = logits.detach().clone().requires_grad_()
    loss = token_loss(logits, targets, spec, **{"context": CONTEXT, **options})  # pyright: ignore
    loss.sum().backward()
    assert logits.grad is not None, "the loss is not connected to the logits"
    return loss.detach(), logits.grad


def error_vectors(logits: Tensor, targets: Tensor) -> Tensor:
    """P - onehot, in float64."""
    P = torch.softmax(logits.double(), -1)
    return P - torch.nn.functional.one_hot(targets, logits.shape[-1])


# --- 1, 2: values and gradients ---------------------------------------------------------------------------------------


def loss_and_gate(size: Size) -> Figure:
    """Row 1: float32 (a, log p) against float64; log p of float32 logits against float64 logits."""
    focuses = [0.0, 1e-30, 1 / 262144, 1 / 152064, 1e-3, 0.1, 0.5, 1 / 3, 1.0, *torch.linspace(0, 1, size(20, 200))]
    log_ps = [-1e-30, -1e-7, -1e-3, -0.1, -0.7, -3.0, -11.93, -40.0, -80.0, -1e3, -1e4]
    log_ps += [-(10 ** (-4 + 8 * i / size(20, 200))) for i in range(size(20, 200))]
    a = torch.tensor([float(f) for f in focuses], dtype=torch.float32)[:, None].expand(-1, len(log_ps)).reshape(-1)
    x = torch.tensor(log_ps, dtype=torch.float32)[None].expand(len(focuses), -1).reshape(-1)
    a64, x64 = a.double(), x.double()
    power = a64 * x64
    exact = torch.where(a64 == 0, -x64, -torch.expm1(power) / torch.where(a64 == 0, 1.0, a64))
    # where a log p is below float64's own rounding, expm1(a log p)/a is log p
    exact = torch.where(power.abs() < 1e-17, -x64, exact)
    tiny = torch.finfo(torch.float32).tiny
    normal = exact.abs() > tiny
    found_gate, found_loss = deformed(x, a)
    loss_off = ((found_loss.double() - exact).abs() / exact.abs())[normal].max().item()
    gate = power.exp()
    normal = gate > tiny
    gate_off = ((found_gate.double() - gate).abs() / gate / (1 + power.abs()))[normal].max().item()
    worst = 0.0
    for vocab_size in (7, 1000, *([152064] if size.full else [])):
        logits, targets = sample(64, vocab_size, dtype=torch.float32)
        got = token_stats(logits.to(device()), targets.to(device())).log_p.double().cpu()
        want = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]
        worst = max(worst, ((got - want).abs() / (1 + logits.abs().amax(-1))).max().item())
    text = f"loss {loss_off:.1e}, gate {gate_off:.1e} x (1 + |a log p|) over {len(a):,} points; log p {worst:.1e}"
    return Figure(text, loss_off <= 5e-7 and gate_off <= 5e-7 and worst <= 2.4e-7)


def gradients(size: Size) -> Figure:
    """Row 2: gate x error in closed form; difference quotients of the value with its focus or weight frozen."""
    logits, targets = sample(size(12, 60), 6)
    stats, closed, quotient, tried = token_stats(logits, targets), 0.0, 0.0, 0
    for spec in SPECS:
        objective = parse_objective(spec)
        _, got = gradient(logits, targets, objective, reduction="sum")
        want = objective.gate(stats, CONTEXT)[:, None] * error_vectors(logits, targets)
        closed = max(closed, (got - want).abs().max().item())
        value = frozen(objective, stats)
        if value is not None:
            tried += 1
            quotient = max(quotient, (got - differences(value, logits, targets)).abs().max().item())
    text = f"closed form {closed:.1e} ({len(SPECS)} objectives), difference quotient {quotient:.1e} ({tried})"
    return Figure(text, closed <= 1e-12 and quotient <= 1e-9 and tried >= 8)


def frozen(objective: Objective, stats: TokenStats) -> Callable[[Tensor], Tensor] | None:
    """The value as a function of log p alone, focus or weight as measured; None where it has another form."""
    if isinstance(objective, Focus):
        focus = objective.focus(stats, CONTEXT)
        return lambda log_p: torch.where(focus == 0, -log_p, -torch.expm1(focus * log_p) / focus.clamp(min=1e-300))
    if isinstance(objective, Weight):
        weight = objective.weight(stats, CONTEXT)
        return lambda log_p: -weight * log_p
    return None


def differences(value: Callable[[Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
    """d value / d logits by central differences of fourth order: error h^4, cancellation 1e-16 / h."""
    h, found = 1e-3, torch.empty_like(logits)

    def at(column: int, shift: float) -> Tensor:
        moved = logits.clone()
        moved[:, column] += shift
        return value(torch.log_softmax(moved, -1).gather(-1, targets[:, None])[:, 0])

    for i in range(logits.shape[-1]):
        far, near = at(i, 2 * h) - at(i, -2 * h), at(i, h) - at(i, -h)
        found[:, i] = (8 * near - far) / (12 * h)
    return found


# --- 3, 4, 8, 9: the fused loss ---------------------------------------------------------------------------------------


def head_sample(tokens: int, width: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab_size, width, generator=generator) * 2 / width**0.5
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


def by_hand(
    hidden: Tensor, weight: Tensor, targets: Tensor, spec: str, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, d hidden, d weight) of the whole head, in float64 and by matrix products written out."""
    hidden, weight = hidden.double(), weight.double()
    kept = targets != IGNORE_INDEX
    logits = hidden[kept] @ weight.T
    stats = token_stats(logits, targets[kept])
    objective = parse_objective(spec)
    values = objective.loss(stats, CONTEXT).double()
    scale = upstream.double()[kept] if upstream is not None else torch.full_like(values, 1 / len(values))
    rows = (scale * objective.gate(stats, CONTEXT))[:, None] * error_vectors(logits, targets[kept])
    d_hidden = torch.zeros_like(hidden)
    d_hidden[kept] = rows @ weight
    return (scale * values).sum(), d_hidden, rows.T @ hidden[kept]


def fused(
    hidden: Tensor, weight: Tensor, targets: Tensor, spec: str, upstream: Tensor | None = None, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from `linear_loss`, on the GPU where there is one."""
    where = device()
    h, w = (x.detach().to(where).clone().requires_grad_() for x in (hidden, weight))
    reduction = "mean" if upstream is None else "none"
    loss = linear_loss(h, w, targets.to(where), spec, context=CONTEXT, reduction=reduction, **options)  # pyright: ignore
    loss = loss if upstream is None else (loss * upstream.to(where)).sum()
    loss.backward()
    raise_pending()
    assert h.grad is not None and w.grad is not None
    return loss.detach().cpu(), h.grad.cpu(), w.grad.cpu()


def off(got: Tensor, want: Tensor) -> float:
    """Distance in norm, relative to the wanted norm."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def fused_loss(size: Size) -> Figure:
    """Row 3: float32 loss and gradients over vocabularies."""
    return _fused(size, random_upstream=False)


def per_token(size: Size) -> Figure:
    """Row 9: reduction="none" with a random upstream vector."""
    return _fused(size, random_upstream=True)


def _fused(size: Size, random_upstream: bool) -> Figure:
    loss_off, grad_off = 0.0, 0.0
    vocabularies = VOCABULARIES if size.full else VOCABULARIES[:4]
    for vocab_size in vocabularies:
        hidden, weight, targets = head_sample(40 if vocab_size < 2000 else 10, 64, vocab_size)
        upstream = torch.randn(len(targets), generator=torch.Generator().manual_seed(2)) if random_upstream else None
        for spec in ("nll", "deft", "clip"):
            want = by_hand(hidden, weight, targets, spec, upstream)
            got = fused(hidden, weight, targets, spec, upstream)
            loss_off = max(loss_off, abs(float(got[0]) - float(want[0])) / max(1.0, abs(float(want[0]))))
            if vocab_size > 1:  # with one class every gradient is 0
                grad_off = max(grad_off, off(got[1], want[1]), off(got[2], want[2]))
            elif got[1].any() or got[2].any():
                return Figure("V = 1 has a gradient", False)
    text = f"{device().type}: loss {loss_off:.1e}, gradient {grad_off:.1e} for V up to {max(vocabularies):,}"
    return Figure(text, loss_off <= 2e-6 and grad_off <= 1e-5)


def bfloat16(size: Size) -> Figure:
    """Row 4: bfloat16 gradients against torch's own; the head's does not degrade with the number of chunks."""
    if not torch.cuda.is_available():
        raise NotHere("needs a GPU")
    rows = size(1024, 4096)
    hidden, weight, targets = head_sample(rows, 256, size(8192, 32768))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    _, want_hidden, want_weight = by_hand(hidden, weight, targets, "nll")
    where = device()
    h, w = (x.to(where).clone().requires_grad_() for x in (hidden, weight))
    torch.nn.functional.cross_entropy((h @ w.T).float(), targets.to(where), ignore_index=IGNORE_INDEX).backward()
    assert h.grad is not None and w.grad is not None
    eager = off(h.grad.cpu(), want_hidden), off(w.grad.cpu(), want_weight)
    ulp, ours = 2**-8, list[tuple[float, float]]()
    for chunks in (1, 4, 16, 64, rows // 4):
        got = fused(hidden, weight, targets, "nll", chunk_rows=rows // chunks, backend="triton,torch")
        ours.append((off(got[1], want_hidden), off(got[2], want_weight)))
    worst = max(h for h, _ in ours), max(w for _, w in ours)
    flat = max(w for _, w in ours) / min(w for _, w in ours)
    text = (
        f"d hidden {worst[0]:.1e} (torch {eager[0]:.1e}), d head {worst[1]:.1e} (torch {eager[1]:.1e}); "
        f"1 to {rows // 4} chunks: x {flat:.2f}"
    )
    return Figure(text, worst[0] <= eager[0] + ulp and worst[1] <= eager[1] + ulp and flat <= 1.1)


def beyond_int32(size: Size) -> Figure:
    """Row 8: more than 2^31 logits in one call; rows on both sides of it equal the same rows in a call of their own."""
    if not torch.cuda.is_available():
        raise NotHere("needs a GPU")
    vocab_size = 131072
    rows = 2**31 // vocab_size + 256
    where = device()
    generator = torch.Generator(where).manual_seed(0)
    hidden = torch.randn(rows, 64, device=where, dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(vocab_size, 64, device=where, dtype=torch.bfloat16, generator=generator) / 8
    targets = torch.randint(vocab_size, (rows,), device=where, generator=generator)
    part = slice(rows - 512, rows)
    h = hidden.clone().requires_grad_()
    linear_loss(h, weight, targets, "deft", reduction="sum", chunk_rows=512, backend="triton,torch").backward()
    one = hidden[part].clone().requires_grad_()
    linear_loss(one, weight, targets[part], "deft", reduction="sum", chunk_rows=512, backend="triton,torch").backward()
    assert h.grad is not None and one.grad is not None
    same_fused = torch.equal(h.grad[part], one.grad)
    logits = (hidden @ weight.T).requires_grad_()
    token_loss(logits, targets, "deft", reduction="sum").backward()
    few = logits.detach()[part].clone().requires_grad_()
    token_loss(few, targets[part], "deft", reduction="sum").backward()
    assert logits.grad is not None and few.grad is not None
    same_tokens = torch.equal(logits.grad[part], few.grad)
    whole, some = token_stats(logits.detach(), targets), token_stats(few.detach(), targets[part])
    same_stats = torch.equal(whole.log_p[part], some.log_p) and torch.equal(whole.entropy[part], some.entropy)
    raise_pending()
    found = {"linear_loss": same_fused, "token_loss": same_tokens, "statistics": same_stats}
    text = ", ".join(f"{name} {'bit-equal' if equal else 'DIFFERS'}" for name, equal in found.items())
    return Figure(f"{rows:,} x {vocab_size:,} logits: {text}", all(found.values()))


# --- 5, 6, 7: the extremes --------------------------------------------------------------------------------------------


def confident(size: Size) -> Figure:
    """Row 5: the true class's gradient of a confident token, float32, beside torch's."""
    worst = 0.0
    for margin in (10.0, 20.0):
        for seed in range(size(20, 200)):
            logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed))
            logits[0, 7] = logits.amax() + margin
            target = torch.tensor([7])
            others = torch.cat([logits[0, :7], logits[0, 8:]]).double()
            want = -torch.sigmoid(torch.logsumexp(others, 0) - logits[0, 7].double()).item()  # -(1 - p)
            got = gradient(logits, target, "nll")[1][0, 7].item()
            plain = logits.clone().requires_grad_()
            torch.nn.functional.cross_entropy(plain, target).backward()
            assert plain.grad is not None
            theirs = abs(plain.grad[0, 7].item() / want - 1)
            worst = max(worst, abs(got / want - 1) / max(theirs, 2**-24))
    return Figure(f"at most {worst:.2g} x torch's error, margins +10 and +20", worst <= 1)


def extremes(size: Size) -> Figure:
    """Row 6: impossible tokens, offsets, masked columns, NaN."""
    misses: list[str] = []
    log_p = torch.tensor([0.0, -80.0, -1e4, -math.inf], dtype=torch.float32)
    top = torch.tensor([[0.0] + [-math.inf] * 19, [-1.0] * 20, [-3.0] * 20, [-2.0] * 20])
    stats = from_columns(
        log_p, torch.tensor([0.0, 1.0, 3.0, 5.0]), torch.tensor([0.0, -0.5, -2.0, -11.9]), vocab_size=152064,
        targets=torch.zeros(4, dtype=torch.long), top_log_p=top,
    )  # fmt: skip
    for spec in SPECS:
        objective = parse_objective(spec)
        gate, value = objective.gate(stats, CONTEXT), objective.loss(stats, CONTEXT)
        if not (gate.isfinite().all() and not value.isnan().any()):
            misses.append(f"{spec}: gate {gate.tolist()}, value {value.tolist()}")
        logits = torch.tensor([[0.0, -1e4, -80.0, -math.inf], [1e4, 0.0, 3.0, 1.0], [0.0, 30.0, -math.inf, 1.0]])
        _, grad = gradient(logits, torch.tensor([1, 2, 0]), objective)
        if not grad.isfinite().all():
            misses.append(f"{spec}: gradient {grad.tolist()}")
    steps = torch.randint(-4096, 4096, (32, 50), generator=torch.Generator().manual_seed(1))
    logits, targets = steps.float() / 1024, torch.arange(32) % 50
    worst = 0.0
    for spec in SPECS:
        plain, moved = gradient(logits, targets, spec), gradient(logits + 1e4, targets, spec)
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(plain, moved)))
    bad = torch.zeros(6, 9)
    bad[4, 2] = math.nan
    if "4" not in (text := refusal(lambda: token_loss(bad, torch.arange(6), "deft"))):
        misses.append(f"the token of a NaN logit is not named: {text or 'no error'}")
    text = f"{len(SPECS)} objectives: {len(misses)} misses; an offset of 1e4 moves {worst:.1e} at most; NaN named"
    return Figure(text, not misses and worst <= 1e-6, tuple(misses))


def nothing_supervised(size: Size) -> Figure:
    """Row 7: all ignored, T = 0, V = 1; an empty step."""
    misses: list[str] = []
    tried = 0
    for spec in SPECS:
        for shape in ((4, 9), (0, 9), (2, 0, 9), (5, 1)):
            tried += 2
            targets = torch.full(shape[:-1], IGNORE_INDEX)
            loss, grad = gradient(torch.randn(shape), targets, spec)
            if loss.item() != 0 or grad.any():
                misses.append(f"token_loss, {spec}, {shape}")
            hidden, weight, _ = head_sample(1, 8, shape[-1])
            hidden = hidden[:1].expand(*shape[:-1], 8).clone()
            found = fused(hidden, weight, targets, spec)
            if any(x.any() for x in found):
                misses.append(f"linear_loss, {spec}, {shape}")
        tried += 1
        loss, grad = gradient(torch.randn(3, 1), torch.zeros(3, dtype=torch.long), spec)  # one class: p = 1
        if loss.item() != 0 or grad.any():
            misses.append(f"one class, {spec}")
    if not refusal(lambda: step_stats("clip", [token_stats(torch.randn(2, 3), torch.full((2,), IGNORE_INDEX))])):
        misses.append("an empty step is no error")
    return counted("calls: loss 0, gradient exactly 0; an empty step is refused", tried, misses)


# --- 10, 11: the same again, in parts ---------------------------------------------------------------------------------


def kernels_again(size: Size) -> Figure:
    """Row 10, the kernels: ten calls, bitwise."""
    hidden, weight, targets = head_sample(200, 64, 5000)
    different = 0
    for spec in ("nll", "deft", "clip", "mile"):
        first = fused(hidden, weight, targets, spec)
        for _ in range(9):
            different += not all(torch.equal(a, b) for a, b in zip(first, fused(hidden, weight, targets, spec)))
    return Figure(f"10 calls of 4 objectives on {device().type}: {different} differ", different == 0)


def accumulation(size: Size) -> Figure:
    """Row 11: a step's gradient does not depend on its micro-batches; a part without its step is refused."""
    hidden, weight, targets = head_sample(32 * 6, 16, 50)
    hidden, targets = 3 * hidden.view(32, 6, 16), targets.view(32, 6)
    lengths = torch.arange(32) * 5 % 7  # ragged: 0 to 6 supervised tokens a row
    targets = targets.masked_fill(torch.arange(6) >= lengths[:, None], IGNORE_INDEX)
    count = int((targets != IGNORE_INDEX).sum())
    worst64, worst32 = 0.0, 0.0
    misses: list[str] = []
    for spec in SPECS:
        objective = parse_objective(spec)
        for dtype in (torch.float64, torch.float32):
            h, w = hidden.to(dtype), weight.to(dtype)
            whole, wanted = step_in_parts(h, w, targets, objective, 32, count)
            for rows in (16, 5, 1):
                loss, found = step_in_parts(h, w, targets, objective, rows, count)
                if dtype == torch.float64:
                    worst64 = max(worst64, ((found - wanted).abs().max() / wanted.abs().max()).item())
                else:
                    worst32 = max(worst32, abs(loss - whole) / max(1.0, whole))
        part = partial(token_loss, hidden[:9] @ weight.T, targets[:9], objective, num_items=count, context=CONTEXT)
        if objective.kind != "local" and not refusal(part):
            misses.append(f"{spec}: a part of the step is not refused")
    text = f"1x32, 2x16, 7x5, 32x1: float64 gradients {worst64:.1e}, float32 loss {worst32:.1e}"
    return Figure(text, worst64 <= 1e-12 and worst32 <= 1e-5 and not misses, tuple(misses))


def step_in_parts(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective, rows: int, count: int
) -> tuple[float, Tensor]:
    """(loss, gradient of the head) of an optimizer step, accumulated over micro-batches of ``rows`` rows."""
    head = weight.clone().requires_grad_()
    parts = [(hidden[i : i + rows], targets[i : i + rows]) for i in range(0, len(hidden), rows)]
    context = CONTEXT
    if objective.kind != "local":
        before = [token_stats(h @ weight.T, t) for h, t in parts]
        context = replace(CONTEXT, step=step_stats(objective, before, context=CONTEXT))
    total = 0.0
    for h, t in parts:
        loss = linear_loss(h, head, t, objective, num_items=count, context=context)
        loss.backward()
        total += loss.item()
    assert head.grad is not None
    return total, head.grad
