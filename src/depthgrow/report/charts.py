"""The figures as data: what is drawn, not how. `draw` turns each into a picture and into an interactive plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from depthgrow.report.tables import DEFINITIONS

COLOURS = {"pre": "#2f6db3", "post": "#c8553d"}
SHADES = ("#2f6db3", "#c8553d", "#4d9a6a", "#8a63b8", "#b08a2e", "#5d6873")
SEED_OFFSET = 0.06  # of a seed's point from its mean, where categories are 1 apart
DASHES = {"joint": "dash", "grow": "solid", "freeze": "dot"}


@dataclass(frozen=True)
class Series:
    """Points joined by a line, bars, or marks; None in ``y`` is a gap. low, high: interval of each point."""

    label: str
    x: list[Any]
    y: list[Any]
    colour: str
    kind: str = "line"  # line | dots | bar | mark
    width: float = 0.5  # of a bar
    dash: str = "solid"  # solid | dash | dot
    points: bool = True
    low: list[Any] | None = None
    high: list[Any] | None = None

    def whiskers(self) -> tuple[list[float], list[float]] | None:
        """Lengths of the intervals below and above the points."""
        if self.low is None or self.high is None:
            return None
        rows = list(zip(self.low, self.y, self.high, strict=True))
        return [y - a for a, y, _ in rows], [b - y for _, y, b in rows]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. lines: x of vertical lines; levels: named horizontal ones; ticks: labels of x = 0, 1, .. where x
    counts categories."""

    x_label: str
    y_label: str
    series: list[Series]
    title: str = ""
    log_x: bool = False
    log_y: bool = False
    lines: list[float] = field(default_factory=list)
    levels: dict[str, float] = field(default_factory=dict)
    ticks: list[str] | None = None


@dataclass(frozen=True)
class Chart:
    """A figure: panels side by side, and what to look at."""

    name: str
    title: str
    caption: str
    panels: list[Panel]


def _line(label: str, x: list[Any], estimates: list[dict[str, Any]], colour: str, **style: Any) -> Series:
    low, high = ([e.get(k) for e in estimates] for k in ("low", "high"))
    known = None not in low and None not in high
    values = [e["value"] for e in estimates]
    return Series(label, x, values, colour, low=low if known else None, high=high if known else None, **style)


def interaction(summary: dict[str, Any]) -> list[Panel]:
    ce = {arm: found for arm, found in summary["grid"]["ce"].items() if found["valid"]}
    curricula = [c for c in ("joint", "grow", "freeze") if all(f"{p}-{c}" in ce for p in COLOURS)]
    if len(curricula) < 2:
        return []
    series = []
    for placement, colour in COLOURS.items():
        found = [ce[f"{placement}-{c}"] for c in curricula]
        ends = [{"value": f["across"]["mean"], **f["across"]} if f["across"] else f["estimate"] for f in found]
        series.append(_line(f"{placement}-norm", list(range(len(curricula))), ends, colour))
        beside = SEED_OFFSET if placement == "post" else -SEED_OFFSET
        x = [index + beside for index, f in enumerate(found) if len(f["values"]) > 1 for _ in f["values"]]
        y = [value for f in found if len(f["values"]) > 1 for value in f["values"]]
        series += [Series(f"{placement}-norm, each seed", x, y, colour, kind="dots")] if x else []
    return [Panel("curriculum", "held-out CE, nats per token", series, ticks=curricula)]


def ce_per_phase(summary: dict[str, Any]) -> list[Panel]:
    rows = summary["ce_per_phase"]
    if not rows:
        return []
    layers = [row["layers"] for row in rows]
    ce = [Series(f"{p}-grow", layers, [row[p] for row in rows], colour) for p, colour in COLOURS.items()]
    delta = _line("post − pre", layers, [row["delta"] for row in rows], SHADES[2])
    x = "layers at the end of the phase"
    return [Panel(x, "held-out CE, nats per token", ce), Panel(x, "Δ CE, nats per token", [delta])]


def validation(summary: dict[str, Any]) -> list[Panel]:
    plain = {a: c for a, c in summary["curves"].items() if "+" not in a and c["steps"] and "-single" not in a}
    series = []
    others = iter(SHADES[2:] * 9)
    for arm, curve in plain.items():
        placement, _, curriculum = arm.partition("-")
        colour = COLOURS[placement] if curriculum in DASHES and placement in COLOURS else next(others)
        series.append(Series(arm, curve["steps"], curve["ce"], colour, dash=DASHES.get(curriculum, "dash")))
    lines = sorted({t for curve in plain.values() for t in curve["transitions"]})
    known = {"teacher": summary["teacher"].get("held_out")} | {
        n: summary["baselines"].get(n) for n in ("bigram", "unigram")
    }
    levels = {name: found["ce"] for name, found in known.items() if found and found["ce"] is not None}
    return (
        [Panel("optimizer step", "held-out CE, nats per token", series, lines=lines, levels=levels)] if series else []
    )


