"""The figures, drawn from the same summary the tables show."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = {"pre": "#2f6db3", "post": "#c8553d"}
STYLES = {"joint": "-", "grow": "-", "freeze": "--", "single": ":"}


def _figure(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Any]:
    matplotlib.rcParams.update({"svg.hashsalt": "depthgrow", "svg.fonttype": "path", "font.size": 10})
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def interaction(summary: dict[str, Any]) -> Figure | None:
    """Final held-out CE against curriculum, one line a placement: parallel lines mean no interaction."""
    curricula = [c for c in ("joint", "grow", "freeze") if all(f"{p}-{c}" in summary["arms"] for p in COLOURS)]
    if len(curricula) < 2:
        return None
    figure, axes = _figure()
    for placement, colour in COLOURS.items():
        estimates = [summary["arms"][f"{placement}-{c}"]["ce"] for c in curricula]
        values = [e["value"] for e in estimates]
        axes.plot(curricula, values, "o-", color=colour, label=f"{placement}-norm")
        for curriculum, value in zip(curricula, values, strict=True):
            axes.annotate(f"{value:.3f}", (curriculum, value), textcoords="offset points", xytext=(8, 5), fontsize=9)
    axes.set_ylabel("held-out CE at the end, nats per token")
    axes.margins(x=0.2, y=0.2)
    axes.legend(frameon=False)
    return figure


def ce_per_phase(summary: dict[str, Any]) -> Figure | None:
    """Held-out CE at the end of each growth phase, where the ranking may cross over."""
    rows = summary["ce_per_phase"]
    if not rows:
        return None
    figure, axes = _figure()
    layers = [row["layers"] for row in rows]
    for placement, colour in COLOURS.items():
        axes.plot(layers, [row[placement] for row in rows], "o-", color=colour, label=f"{placement}-grow")
    for row in rows:
        axes.annotate(
            f"Δ {row['delta']['value']:+.3f}",
            (row["layers"], max(row["pre"], row["post"])),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            fontsize=9,
        )
    axes.set_xticks(layers)
    axes.margins(x=0.15, y=0.2)
    axes.set_xlabel("layers at the end of the phase")
    axes.set_ylabel("held-out CE, nats per token")
    axes.legend(frameon=False)
    return figure


def validation_curves(summary: dict[str, Any]) -> Figure | None:
    """Held-out CE over the steps of each arm (first seed); vertical lines where blocks were appended."""
    curves = summary["validation_curves"]
    if not any(curve["steps"] for curve in curves.values()):
        return None
    figure, axes = _figure(7.6, 4.2)
    transitions = sorted({t for curve in curves.values() for t in curve["transitions"]})
    for step in transitions:
        axes.axvline(step, color="#888888", linewidth=0.9, linestyle=":")
    for arm, curve in curves.items():
        placement, _, curriculum = arm.partition("-")
        axes.plot(
            curve["steps"],
            curve["ce"],
            STYLES.get(curriculum, "-."),
            marker={"joint": "s", "grow": "o"}.get(curriculum, "^"),
            markersize=4,
            color=COLOURS.get(placement, "#555555"),
            alpha=0.55 if curriculum == "joint" else 1.0,
            label=arm,
        )
    axes.set_xlabel("optimizer step" + (" (dotted: blocks appended)" if transitions else ""))
    axes.set_ylabel("held-out CE, nats per token")
    axes.legend(frameon=False)
    return figure


def block_removal(summary: dict[str, Any]) -> Figure | None:
    """What each block is worth: CE lost without it (left) and how far it turns the stream (right), ours and the paper's."""
    arms = [a for a in ("pre-joint", "post-joint", "pre-grow", "post-grow") if a in summary["diagnostics"]]
    if not arms:
        return None
    matplotlib.rcParams.update({"svg.hashsalt": "depthgrow", "svg.fonttype": "path", "font.size": 10})
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    for column, (name, title) in enumerate(
        (("removal", "removal ΔCE, nats per token"), ("angle", "angle, share of π"))
    ):
        axes = figure.add_subplot(1, 2, column + 1)
        axes.grid(alpha=0.25, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
        for index, arm in enumerate(arms):
            blocks = summary["diagnostics"][arm][-1]["blocks"]
            places = [row["block"] + (index - (len(arms) - 1) / 2) * 0.2 for row in blocks]
            placement, _, curriculum = arm.partition("-")
            axes.bar(
                places,
                [row[name] for row in blocks],
                width=0.18,
                color=COLOURS[placement],
                alpha=1.0 if curriculum == "grow" else 0.45,
                label=arm,
            )
            stated = [values[column] for values in summary["paper"]["blocks"][arm][: len(blocks)]]
            axes.plot(places[: len(stated)], stated, "_", color="black", markersize=9, markeredgewidth=1.6)
        axes.set_xticks([row["block"] for row in summary["diagnostics"][arms[0]][-1]["blocks"]])
        axes.set_xlabel("block (black mark: the paper)")
        axes.set_ylabel(title)
        if not column:
            axes.legend(frameon=False)
    return figure


FIGURES = {
    "interaction": (interaction, "Interaction of placement and curriculum"),
    "ce_per_phase": (ce_per_phase, "CE after each growth phase"),
    "block_removal": (block_removal, "What each block is worth"),
    "validation_curves": (validation_curves, "Held-out CE while training"),
}


def save(figure: Figure, stem: Path) -> str:
    """Write PNG and SVG; returns the SVG as text for the page."""
    figure.savefig(stem.with_suffix(".png"), dpi=160)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    stem.with_suffix(".svg").write_text(text)
    return text[text.index("<svg") :]
