"""A chart as a picture (matplotlib) and as an interactive plot (the JSON that plotly.js reads)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from depthgrow.files import write_atomic
from depthgrow.report.charts import Chart, Series

DASH = {"solid": "-", "dash": "--", "dot": ":"}
WIDTH, HEIGHT = 7.6, 3.9  # inches


def picture(chart: Chart) -> Figure:
    """All panels in one row."""
    matplotlib.rcParams.update({"svg.hashsalt": "depthgrow", "svg.fonttype": "path", "font.size": 9.5})
    figure = Figure(figsize=(WIDTH if len(chart.panels) == 1 else 1.2 * WIDTH, HEIGHT), layout="constrained")
    for column, panel in enumerate(chart.panels):
        axes: Any = figure.add_subplot(1, len(chart.panels), column + 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for x in panel.lines:
            axes.axvline(x, color="#888888", linewidth=0.9, linestyle=":")
        for name, y in panel.levels.items():
            axes.axhline(y, color="#888888", linewidth=0.9, linestyle="--")
            axes.annotate(
                name, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="#666666", fontsize=8
            )
        for series in panel.series:
            _plot(axes, series)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title or None)
        if panel.log_x:
            axes.set_xscale("log")
        if panel.log_y:
            axes.set_yscale("log")
        if panel.ticks is not None:
            axes.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=20 if len(panel.ticks) > 4 else 0)
        elif 0 < len(known := {x for series in panel.series for x in series.x if x is not None}) <= 4:
            axes.set_xticks(sorted(known))
        labels = [series.label for series in panel.series]
        if len(labels) > 1 and labels not in ([s.label for s in left.series] for left in chart.panels[:column]):
            axes.legend(frameon=False, fontsize=8)  # one for panels that show the same
    return figure


def _plot(axes: Any, series: Series) -> None:
    y = [float("nan") if v is None else v for v in series.y]
    error = series.whiskers()
    if series.kind == "bar":
        axes.bar(
            series.x,
            y,
            width=series.width,
            color=series.colour,
            label=series.label,
            yerr=error,
            error_kw={"linewidth": 0.9},
        )
    elif series.kind == "dots":
        axes.plot(series.x, y, "o", color=series.colour, markersize=3.5, alpha=0.45, label=series.label)
    elif series.kind == "mark":
        axes.plot(series.x, y, "_", color=series.colour, markersize=10, markeredgewidth=1.7, label=series.label)
    else:
        x = [float("nan") if v is None else v for v in series.x]
        style = {"color": series.colour, "linestyle": DASH[series.dash], "label": series.label}
        axes.errorbar(x, y, yerr=error, marker="o" if series.points else None, markersize=4, linewidth=1.4, **style)


def interactive(chart: Chart) -> dict[str, Any]:
    """The same as plotly traces and layout; the page sets colours of text and grid."""
    data: list[dict[str, Any]] = []
    labels: set[str] = set()
    layout: dict[str, Any] = {"shapes": [], "annotations": [], "barmode": "overlay"}
    if len(chart.panels) > 1:
        layout["grid"] = {"rows": 1, "columns": len(chart.panels), "pattern": "independent"}
    for number, panel in enumerate(chart.panels, 1):
        suffix = "" if number == 1 else str(number)
        x_axis: dict[str, Any] = {"title": {"text": panel.x_label}, "type": "log" if panel.log_x else "linear"}
        if panel.ticks is not None:
            x_axis |= {"tickvals": list(range(len(panel.ticks))), "ticktext": panel.ticks}
        title = f"{panel.title}: {panel.y_label}" if panel.title else panel.y_label
        layout[f"xaxis{suffix}"] = x_axis
        layout[f"yaxis{suffix}"] = {"title": {"text": title}, "type": "log" if panel.log_y else "linear"}
        for x in panel.lines:
            place = {"xref": f"x{suffix}", "yref": f"y{suffix} domain", "x0": x, "x1": x, "y0": 0, "y1": 1}
            layout["shapes"].append({"type": "line", "line": {"dash": "dot", "width": 1, "color": "#888888"}} | place)
        for name, y in panel.levels.items():
            place = {"xref": f"x{suffix} domain", "yref": f"y{suffix}"}
            line = {
                "type": "line",
                "line": {"dash": "dash", "width": 1, "color": "#888888"},
                "x0": 0,
                "x1": 1,
                "y0": y,
                "y1": y,
            }
            text = {"text": name, "x": 1, "y": y, "xanchor": "right", "yanchor": "bottom", "showarrow": False}
            layout["shapes"].append(line | place)
            layout["annotations"].append(text | place)
        for series in panel.series:
            axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            data.append(_trace(series) | axes | {"showlegend": series.label not in labels, "legendgroup": series.label})
            labels.add(series.label)
    return {"data": data, "layout": layout}


def _trace(series: Series) -> dict[str, Any]:
    trace: dict[str, Any] = {"name": series.label, "x": series.x, "y": series.y}
    if whiskers := series.whiskers():
        down, up = whiskers
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1}
    if series.kind == "bar":
        return trace | {"type": "bar", "marker": {"color": series.colour}, "width": series.width}
    if series.kind == "dots":
        return trace | {
            "type": "scatter",
            "mode": "markers",
            "opacity": 0.5,
            "marker": {"color": series.colour, "size": 6},
        }
    if series.kind == "mark":
        marker = {"symbol": "line-ew", "size": 16, "line": {"width": 2.5, "color": "ink"}}
        return trace | {"type": "scatter", "mode": "markers", "marker": marker}
    mode = "lines+markers" if series.points else "lines"
    return trace | {
        "type": "scatter",
        "mode": mode,
        "line": {"color": series.colour, "dash": series.dash},
        "connectgaps": False,
    }


def save(figure: Figure, stem: Path) -> str:
    """Write PNG and SVG, each whole or not at all; returns the SVG as text for the page."""
    pixels, buffer = io.BytesIO(), io.StringIO()
    figure.savefig(pixels, format="png", dpi=160)
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    write_atomic(stem.with_suffix(".png"), pixels.getvalue())
    write_atomic(stem.with_suffix(".svg"), text)
    return text[text.index("<svg") :]