def block_removal(summary: dict[str, Any]) -> list[Panel]:
    arms = [a for a in ("pre-joint", "post-joint", "pre-grow", "post-grow") if a in summary["diagnostics"]]
    blocks = max((len(summary["diagnostics"][a][-1]["blocks"]) for a in arms), default=0)
    panels = []
    for column, (name, label) in enumerate(
        (("removal", "removal ΔCE, nats per token"), ("angle", "angle, share of π"))
    ):
        series, stated = [], []
        for index, arm in enumerate(arms):
            rows = summary["diagnostics"][arm][-1]["blocks"]
            placement, _, curriculum = arm.partition("-")
            colour = COLOURS[placement] if curriculum == "grow" else {"pre": "#9dbfe3", "post": "#e8b3a6"}[placement]
            x = [row["block"] + (index - (len(arms) - 1) / 2) * 0.2 for row in rows]
            series.append(_line(arm, x, [row[name] for row in rows], colour, kind="bar", width=0.18))
            stated += list(zip(x, [values[column] for values in summary["paper"]["blocks"].get(arm, [])], strict=False))
        series.append(Series("paper", [x for x, _ in stated], [y for _, y in stated], "#000000", kind="mark"))
        panels.append(Panel("block", label, series, ticks=[str(b) for b in range(blocks)]))
    return panels if arms else []


def _scale(summary: dict[str, Any], read: Any) -> Iterator[tuple[str, str, list[int], list[Any]]]:
    """(arm, placement, phases, read(rms of block 0) at each phase's end) of the grown arms."""
    for placement in COLOURS:
        phases = summary["diagnostics"].get(f"{placement}-grow")
        if phases:
            values = [read(phase["blocks"][0]["rms"]) for phase in phases]
            yield f"{placement}-grow", placement, [p["phase"] for p in phases], values


def boundary_rms(summary: dict[str, Any]) -> list[Panel]:
    panels = []
    for name in ("mean", "std"):
        found = list(_scale(summary, lambda rms, name=name: rms["all"].get(name)))
        series = [Series(arm, x, y, COLOURS[p]) for arm, p, x, y in found]
        if name == "std" and "pre" in {p for _, p, _, _ in found} and summary["paper"]["blocks"]:
            ends = list(summary["paper"]["scale_std"])
            series.append(Series("paper, pre-grow", [1, 3], ends, COLOURS["pre"], dash="dot"))
        panels.append(Panel("phase", f"{name} of the RMS", series, log_y=True))
    return panels if panels[0].series else []


def structural(summary: dict[str, Any]) -> list[Panel]:
    series = []
    for kind, dash in (("document_boundary", "solid"), ("regular", "dash")):
        found = _scale(summary, lambda rms, kind=kind: rms[kind].get("mean"))
        series += [Series(f"{arm}, {kind.replace('_', ' ')}", x, y, COLOURS[p], dash=dash) for arm, p, x, y in found]
    return [Panel("phase", "mean RMS", series, log_y=True)] if series else []


def histograms(summary: dict[str, Any]) -> list[Panel]:
    panels = []
    for arm in ("pre-grow", "post-grow"):
        series = []
        for row in summary["diagnostics"].get(arm, [{"blocks": []}])[-1]["blocks"]:
            histogram = row["rms"]["all"].get("histogram")
            if histogram:
                middles = [(a * b) ** 0.5 for a, b in pairwise(histogram["edges"])]
                share = [c / sum(histogram["counts"]) for c in histogram["counts"]]
                series.append(Series(f"block {row['block']}", middles, share, SHADES[row["block"] % 6], points=False))
        if series:
            panels.append(Panel("RMS of a token", "share of tokens", series, title=arm, log_x=True))
    return panels


def _apart(phases: list[dict[str, list[float]]]) -> tuple[list[Any], list[Any]]:
    """x and y of all phases, with a gap after each."""
    x, y = ([v for phase in phases for v in [*phase[name], None]] for name in ("x", "y"))
    return x, y


def transition_loss(summary: dict[str, Any]) -> list[Panel]:
    series, lines = [], set()
    for arm in ("pre-grow", "post-grow"):
        curve = summary["curves"].get(arm, {"loss": [], "transitions": []})
        lines |= set(curve["transitions"])
        x, y = _apart(curve["loss"])
        series += [Series(arm, x, y, COLOURS[arm.partition("-")[0]], points=False)] if x else []
    return [Panel("optimizer step", "training loss, nats per token", series, lines=sorted(lines))] if lines else []


def gradient_norms(summary: dict[str, Any]) -> list[Panel]:
    panels = []
    for arm in ("pre-grow", "post-grow"):
        curve = summary["curves"].get(arm, {"grad_norms": {}, "transitions": []})
        series = []
        for index, (part, phases) in enumerate(curve["grad_norms"].items()):
            series.append(Series(part, *_apart(phases), SHADES[index % 6], points=False))
        if any(s.y and any(v is not None for v in s.y) for s in series):
            panels.append(
                Panel("optimizer step", "gradient norm", series, title=arm, log_y=True, lines=curve["transitions"])
            )
    return panels


def interventions(summary: dict[str, Any]) -> list[Panel]:
    rows = [row for row in summary["interventions"] if row["effect"]["valid"] and row["gap"]["valid"]]
    if not rows:
        return []
    labels = [row["arm"] for row in rows]
    x = list(range(len(rows)))
    effects = _line("intervention − plain", x, [row["effect"]["estimate"] for row in rows], SHADES[2], kind="bar")
    gaps = [row["gap"]["estimate"]["value"] for row in rows]
    other = Series("other placement − plain", x, gaps, "#000000", kind="mark")
    return [Panel("", "Δ CE, nats per token", [effects, other], ticks=labels)]


def build_charts(summary: dict[str, Any]) -> list[Chart]:
    """Every figure that the study's finished arms have data for: the functions of this module that definitions.yaml names."""
    drawn = (
        (text["title"], text["text"], name, globals()[name](summary)) for name, text in DEFINITIONS["figures"].items()
    )
    return [Chart(name, title, caption, panels) for title, caption, name, panels in drawn if panels]
