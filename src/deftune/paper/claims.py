"""What the paper's prose says about its results, each sentence with the code that checks it.

A claim is quoted, read as something that numbers can decide (its `reading`), and checked by a function of a `Board`:
scores by setting, case and objective. The paper's own tables are one board (`PaperBoard`), a comparison of ours is
another, so the same function gives both verdicts. A board without the settings a claim is about gives None: not
measured.

The readings are ours (`deftune.paper.checks` says how words are read). The paper prints no seeds, so a verdict on its
numbers says nothing about chance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from itertools import product

from deftune.paper.board import BASELINES, OURS, REGIMES, Board, PaperBoard
from deftune.paper.checks import (
    Check,
    a_figure,
    best_overall,
    comparable,
    consistently,
    focus_while_training,
    lowest,
    mixed_gains,
    mostly,
    multi_epoch_gains,
    nearly_all_domains,
    small_differences,
    widening_gaps,
)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the check that decides whether its numbers support it."""

    name: str
    where: str
    quote: str
    reading: str
    rests_on: str
    check: Check


# --- the ledger -------------------------------------------------------------------------------------------------------

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "all-regimes", "Introduction",
        "both the Cayley Transform and DEFT achieve superior overall performance across all three regimes",
        "in each regime the mean over models of each is above that of -logp, -p and EAFT",
        "Tables 1, 2 (Avg), 3 (Jaro-Winkler)",
        best_overall(REGIMES, OURS),
    ),
    Claim(
        "nearly-all-domains", "Introduction",
        "DEFT consistently outperforms the standard NLL objective across nearly all domains, showing particularly "
        "significant margins in the Model-Strong and Model-Weak regions",
        "ahead in more than 80% of models and tables; mean margins larger in strong and weak than in intermediate",
        "Tables 1, 2, 5 (Avg), 3 (Jaro-Winkler), 4 (Total-Avg)",
        nearly_all_domains,
    ),
    Claim(
        "robust-gains", "Introduction, contributions",
        "consistent and robust gains over strong baselines across the model capability spectrum",
        "DEFT above -logp, -p and EAFT on every model of the three regimes",
        "Tables 1, 2 (Avg), 3 (Jaro-Winkler)",
        consistently(REGIMES, [("deft", rival) for rival in BASELINES]),
    ),
    Claim(
        "forgetting-grows", "The Dual Nature of Low Probability",
        "the proportion of forgotten tokens increases from steps 0-10 to 0-100",
        "needs token tables of three checkpoints of an NLL run", "Figure on learning conflicts",
        a_figure,
    ),
    Claim(
        "strong-linear", "Table 1, caption",
        "-p generally yield superior performance",
        "-p above -logp on most models", "Table 1 (Avg)",
        mostly(("strong",), [("linear", "nll")]),
    ),
    Claim(
        "strong-comparable", "Table 1, caption",
        "Cayley-Trans and DEFT achieve comparable results",
        "to -p: within twice the standard error of the difference", "Table 1",
        comparable(("strong",), [("cayley", "linear"), ("deft", "linear")]),
    ),
    Claim(
        "strong-above-nll", "Main Results, Model-Strong",
        "DEFT, -p, and Cayley-Trans consistently outperform the standard -logp objective",
        "each above -logp on every model", "Table 1 (Avg)",
        consistently(("strong",), [("deft", "nll"), ("linear", "nll"), ("cayley", "nll")]),
    ),
    Claim(
        "strong-eaft", "Main Results, Model-Strong",
        "EAFT [...] resulting in performance comparable to -logp",
        "within twice the standard error of the difference", "Table 1",
        comparable(("strong",), [("eaft", "nll")]),
    ),
    Claim(
        "multi-epoch", "Main Results, Model-Strong",
        "Cayley-Trans and DEFT achieve average performance improvements of 3.62 and 1.46, respectively, compared to "
        "NLL",
        "the mean over the four epochs of the difference of averages", "Table 6 (Avg)",
        multi_epoch_gains,
    ),
    Claim(
        "multi-epoch-order", "Table 6, caption",
        "Cayley-Trans and DEFT consistently outperform both -log p and -p across all epochs",
        "both above both in every epoch", "Table 6 (Avg)",
        consistently(("epochs",), list(product(OURS, ("nll", "linear")))),
    ),
    Claim(
        "intermediate-comparable", "Table 2, caption",
        "-log p (comprehensive coverage) and -p (signal sharpening) yield comparable performance",
        "within twice the standard error of the difference", "Table 2",
        comparable(("intermediate",), [("linear", "nll")]),
    ),
    Claim(
        "intermediate-above-linear", "Table 2, caption; Main Results, Model-Intermediate",
        "DEFT consistently outperforms -p across all cases in this region",
        "DEFT's average above -p's on every model", "Table 2 (Avg)",
        consistently(("intermediate",), [("deft", "linear")]),
    ),
    Claim(
        "intermediate-above-nll", "Table 2, caption",
        "DEFT [...] exceeds -log p in most cases",
        "DEFT's average above -logp's on more than half of the models", "Table 2 (Avg)",
        mostly(("intermediate",), [("deft", "nll")]),
    ),
    Claim(
        "intermediate-small", "Main Results, Model-Intermediate",
        "the performance differences among loss functions are relatively small",
        "best minus worst average is smaller on every model than on any of the strong regime", "Tables 1, 2 (Avg)",
        small_differences,
    ),
    Claim(
        "intermediate-math-region", "Main Results, Model-Intermediate",
        "-p achieves performance comparable to DEFT in the math region",
        "within twice the standard error of the difference", "Table 1",
        comparable(("strong",), [("linear", "deft")]),
    ),
    Claim(
        "weak-gaps", "Main Results, Model-Weak",
        "the performance gaps among different objectives widen substantially",
        "best minus worst, mean over models, larger than in the other two regimes", "Tables 1, 2, 3",
        widening_gaps,
    ),
    Claim(
        "weak-above-linear", "Main Results, Model-Weak",
        "DEFT significantly outperforms the -p objective",
        "by more than one point on every model", "Table 3 (Jaro-Winkler)",
        consistently(("weak",), [("deft", "linear")], margin=1.0),
    ),
    Claim(
        "weak-above-nll", "Main Results, Model-Weak",
        "DEFT [...] also achieves notable improvements over the -logp baseline",
        "by more than one point on every model", "Table 3 (Jaro-Winkler)",
        consistently(("weak",), [("deft", "nll")], margin=1.0),
    ),
    Claim(
        "weak-linear-degrades", "Main Results, Model-Weak",
        "the -p objective exhibits severe performance degradation in this regime",
        "the untuned model above -p by more than one point on every model", "Table 3 (Jaro-Winkler)",
        consistently(("weak",), [("base", "linear")], margin=1.0),
    ),
    Claim(
        "weak-overcome", "Main Results, Model-Weak",
        "DEFT and Cayley-Trans [...] effectively overcomes this limitation",
        "both above the untuned model on every model", "Table 3 (Jaro-Winkler)",
        consistently(("weak",), [("deft", "base"), ("cayley", "base")]),
    ),
    Claim(
        "weak-overall", "Table 3, caption",
        "DEFT achieves superior overall performance",
        "the mean over models is above every other tuned objective's, in both metrics", "Table 3",
        best_overall(("weak", "weak exact"), ("deft",), ("nll", "linear", "eaft", "cayley")),
    ),
    Claim(
        "mixed-nll-maths", "Main Results, Mixed",
        "-logp falters on reasoning tasks",
        "-logp has the lowest MATH-Avg of the tuned", "Table 4 (MATH-Avg)",
        lowest("mixed maths", "nll"),
    ),
    Claim(
        "mixed-linear-general", "Main Results, Mixed",
        "-p sacrifices general capability",
        "-p has the lowest General-Avg of the tuned", "Table 4 (General-Avg)",
        lowest("mixed general", "linear"),
    ),
    Claim(
        "mixed-best", "Main Results, Mixed",
        "DEFT secures the highest score on General tasks and dominates the overall average",
        "above every other tuned objective in General-Avg and Total-Avg", "Table 4",
        best_overall(("mixed general", "mixed"), ("deft",), ("nll", "linear", "eaft", "cayley")),
    ),
    Claim(
        "mixed-gains", "Main Results, Mixed",
        "substantial gains over -logp (+8.0%) and -p (+3.5%)",
        "relative gain in Total-Avg", "Table 4 (Total-Avg)",
        mixed_gains,
    ),
    Claim(
        "gradient-shares", "Mechanism Analysis",
        "Under NLL, gradients are dominated by low-probability long-tail tokens",
        "needs token tables", "Figure on token-level gradients",
        a_figure,
    ),
    Claim(
        "tail-and-head", "Mechanism Analysis",
        "DEFT [...] retaining the strict noise resistance of -p suppressing (p < 10^-3) while aggressively sharpening "
        "high-confidence predictions (p > 0.5)",
        "needs token tables of tuned models", "Figures on token probabilities",
        a_figure,
    ),
    Claim(
        "focus-trajectory", "Mechanism Analysis",
        "a initializes at a high value of 0.65, rapidly ascends to 0.75 within the first 4 steps, and eventually "
        "stabilizes near 0.95 [...] starting a of 0.04, which gradually climbs to 0.45",
        "on another model: the focus rises in both regimes and starts higher in the strong one",
        "Figure on the trust gate in training",
        focus_while_training,
    ),
    Claim(
        "ood", "Generalization",
        "Cayley-Trans and DEFT demonstrate superior cross-domain generalization",
        "both above -logp, -p and EAFT", "Table 5 (Avg)",
        best_overall(("ood",), OURS),
    ),
)  # fmt: skip


