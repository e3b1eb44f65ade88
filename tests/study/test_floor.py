"""What a floor does: the closed forms against the real objectives' gradient flow, and their bounds."""

import math

import pytest
import torch
from benchmarks.study.floor import (
    DEFT_NOISE,
    FLOORS,
    conflict_shares,
    crossing,
    deft_gate,
    deft_time,
    floor_gate,
    floor_noise,
    floor_time,
    gate_time,
    gates,
    linear_time,
    main,
    nll_time,
    noise_probability,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import deftune
from deftune.tokens.table import token_schema

starts = st.floats(1e-6, 0.4)
floors = st.floats(0.01, 0.7)


def stepped(spec: str, start: float, step: float) -> float:
    """Time until p = 1/2 by small steps along the gradient of the objective itself, the last step in part."""
    logits = torch.tensor([[math.log(start) - math.log1p(-start), 0.0]], dtype=torch.float64)
    time = 0.0
    while True:
        leaf = logits.clone().requires_grad_()
        deftune.token_loss(leaf, torch.tensor([0]), spec, reduction="sum").backward()
        assert leaf.grad is not None
        moved = logits - step * leaf.grad
        before, after = (float(z[0, 0] - z[0, 1]) for z in (logits, moved))
        if after >= 0:
            return time + step * before / (before - after)
        logits, time = moved, time + step


@pytest.mark.parametrize("spec", ["nll", "linear", "deft", "deft | floor(0.2)", "deft | floor(0.05)"])
def test_the_times_are_those_of_the_objectives(spec):
    closed = {"nll": nll_time, "linear": linear_time, "deft": deft_time}
    start = 0.02
    expected = closed[spec](start) if spec in closed else floor_time(start, float(spec[13:-1]))
    step = expected / 400  # Euler's error is then at most 0.0034 of the time
    assert stepped(spec, start, step) == pytest.approx(expected, rel=5e-3)


@settings(max_examples=30, deadline=None)
@given(starts)
def test_closed_forms_agree_with_quadrature(start):
    assert gate_time(lambda p: 1.0, start) == pytest.approx(nll_time(start), rel=1e-9)
    assert gate_time(lambda p: p, start) == pytest.approx(linear_time(start), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(starts, floors)
def test_a_floor_lies_between_nll_and_nll_slowed_by_the_floor(start, floor):
    time = floor_time(start, floor)
    assert nll_time(start) * (1 - 1e-9) <= time <= nll_time(start) / floor * (1 + 1e-9)
    assert time <= deft_time(start) * (1 + 1e-9)
    assert time == pytest.approx(gate_time(lambda p: floor_gate(p, floor), start), rel=2e-3)  # with the kink unsplit


@settings(max_examples=30, deadline=None)
@given(starts)
def test_deft_is_as_slow_as_linear_up_to_a_constant(start):
    assert linear_time(start) / 1.69 <= deft_time(start) <= linear_time(start)
    assert start <= deft_gate(start) <= 1.69 * start


def test_deft_takes_one_over_p_and_a_floor_the_logarithm():
    assert 2e-6 * deft_time(1e-6) == pytest.approx(1, abs=1e-3)
    for floor in FLOORS:  # a thousand times less likely costs ln(1000) / (2 g) more
        more = floor_time(1e-6, floor) - floor_time(1e-3, floor)
        assert more == pytest.approx(math.log(1000) / (2 * floor), rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(floors)
def test_the_crossing_is_where_the_floor_takes_over(floor):
    at = crossing(floor)
    assert deft_gate(at) == pytest.approx(floor, rel=1e-9)
    assert floor_gate(at / 2, floor) == floor and floor_gate(0.5, floor) == deft_gate(0.5)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.01, 0.35))
def test_nll_learns_the_noise_deft_ignores_it_and_a_floor_keeps_a_part(noise):
    assert noise_probability(lambda p: 1.0, noise) == pytest.approx(noise, rel=1e-6)
    assert noise_probability(deft_gate, noise) == 0
    for floor in FLOORS:
        wrong = noise_probability(lambda p, g=floor: floor_gate(p, g), noise)
        assert 0 < wrong < noise
        if wrong < 0.02:
            assert wrong == pytest.approx(floor_noise(noise, floor), rel=0.1)


def test_deft_ignores_up_to_39_percent():
    assert pytest.approx(0.39, abs=1e-3) == DEFT_NOISE
    assert noise_probability(deft_gate, DEFT_NOISE - 0.002) == 0 < noise_probability(deft_gate, DEFT_NOISE + 0.002)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nll_time(0.0), "0 < start <= end < 1"),
        (lambda: crossing(0.9), "floor: above 0 and at most 0.707"),
        (lambda: noise_probability(deft_gate, 0.5), "noise: between 0 and 1/2"),
    ],
)
def test_arguments_out_of_range_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_shares_of_the_signal_come_from_the_table(tmp_path, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = token_schema(["nll", "deft"])
    p, concentration = [0.001, 0.5], [0.95, 0.5]
    columns = {"log_p": [math.log(x) for x in p], "concentration": concentration}
    for name, gate in (("nll", [1.0, 1.0]), ("deft", [x**c for x, c in zip(p, concentration)])):
        columns |= {f"gate:{name}": gate, f"signal:{name}": [g * (1 - x) for g, x in zip(gate, p)]}
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(2, f.type) for f in schema]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), tmp_path / "tokens.parquet")
    shares = conflict_shares(tmp_path / "tokens.parquet")
    assert shares["nll"] == pytest.approx((0.999 / 1.499, 1.0))
    assert shares["deft"][0] == pytest.approx(0.999 * 0.001**0.95 / (0.999 * 0.001**0.95 + 0.5**1.5), rel=1e-5)
    assert main([str(tmp_path / "floor.svg"), "--tokens", str(tmp_path / "tokens.parquet")]) == 0
    assert (tmp_path / "floor.svg").stat().st_size > 5000
    seen = capsys.readouterr().out
    assert all(f"`{name}`".replace("|", "\\|") in seen for name in gates()) and "| `deft` | 0.4% |" in seen
