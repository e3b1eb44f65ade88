"""Specs: what is written is what is meant, what is wrong is named, and nothing but ValueError ever comes out."""

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deftune
from battery import CASES, CONTEXT, HalfDeft, sample_logits
from deftune import MODIFIERS, OBJECTIVES, Objective, objective
from deftune.objectives import catalogue
from deftune.objectives.family import Alpha, Bottom, Cayley, CayleyReleased, Clip, Deft, Dft, Eaft, Mile, Top
from deftune.objectives.modifiers import Blend, Eos, Floor, MeanOne, Warmup

properties = settings(deadline=None, derandomize=True, max_examples=150, database=None)

# --- random trees -----------------------------------------------------------------------------------------------------

unit = st.floats(0, 1)
of = st.sampled_from(["nll", "linear"])
leaves = st.one_of(
    st.floats(0, 1e300).map(Alpha),
    st.sampled_from([Alpha(0.0), Alpha(0.5), Alpha(1.0), Dft(), Deft(), CayleyReleased()]),
    st.floats(-1, 1e20, exclude_min=True).map(Cayley),
    st.builds(Eaft, st.integers(2, 10**6), st.floats(1e-9, 100), st.sampled_from(["lnk", "3", "none"])),
    st.builds(Eaft, power=st.floats(1e-9, 100), norm=st.just("full")),
    st.builds(Top, unit, of),
    st.builds(Bottom, unit, of),
    st.floats(-100, 100).map(Mile),
    st.floats(0, 1e6, exclude_min=True).map(Clip),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Floor, inner, st.floats(0, 1e6)),
        st.builds(Eos, inner, inner),
        st.builds(Blend, inner, inner, unit),
        st.builds(Warmup, inner, st.floats(0, 0.5, exclude_min=True)),
    ),
    max_leaves=6,
)
specs = st.one_of(trees, trees.map(MeanOne))


@properties
@given(specs)
def test_str_is_a_spec_that_parses_to_the_same_objective(tree):
    assert objective(str(tree)) == tree


@properties
@given(specs, st.sampled_from(["", " ", "  ", "\t", "\n"]))
def test_space_means_nothing(tree, space):
    text = re.sub(r" ?([(),=|]) ?", lambda sign: f"{space}{sign[1]}{space}", str(tree))
    assert objective(f"{space}{text}{space}") == tree


@pytest.mark.parametrize("case", [case for case in CASES if case.make is None], ids=str)
def test_every_spec_of_the_battery_round_trips(case):
    parsed = objective(case.spec)
    assert objective(str(parsed)) == parsed and str(objective(str(parsed))) == str(parsed)


def test_random_trees_reach_the_whole_catalogue():
    made = {Alpha, Dft, Cayley, CayleyReleased, Deft, Eaft, Top, Bottom, Mile, Clip, Floor, Eos, Blend, Warmup, MeanOne}
    classes = {factory for factory in (OBJECTIVES | MODIFIERS).values() if isinstance(factory, type)}
    named_alphas = {name for name, factory in OBJECTIVES.items() if not isinstance(factory, type)}
    assert classes == made and named_alphas == {"nll", "linear", "hellinger"}


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("nll", "nll"),
        ("alpha(0)", "nll"),
        ("alpha(a=1.0)", "linear"),
        ("alpha(5e-1)", "hellinger"),
        ("alpha(.25)", "alpha(0.25)"),
        ("cayley(kappa=1)", "cayley"),
        ("cayley(2)", "cayley(kappa=2)"),
        ("cayley()", "cayley"),
        ("eaft(20, 1, lnk)", "eaft"),
        ("eaft(norm=3)", "eaft(norm=3)"),
        ("top(0.1, of=nll)", "top(0.1)"),
        ("top(0.1, linear)", "top(0.1, of=linear)"),
        ("deft|eos( nll )|mean_one", "deft | eos(nll) | mean_one"),
        ("deft | blend(o=linear | floor(0.1), w=0.5)", "deft | blend(linear | floor(0.1), 0.5)"),
    ],
)
def test_canonical_form(text, canonical):
    assert str(objective(text)) == canonical


