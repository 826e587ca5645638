"""What a study says in words: its headline, and which of the paper's findings appear in it.

Three rules hold for both. Placements are compared across seeds: one seed compares two trained models, and models that differ
only in their seed end further apart than an interval over documents tells. Nothing rests on an arm that has hardly trained,
which is one whose held-out CE is not at least ``LEARNED`` nats below the unigram model's. A trial (``verdict: false`` in its
config) concludes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthgrow.files import read_yaml
from depthgrow.report.statistics import Estimate

PAPER: dict[str, Any] = read_yaml(Path(__file__).with_name("paper.yaml"))
TWINS: dict[str, Any] = read_yaml(Path(__file__).with_name("twins.yaml"))
LEARNED = 0.5  # nats per token
NEAR_IDENTITY = 0.1  # a block is near-identity when it is worth less than this share of the arm's costliest block
DRIFT = (
    1.2  # a scale drifts when its std rises by more than this factor, and by more than twice the other placement's rise
)
GRID = ("pre-joint", "post-joint", "pre-grow", "post-grow")
TRIAL = (
    "A trial: it shows that every part works. Its phases are too short for its numbers to mean anything; no verdict."
)

Finding = tuple[str, str]  # (appears, in figures)


def headline(contrast: dict[str, Any]) -> Estimate:
    """Across seeds where there are several, since they move a result more than documents do; else over documents."""
    found = contrast["across"]
    return Estimate(found["mean"], found["low"], found["high"]) if found else Estimate(**contrast["estimate"])


def hardly_trained(summary: dict[str, Any], arms: Sequence[str]) -> str | None:
    """In words, which of ``arms`` a claim cannot rest on; None where all have learned (or no unigram CE is known)."""
    unigram = summary["baselines"].get("unigram", {}).get("ce")
    if unigram is None:
        return None
    ends = {arm: summary["arms"][arm]["ce"]["estimate"] for arm in arms if arm in summary["arms"]}
    weak = {arm: found["value"] for arm, found in ends.items() if found and found["value"] > unigram - LEARNED}
    if not weak:
        return None
    named = ", ".join(f"{arm} ({ce:.2f})" for arm, ce in weak.items())
    return f"{named} {'has' if len(weak) == 1 else 'have'} hardly trained; a unigram model has {unigram:.2f}"


def _enough(contrast: dict[str, Any]) -> str:
    """How many seeds would settle a difference across seeds that is not settled."""
    seeds = contrast["across"]["settles"]
    return f"about {seeds:,} seeds would settle it" if seeds < 10_000 else "more seeds would not settle it"


# --- the headline -------------------------------------------------------------------------------------------------------


def sentence(summary: dict[str, Any]) -> str:
    """The finding in plain words, with what it rests on and what would settle what is open."""
    deltas = summary["deltas"]
    if not summary["verdict"]:
        return TRIAL
    named = [name for name in ("grow", "joint", "freeze") if name in deltas]
    if not any(deltas[name]["valid"] or "not finished" not in deltas[name]["reason"] for name in named):
        return f"Nothing to compare yet: no curriculum has both placements finished.{_diverged(summary)}"
    counts = sorted({len(deltas[name]["seeds"]) for name in named if deltas[name]["valid"]})
    if counts in ([], [1]):
        return _of_two_models(summary, named)
    text = "; ".join(_clause(summary, name, mixed=len(counts) > 1) for name in named)
    text = f"{text[0].upper()}{text[1:]}{_interaction(summary)}"
    basis = f"across {counts[0]} seeds" if len(counts) == 1 else "across the seeds given"
    return f"{text} (95 % {basis}).{_diverged(summary)}"


def _diverged(summary: dict[str, Any]) -> str:
    """Seeds that are left out of every comparison because they diverged: what is left may be the lucky ones."""
    return f" Diverged, and left out: {'; '.join(summary['diverged'])}." if summary["diverged"] else ""


def _of_two_models(summary: dict[str, Any], named: Sequence[str]) -> str:
    clauses = []
    for name in named:
        delta = summary["deltas"][name]
        weak = hardly_trained(summary, _pair(name))
        if not delta["valid"]:
            clauses.append(f"under {name} the comparison is invalid ({delta['reason']})")
        elif weak:
            clauses.append(f"under {name} nothing is settled: {weak}")
        else:
            found = headline(delta)
            side = "below" if found.value < 0 else "above"
            clauses.append(f"under {name} this post-norm student ends {found.size()} {side} this pre-norm one")
    return (
        f"One seed: {'; '.join(clauses)} (nats per token, 95 % over held-out documents). One seed does not tell placements "
        f"apart: in the laptop study students that differ only in their seed end {TWINS['low']:.2f} to {TWINS['high']:.2f} "
        f"apart. `{more_seeds(summary)}` adds seeds.{_diverged(summary)}"
    )


def more_seeds(summary: dict[str, Any]) -> str:
    """The command that goes on with a study of one seed."""
    folder = summary["folder"]
    return f"depthgrow study {folder if '/' in folder else f'./{folder}'} --seeds 3"


def _pair(curriculum: str) -> tuple[str, str]:
    return f"pre-{curriculum}", f"post-{curriculum}"


def _clause(summary: dict[str, Any], name: str, *, mixed: bool) -> str:
    delta, weak = summary["deltas"][name], hardly_trained(summary, _pair(name))
    if not delta["valid"]:
        return f"under {name} the comparison is invalid ({delta['reason']})"
    if weak:
        return f"under {name} nothing is settled: {weak}"
    if delta["across"] is None:
        return f"under {name} there is one seed, which does not tell placements apart"
    found = headline(delta)
    basis = f", {len(delta['seeds'])} seeds" if mixed else ""
    if not found.excludes_zero:
        return f"under {name} the two cannot be told apart ({found.text()}{basis}; {_enough(delta)})"
    ahead = "post-norm" if found.value < 0 else "pre-norm"
    return f"under {name} {ahead} is ahead by {found.size()} nats per token{basis}"


def _interaction(summary: dict[str, Any]) -> str:
    interaction = summary["interaction"]
    if interaction is None or not interaction["valid"] or interaction["across"] is None:
        return ""
    if weak := hardly_trained(summary, GRID):
        return f". The interaction is not settled: {weak}"
    found = headline(interaction)
    if not found.excludes_zero:
        verdict = f"not distinguishable from none; {_enough(interaction)}"
    elif (found.value < 0) == (PAPER["interaction"] < 0):
        verdict = f"the same sign as the paper's {PAPER['interaction']:+.3f}"
        if headline(summary["deltas"]["grow"]).value > 0:
            verdict += ", but not by its route: there post-norm is ahead under grow"
    else:
        verdict = f"the opposite sign of the paper's {PAPER['interaction']:+.3f}"
    return f". The interaction is {found.text()}, {verdict}"


# --- claim by claim -----------------------------------------------------------------------------------------------------


def claims(summary: dict[str, Any]) -> list[dict[str, str]]:
    """What the paper reports, and whether it appears here: yes, no, or not settled by these seeds."""
    if not summary["verdict"]:
        return []
    grown, grow, interaction = summary["grown"], summary["deltas"].get("grow"), summary["interaction"]
    rows: list[tuple[str, str, Sequence[str], Finding | None]] = [
        ("Grown, post-norm is ahead (Δ grow < 0)", "−0.033", _pair("grow"), _negative(grow)),
        ("The interaction is negative", "−0.033", GRID, _negative(interaction)),
        ("The ranking crosses over while growing", "+0.004 → −0.033", _pair("grow"), _crossing(summary)),
        ("Pre's last block is near-identity, post's is not", "0.02 against 2.38 nats", _pair("grow"), _identity(grown)),
        (
            "Pre's scale after block 0 drifts, post's does not",
            "std ×3.44 to 19.98; post 0.19",
            _pair("grow"),
            _drift(grown),
        ),
        (
            "Post pays more when a block is appended (jump)",
            "0.25, 0.28 against 0.02, 0.02",
            _pair("grow"),
            _jumps(grown),
        ),
    ]
    found = []
    for claim, paper, arms, finding in rows:
        if finding is not None:
            appears, ours = finding
            if weak := hardly_trained(summary, arms):
                appears, ours = f"not settled: {weak}", ours
            found.append({"claim": claim, "paper": paper, "appears": appears, "ours": ours})
    return found


def _negative(contrast: dict[str, Any] | None) -> Finding | None:
    if contrast is None or not contrast["valid"]:
        return None
    found = headline(contrast)
    text = found.text()
    if contrast["across"] is None:
        return "not settled", f"{text} between the models of one seed"
    if not found.excludes_zero:
        return "not settled", f"{text}; {_enough(contrast)}"
    return ("yes" if found.value < 0 else "no"), f"{text}, {len(contrast['seeds'])} seeds"


def _crossing(summary: dict[str, Any]) -> Finding | None:
    rows, grow = summary["ce_per_phase"], summary["deltas"].get("grow")
    phases = len(summary["diagnostics"].get("post-grow", []))
    if len(rows) < 2 or len(rows) != phases or grow is None or not grow["valid"]:
        return None
    text = " → ".join(f"{row['delta']['value']:+.3f}" for row in rows)
    if grow["across"] is None:
        return "not settled", f"{text} between the models of one seed"
    first, last = (Estimate(**row["delta"]) for row in (rows[0], rows[-1]))
    if not (first.excludes_zero and last.excludes_zero):
        return "not settled", text
    if first.value < 0 < last.value:
        return "no, the other way", text
    return ("yes" if first.value > 0 > last.value else "no"), text


def _identity(grown: list[dict[str, Any]]) -> Finding | None:
    worth = _known(grown, "removal")
    if worth is None or len(worth[0][0]) < 2:
        return None
    seen = [pre[-1] / max(pre) < NEAR_IDENTITY <= post[-1] / max(post) for pre, post in worth]
    return _agreed(
        seen
    ), f"{_mean(pre[-1] for pre, _ in worth):.3f} against {_mean(post[-1] for _, post in worth):.3f} nats"


def _drift(grown: list[dict[str, Any]]) -> Finding | None:
    spread = _known(grown, "std")
    if spread is None or not all(values[0] for pair in spread for values in pair):
        return None
    seen = [pre[-1] / pre[0] > DRIFT and pre[-1] - pre[0] > 2 * (post[-1] - post[0]) for pre, post in spread]
    pre, post = (
        f"std ×{_mean(pair[i][-1] / pair[i][0] for pair in spread):.2f} to {_mean(pair[i][-1] for pair in spread):.3g}"
        for i in (0, 1)
    )
    return _agreed(seen), f"{pre}; post {post}"


def _jumps(grown: list[dict[str, Any]]) -> Finding | None:
    jumps = _known(grown, "jump")
    if jumps is None or not jumps[0][0]:
        return None
    seen = [all(b > a for a, b in zip(pre, post, strict=True)) for pre, post in jumps]
    pre, post = (
        ", ".join(f"{_mean(values):.2f}" for values in zip(*(pair[i] for pair in jumps), strict=True)) for i in (0, 1)
    )
    return _agreed(seen), f"{post} against {pre}"


def _known(grown: list[dict[str, Any]], name: str) -> list[tuple[list[float], list[float]]] | None:
    """(pre's, post's) values of every seed; None where there is no seed, or a value that is missing or not finite."""
    found = [(row["pre-grow"][name], row["post-grow"][name]) for row in grown]
    whole = all(v is not None and math.isfinite(v) for pair in found for values in pair for v in values)
    return found if found and whole else None


def _mean(values: Any) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _agreed(seen: list[bool]) -> str:
    """yes / no where all seeds say so; of one seed it is said that it is one."""
    if len(seen) == 1:
        return f"one seed: {'yes' if seen[0] else 'no'}"
    if len(set(seen)) > 1:
        return f"not settled: in {sum(seen)} of {len(seen)} seeds"
    return "yes" if seen[0] else "no"