def study_ledger() -> dict[str, dict[str, str]]:
    """By claim, what the study's committed cells say; `python -m benchmarks.study report` writes the file."""
    return json.loads(resources.files("deftune.paper").joinpath("ledger.json").read_text(encoding="utf-8"))


def claim_records(ours: Board | None = None) -> list[dict[str, str]]:
    """The ledger, with the verdict of a comparison, or without one the study's: "" is not measured."""
    paper, study = PaperBoard(), study_ledger()
    unmeasured = {"verdict": "", "because": "", "best": "", "differs": ""}
    records: list[dict[str, str]] = []
    for claim in CLAIMS:
        printed = claim.check(paper)
        assert printed is not None  # the paper's board has every setting
        if ours is None:
            mine = study[claim.name]
        elif (found := claim.check(ours)) is not None:
            mine = unmeasured | {"verdict": found.verdict, "because": found.because}
        else:
            mine = unmeasured
        records.append({
            "name": claim.name, "where": claim.where, "quote": claim.quote, "reading": claim.reading,
            "rests_on": claim.rests_on, "paper": printed.verdict, "paper_because": printed.because,
            "ours": mine["verdict"], "ours_because": mine["because"], "ours_best": mine["best"],
            "ours_differs": mine["differs"],
        })  # fmt: skip
    return records