def test_an_objective_is_its_own_spec():
    deft = objective("deft")
    assert objective(deft) is deft


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("defft", r"unknown objective 'defft'\. Did you mean 'deft'\? Known: nll, linear, "),
        ("DEFT", r"unknown objective 'DEFT'\. Did you mean 'deft'\?"),
        ("caley", r"unknown objective 'caley'\. Did you mean 'cayley'\?"),
        ("zzz", r"unknown objective 'zzz'\. Known: nll"),
        ("deft | flor(0.1)", r"unknown modifier 'flor'\. Did you mean 'floor'\? Known: floor, eos"),
        ("deft | meanone", r"unknown modifier 'meanone'\. Did you mean 'mean_one'\?"),
        ("deft | nll", r"'nll' is an objective, not a modifier.*blend\(nll, 0\.5\)"),
        ("floor(0.1)", r"'floor' is a modifier and needs an objective before it: 'deft \| floor\.\.\.'"),
        ("cayley(kapa=1)", r"unknown parameter of cayley 'kapa'\. Did you mean 'kappa'\?"),
        ("cayley(1, 2)", r"cayley: 2 values given, it takes kappa"),
        ("deft(1)", r"deft: 1 value given, it takes no values"),
        ("cayley(1, kappa=2)", r"cayley: kappa is given twice"),
        ("cayley(kappa=1, kappa=2)", r"column \d+: cayley: kappa is given twice"),
        ("eaft(k=3, 2)", r"eaft: a value without a name after one with a name"),
        ("alpha", r"alpha: a is missing; write e\.g\. alpha\(a=\.\.\.\)"),
        ("deft | floor", r"floor: g is missing"),
        ("deft | blend(nll)", r"blend: w is missing"),
        ("alpha(x)", r"alpha: a is a number, got 'x'"),
        ("eaft(k=2.5)", r"eaft: k is a whole number, got 2\.5"),
        ("eaft(norm=lnc)", r"eaft: norm is one of lnk, 3, none, full, got 'lnc'\. Did you mean 'lnk'\?"),
        ("deft | eos(3)", r"eos: o is an objective, got the number 3"),
        ("alpha(-1)", r"alpha: the focus a must be finite and >= 0.*got -1\.0; use nll"),
        ("alpha(1e999)", r"alpha: .*got inf"),
        ("cayley(kappa=-2)", r"cayley: kappa must be > -1.*got -2\.0; the paper's choice is kappa=1"),
        ("cayley(kappa=-1)", r"cayley: kappa must be > -1"),
        ("eaft(k=1)", r"eaft: k must be at least 2.*got 1"),
        ("eaft(power=0)", r"eaft: power must be > 0 and <= 100, got 0\.0"),
        ("eaft(norm=none, power=1000)", r"eaft: power must be > 0 and <= 100, got 1000\.0"),
        ("eaft(k=5, norm=full)", r"eaft: norm=full has no k, got k=5; leave k out"),
        ("top(1.5)", r"top: the threshold t is a probability in \[0, 1\], got 1\.5"),
        ("bottom(-0.1)", r"bottom: the threshold t"),
        ("top(0.5, of=deft)", r"top: of is one of nll, linear, got 'deft'"),
        ("mile(1e999)", r"mile: gamma must be from -100 to 100, got inf"),
        ("mile(-2000)", r"mile: gamma must be from -100 to 100, got -2000\.0"),
        ("clip(0)", r"clip: k must be > 0, got 0\.0"),
        ("deft | floor(-1)", r"floor: g must be finite and >= 0, got -1\.0"),
        ("deft | blend(nll, 2)", r"blend: the share w.*got 2\.0"),
        ("deft | warmup(0.6)", r"warmup: f is in \(0, 1/2\].*got 0\.6"),
        ("deft | warmup(0)", r"warmup: f is in"),
        ("deft | mean_one | floor(0.1)", r"floor: mean_one must come last"),
        ("deft | eos(nll | mean_one)", r"eos: mean_one must come last"),
        ("deft | mean_one | mean_one", r"mean_one: mean_one must come last"),
        ("", r"objective spec is empty; write e\.g\. 'deft'"),
        ("  \t", r"objective spec is empty"),
        ("deft |", r"column 7: expected a name, found the end"),
        ("| deft", r"column 1: expected a name, found '\|'"),
        ("alpha(0.5", r"column 10: expected ',', found the end"),
        ("alpha(0.5))", r"column 11: unexpected '\)'"),
        ("deft deft", r"column 6: unexpected 'deft'"),
        ("deft; rm", r"column 5: unexpected ';'"),
        ("0.5", r"column 1: expected a name, found '0\.5'"),
        ("alpha(nan)", r"alpha: a is a number, got 'nan'"),
        ("a" * 1001, r"objective spec of 1001 characters: at most 1000"),
    ],
)
def test_errors_name_the_offender(spec, text):
    with pytest.raises(ValueError, match=text):
        objective(spec)


