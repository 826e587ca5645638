"""What of the paper appears in the laptop study: the README's tables, from the committed figures of a run.

    python benchmarks/findings.py                                          write them anew
    python benchmarks/findings.py runs/laptop/report/report.json           take over a run's figures first

Writes the part of README.md between its two marks, and the spread between seeds that a report of one seed quotes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "results" / "findings-laptop.json"
README = ROOT / "README.md"
TWINS = ROOT / "src" / "depthgrow" / "report" / "twins.yaml"
MARKS = ("<!-- tables: benchmarks/findings.py -->\n", "<!-- end of the tables -->\n")
KEPT = (
    "schema",
    "study",
    "seeds",
    "config",
    "sentence",
    "claims",
    "deltas",
    "interaction",
    "ce_per_phase",
    "baselines",
)


def taken(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a report: enough for the tables, a hundredth of its size."""
    arms = {arm: {k: values[k] for k in ("ce", "seeds", "paper_ce")} for arm, values in report["arms"].items()}
    teacher = {"held_out": report["teacher"]["held_out"], "fingerprint": report["teacher"]["fingerprint"]}
    return {name: report[name] for name in KEPT} | {
        "arms": arms,
        "teacher": teacher,
        "environment": report["environment"],
    }


def tables(found: dict[str, Any]) -> str:
    """The 2 x 2 across seeds and the claims, as Markdown."""

    def cell(contrast: dict[str, Any], form: str) -> str:
        across = contrast["across"]
        return f"{across['mean']:{form}} ± {(across['high'] - across['low']) / 2:.3f}"

    arms, seeds = found["arms"], len(found["seeds"])
    lines = [
        "| held-out CE, nats per token | pre-norm | post-norm | post − pre | the paper's |",
        "|---|---|---|---|---|",
    ]
    for curriculum in ("joint", "grow"):
        delta = found["deltas"][curriculum]
        ce = [cell(arms[f"{p}-{curriculum}"]["ce"], ".3f") for p in ("pre", "post")]
        lines.append(f"| {curriculum} | {ce[0]} | {ce[1]} | {cell(delta, '+.3f')} | {delta['paper']:+.4f} |")
    interaction = found["interaction"]
    lines.append(f"| interaction | | | {cell(interaction, '+.3f')} | {interaction['paper']:+.4f} |")
    lines += ["", "| what the paper finds | appears here | here | in the paper |", "|---|---|---|---|"]
    lines += [f"| {c['claim']} | {c['appears']} | {c['ours']} | {c['paper']} |" for c in found["claims"]]
    known = found["baselines"]
    span = f"{seeds} seeds ({found['seeds'][0]} to {found['seeds'][-1]}), ± is 95 % across them"
    counted = ", ".join(f"a {name} model {known[name]['ce']:.2f}" for name in ("unigram", "bigram"))
    facts = (
        f"`depthgrow study laptop --seeds {seeds}`: {span}. On the same text counting alone gives {counted}; the teacher has "
        f"{found['teacher']['held_out']['ce']:.2f}."
    )
    return "\n".join([*lines, "", facts]) + "\n"


def twins(found: dict[str, Any]) -> str:
    """The smallest and the largest range over seeds of an arm's held-out CE, as the package keeps them."""
    ranges = [max(arm["ce"]["values"]) - min(arm["ce"]["values"]) for arm in found["arms"].values()]
    comment = "\n".join(line for line in TWINS.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return f"{comment}\nlow: {min(ranges):.2f}\nhigh: {max(ranges):.2f}\n"


def written(readme: str, found: dict[str, Any]) -> str:
    """The README with the tables in their place."""
    before, rest = readme.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + tables(found) + MARKS[1] + after


def main() -> None:
    if len(sys.argv) > 1:
        report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        FIGURES.write_text(json.dumps(taken(report), indent=1) + "\n", encoding="utf-8")
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    README.write_text(written(README.read_text(encoding="utf-8"), found), encoding="utf-8")
    TWINS.write_text(twins(found), encoding="utf-8")
    print(tables(found))


if __name__ == "__main__":
    main()
