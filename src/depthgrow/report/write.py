"""Write DIR/report: report.html, report.md, report.json, tables/*.csv and *.tex, figures/*.png and *.svg."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from depthgrow.files import write_atomic, write_json
from depthgrow.report.charts import build_charts
from depthgrow.report.draw import interactive, picture, save
from depthgrow.report.load import load_study_files
from depthgrow.report.summary import summarise
from depthgrow.report.tables import DEFINITIONS, Table, build_tables


@dataclass(frozen=True)
class Written:
    """Where the page is and what it says first."""

    html: Path
    sentence: str


def write_report(root: Path) -> Written:
    """Write the report of a study folder from its files.

    Raises:
        UserError: the folder holds no study, or a file in it is damaged.
    """
    study = load_study_files(root)
    summary = summarise(study)
    folder = root / "report"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "tables").mkdir(exist_ok=True)
    drawn = []
    library = _plotly()
    for chart in build_charts(summary):
        parts = {"svg": save(picture(chart), folder / "figures" / chart.name)}
        parts["plot"] = json.dumps(interactive(chart)).replace("</", "<\\/") if library else ""
        drawn.append({"id": f"figure-{chart.name}", "title": chart.title, "text": chart.caption} | parts)
    tables = build_tables(summary)
    for table in tables:
        write_atomic(folder / "tables" / f"{table.name}.csv", table.csv())
        write_atomic(folder / "tables" / f"{table.name}.tex", table.latex())
    stale = set(DEFINITIONS["tables"]) - {table.name for table in tables}
    stale |= {f"figure-{name}" for name in DEFINITIONS["figures"]} - {part["id"] for part in drawn}
    for name in stale:  # what an earlier report showed and this one does not
        for kind in (
            ("figures/{}.png", "figures/{}.svg") if name.startswith("figure-") else ("tables/{}.csv", "tables/{}.tex")
        ):
            (folder / kind.format(name.removeprefix("figure-"))).unlink(missing_ok=True)
    write_json(folder / "report.json", summary)
    provenance = _provenance(summary)
    write_atomic(folder / "report.md", _markdown(summary, tables, drawn, provenance))
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.j2")
    page = template.render(
        summary=summary,
        parts=_in_order(tables, drawn),
        plotly=library,
        provenance=provenance,
        config=json.dumps(summary["config"], indent=1),
    )
    write_atomic(folder / "report.html", page)
    return Written(folder / "report.html", summary["sentence"])


def _in_order(tables: list[Table], figures: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Each table followed by the figures that show it; figures of tables that are not there come last."""
    after = {f"figure-{name}": f"table-{values['after']}" for name, values in DEFINITIONS["figures"].items()}
    found: list[dict[str, Any]] = []
    for table in tables:
        head = {"id": f"table-{table.name}", "title": table.title, "text": table.note}
        found.append(head | {"header": table.header, "rows": table.rows})
        found += [figure for figure in figures if after[figure["id"]] == f"table-{table.name}"]
    return found + [figure for figure in figures if figure not in found]


def _plotly() -> str:
    """The source of plotly.js, for one page that works offline; empty without the extra: the page has pictures alone."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs()


def _provenance(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) rows: teacher, text, software, machine."""
    teacher, data, environment = summary["teacher"], summary["data"], summary["environment"]
    rows = []
    if teacher:
        made = teacher.get("provenance") or {}
        origin = made.get("command") or made.get("model") or "a model folder or hub name"
        facts = f"{teacher['parameters']:,} parameters, fingerprint {teacher['fingerprint']}, {origin}"
        rows.append(("teacher", f"{teacher['source']}: {facts}"))
        rows.append(("teacher's held-out CE", f"{teacher['held_out']['ce']:.4f} nats per token"))
    rows += [("corpus", f"{c['name']}: {c['source']}; licence {c['licence']}") for c in data.get("corpora") or []]
    for name in ("train", "held_out"):
        if data.get(name):
            part = data[name]
            facts = f"{part['documents']:,}, {part['target_tokens']:,} target tokens, hash {part['content_hash']}"
            rows.append((name.replace("_", "-") + " documents", facts))
    if data.get("skipped_files"):
        skipped = data["skipped_files"]
        rows.append(("skipped files", f"{len(skipped)}: {'; '.join(skipped[:5])}"))
    if environment:
        versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
        rows.append(("software", f"Python {environment['python']}, {versions}"))
        facts = f"{environment['processor']}, {environment['cpu_count']} cores, {environment['threads']} threads"
        rows.append(("machine", f"{facts}, {environment['platform']}, device {environment['device']}"))
    rows.append(("training time", f"{summary['wall_seconds']:.0f} s over all distinct phases"))
    rows += [(f"nodes of {name}", ", ".join(keys)) for name, keys in summary["nodes"].items()]
    return rows


def _markdown(
    summary: dict[str, Any], tables: list[Table], figures: list[dict[str, str]], provenance: list[tuple[str, str]]
) -> str:
    parts = [f"# Study {summary['study']}", summary["sentence"]]
    if summary["missing"]:
        parts.append("Not finished yet:\n\n" + "\n".join(f"- {line}" for line in summary["missing"]))
    if summary["lost_lines"]:
        lines = "\n".join(f"- {line}" for line in summary["lost_lines"])
        parts.append(f"Lines of metrics are lost; what is read from them has gaps or dashes:\n\n{lines}")
    if summary["diverged"]:
        parts.append(
            "Diverged (a loss or gradient was not finite):\n\n" + "\n".join(f"- {line}" for line in summary["diverged"])
        )
    for table in tables:
        parts += [f"## {table.title}", table.markdown(), table.note]
    for figure in figures:
        name = figure["id"].removeprefix("figure-")
        parts += [f"## {figure['title']}", f"![{figure['title']}](figures/{name}.png)", figure["text"]]
    parts += ["## Provenance", "\n".join(f"- {name}: {value}" for name, value in provenance)]
    parts += ["## Config", "```json\n" + json.dumps(summary["config"], indent=1) + "\n```"]
    return "\n\n".join(parts) + "\n"