@pytest.mark.parametrize("spec", [None, 3, ["deft"], b"deft", Deft])
def test_only_text_or_an_objective_is_a_spec(spec):
    with pytest.raises(ValueError, match=r"an objective is a spec such as 'deft' or an Objective, got \w+"):
        objective(spec)


# --- fuzz -------------------------------------------------------------------------------------------------------------


def accepts_or_refuses(text: str) -> None:
    try:
        parsed = objective(text)
    except ValueError as error:
        assert str(error).strip()
    else:
        assert isinstance(parsed, Objective) and str(parsed)


@settings(properties, max_examples=300)
@given(st.text(max_size=60))
def test_any_text_parses_or_is_a_value_error(text):
    accepts_or_refuses(text)


words = [
    *OBJECTIVES,
    *MODIFIERS,
    "(",
    ")",
    ",",
    "=",
    "|",
    " ",
    "0",
    "1",
    "-1",
    ".5",
    "1e999",
    "9" * 300,
    "k",
    "norm",
    "٣",
]


@settings(properties, max_examples=500)
@given(st.lists(st.sampled_from(words), max_size=25))
def test_any_sequence_of_tokens_parses_or_is_a_value_error(tokens):
    accepts_or_refuses("".join(tokens))


@properties
@given(specs.map(str), st.integers(0, 200), st.text("()|,=. 019abkdeft-_é\x00", max_size=3))
def test_a_damaged_spec_parses_or_is_a_value_error(spec, at, noise):
    accepts_or_refuses(spec[: at % (len(spec) + 1)] + noise + spec[at % (len(spec) + 1) :])


@pytest.mark.parametrize(
    "spec",
    [
        "a(" * 499,
        "nll | blend(" * 80,
        "(" * 1000,
        "nll" + "|eos(nll" * 110 + ")" * 110,
        "deft" + "|floor(1)" * 110,
        "alpha(" + "9" * 990 + ")",
        "eaft(" + "9" * 990 + ")",
        "=" * 1000,
        "nll|" * 250,
        "deft" * 10**6,
    ],
    ids=lambda spec: f"{spec[:12]}..{len(spec)}",
)
def test_long_and_deep_specs_parse_or_are_a_value_error(spec):
    accepts_or_refuses(spec)


def test_the_canonical_form_of_the_longest_specs_parses_too():
    parsed = objective("deft" + "|floor(1)" * 110)
    assert objective(str(parsed)) == parsed


# --- a user's own -----------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """A place for one's own objectives; the catalogue is as before afterwards."""
    tables = OBJECTIVES, MODIFIERS, catalogue.ABOUT
    before = [dict(table) for table in tables]
    yield OBJECTIVES
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)


def test_own_objective_by_name(registered):
    registered["halfdeft"] = HalfDeft
    assert objective("halfdeft") == HalfDeft() and str(HalfDeft()) == "halfdeft"
    assert objective("halfdeft(shift=0.5)") == HalfDeft(0.5)
    assert objective(str(HalfDeft(0.5))) == HalfDeft(0.5)
    logits, targets = sample_logits(9, 5)
    spec = "nll | blend(halfdeft(0), 0.5) | eos(halfdeft) | mean_one"
    assert str(objective(spec)) == "nll | blend(halfdeft(shift=0), 0.5) | eos(halfdeft) | mean_one"
    assert deftune.token_loss(logits, targets, spec, context=CONTEXT).isfinite()
    with pytest.raises(ValueError, match=r"Did you mean 'halfdeft'\?"):
        objective("half_deft")


def test_register_tells_objectives_from_modifiers_and_refuses_a_taken_name(registered):
    @dataclass(frozen=True)
    class Doubled(deftune.Modifier):
        name: ClassVar[str] = "doubled"

        def gate(self, stats, context=None):
            return 2 * self.inner.gate(stats, context)

        def loss(self, stats, context=None):
            return 2 * self.inner.loss(stats, context)

    assert deftune.register("halfdeft")(HalfDeft) is HalfDeft and OBJECTIVES["halfdeft"] is HalfDeft
    assert deftune.register("doubled")(Doubled) is Doubled and MODIFIERS["doubled"] is Doubled
    assert "doubled" not in OBJECTIVES

    @deftune.register("quarter-deft")
    @dataclass(frozen=True)
    class Quarter(deftune.Focus):
        scale: float = 0.25

    assert str(objective("quarter-deft(scale=0.5) | doubled")) == "quarter-deft(scale=0.5) | doubled"
    with pytest.raises(ValueError, match="the class's own name is 'halfdeft', not 'other'"):
        deftune.register("other")(HalfDeft)
    for name, why in (("deft", "is in the catalogue already"), ("floor", "is in the catalogue"), ("2x", "is no name")):
        with pytest.raises(ValueError, match=why):
            deftune.register(name)


def test_own_objective_with_a_choice_and_a_word(registered):
    @dataclass(frozen=True)
    class Mine(Alpha):
        name = "mine"
        mode: Literal["soft", "hard"] = "soft"
        label: str = "none"

        def __str__(self):
            return f"mine({self.a}, {self.mode}, {self.label})"

    registered["mine"] = Mine
    assert objective("mine(0.5, hard, label=x)") == Mine(0.5, "hard", "x")
    with pytest.raises(ValueError, match=r"mine: mode is one of soft, hard, got 'hart'\. Did you mean 'hard'\?"):
        objective("mine(0.5, hart)")


@pytest.mark.parametrize("factory", [lambda: Alpha(0.3), partial(Alpha, 0.3), partial(Alpha, a=0.3)])
def test_any_callable_is_a_factory(registered, factory):
    registered["soft"] = factory
    assert objective("soft") == Alpha(0.3)


def test_a_name_with_another_meaning_is_read_anew(registered):
    """Specs are remembered, with the catalogue that they were read with."""
    for a in (0.3, 0.4):
        registered["soft"] = partial(Alpha, a)
        assert objective("soft") == objective("soft") == Alpha(a)
    del registered["soft"]
    with pytest.raises(ValueError, match="soft"):
        objective("soft")


def test_a_meaning_that_changed_while_it_was_read_is_not_remembered(registered):
    """As by another thread."""

    def slow() -> Objective:
        registered["soft"] = partial(Alpha, 0.9)
        objective("nll")
        return Alpha(0.1)

    registered["soft"] = slow
    assert objective("soft") == Alpha(0.1)
    assert objective("soft") == Alpha(0.9)


def test_a_type_no_spec_can_express_is_named(registered):
    def tensors(x: torch.Tensor) -> Objective:
        return Alpha(0.0)

    registered["tensors"] = tensors
    with pytest.raises(ValueError, match=r"tensors: x has the type .*Tensor.*build the objective in Python"):
        objective("tensors(3)")


def test_the_table_has_the_rows_that_were_registered():
    assert {"nll", "deft", "floor", "mean_one"} <= catalogue.ABOUT.keys()
    assert all(isinstance(row, catalogue.About) for row in catalogue.ABOUT.values())


def test_specs_nest_thirty_levels_and_no_more():
    def nested(levels: int) -> str:
        return "nll | blend(" * levels + "deft" + ", 0.5)" * levels

    assert str(objective(nested(30))) == nested(30)
    for spec in (nested(31), f"nll | floor(0.1) | blend({nested(30)}, 0.5)"):  # a closed bracket is no level
        with pytest.raises(ValueError, match="nested deeper than 30 levels"):
            objective(spec)


def test_a_changed_modifier_is_not_taken_from_the_cache(monkeypatch):
    for g in (0.1, 0.2):
        monkeypatch.setitem(MODIFIERS, "lift", partial(Floor, g=g))
        assert objective("deft | lift") == Floor(Deft(), g)


def test_a_name_without_its_value_at_the_end_is_named():
    with pytest.raises(ValueError, match=r"column 9: expected a name, found the end"):
        objective("alpha(a=")


def test_a_spec_of_a_thousand_characters_is_read():
    spec = f"alpha(0.{'0' * 991})"
    assert len(spec) == 1000 and objective(f" {spec} ") == Alpha(0.0)
    with pytest.raises(ValueError, match="objective spec of 1001 characters: at most 1000 are read"):
        objective(spec.replace("0)", "00)"))
