"""The tables as rows of text: one definition for HTML, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgrow.files import read_yaml, shown

DEFINITIONS: dict[str, Any] = read_yaml(Path(__file__).with_name("definitions.yaml"))
MISSING = shown(None)
CLASSES = ("document_boundary", "delimiter", "regular", "outlier")


@dataclass(frozen=True)
class Table:
    """A titled table; ``note`` defines its columns."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str

    def csv(self) -> str:
        buffer = io.StringIO()
        csv.writer(buffer).writerows([self.header, *self.rows])
        return buffer.getvalue()

    def latex(self) -> str:
        """A booktabs tabular, to be included in a document."""
        lines = [" & ".join(map(_tex, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "l" + "r" * (len(self.header) - 1)
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join(
            [f"% {self.title}: {self.note}", rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}", ""]
        )

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(row) + " |" for row in lines)


TEX = {c: rf"\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
TEX |= dict(
    zip("Δπ×÷±→−", (rf"${name}$" for name in (r"\Delta", r"\pi", r"\times", r"\div", r"\pm", r"\to", "-")), strict=True)
)
TEX["–"] = "--"


def _tex(text: str) -> str:
    return "".join(TEX.get(c, c) for c in text)


def _interval(estimate: dict[str, Any] | None, form: str = ".4f") -> str:
    """'value [low, high]'; the value alone where there is no interval."""
    if estimate is None or estimate["value"] is None:
        return MISSING
    if estimate["low"] is None:
        return f"{estimate['value']:{form}}"
    return f"{estimate['value']:{form}} [{estimate['low']:{form}}, {estimate['high']:{form}}]"


def _compared(contrast: dict[str, Any] | None, form: str = "+.4f") -> str:
    """A comparison's interval over documents, or in words why there is none."""
    if contrast is None:
        return MISSING
    return _interval(contrast["estimate"], form) if contrast["valid"] else f"invalid: {contrast['reason']}"


def _widest(contrast: dict[str, Any] | None, form: str = "+.4f") -> str:
    """The interval across seeds where there are several, else the one over documents."""
    return _seeds(contrast, form) if contrast and contrast["across"] else _compared(contrast, form)


def _seeds(contrast: dict[str, Any], form: str = "+.4f") -> str:
    found = contrast["across"]
    return MISSING if found is None else _interval({"value": found["mean"]} | found, form)


def _table(name: str, rows: list[list[str]]) -> Table:
    defined = DEFINITIONS["tables"][name]
    return Table(name, defined["title"], defined["header"], rows, defined["text"])


def claims(summary: dict[str, Any]) -> Table:
    rows = [[c["claim"], c["appears"], c["ours"], c["paper"]] for c in summary["claims"]]
    return _table("claims", rows)


def _curricula(summary: dict[str, Any]) -> list[str]:
    arms = summary["arms"]
    return [c for c in ("joint", "grow", "freeze", "single") if any(f"{p}-{c}" in arms for p in ("pre", "post"))]


def two_by_two(summary: dict[str, Any]) -> Table:
    """Every number from the same seeds, how many the header says."""
    grid, stated = summary["grid"], summary["paper"]
    rows = []
    for curriculum in _curricula(summary):
        row = [curriculum]
        for placement in ("pre", "post"):
            name = f"{placement}-{curriculum}"
            row += [_widest(grid["ce"].get(name), ".4f"), shown(stated["ce"].get(name))]
        rows.append([*row, _widest(grid["deltas"].get(curriculum)), shown(stated["delta"].get(curriculum), "+.4f")])
    if grid["interaction"] is not None and rows:
        ours = _widest(grid["interaction"])
        rows.append(["interaction", "", "", "", "", ours, shown(stated["interaction"], "+.4f")])
    table, seeds = _table("two_by_two", rows), len(grid["seeds"])
    header = [f"{seeds} seed{'s' * (seeds != 1)}", *table.header[1:]]
    return Table(table.name, table.title, header, rows, table.note)


def every_seed(summary: dict[str, Any]) -> Table:
    """A row a seed, a column an arm; its header depends on the study's curricula."""
    curricula, interaction = _curricula(summary), summary["interaction"]
    columns: dict[str, dict[str, Any] | None] = {}
    for curriculum in curricula:
        for placement in ("pre", "post"):
            name = f"{placement}-{curriculum}"
            columns[name] = summary["arms"].get(name, {}).get("ce")
        columns[f"Δ {curriculum}"] = summary["deltas"].get(curriculum)
    columns |= {"interaction": interaction} if interaction else {}
    found = {name: dict(zip(c["seeds"], c["values"], strict=False)) if c else {} for name, c in columns.items()}
    seeds = sorted({seed for values in found.values() for seed in values})
    signed = {name: "+.4f" if name.startswith(("Δ", "inter")) else ".4f" for name in columns}
    rows = [[str(seed), *(shown(found[name].get(seed), signed[name]) for name in columns)] for seed in seeds]
    if len(seeds) > 1:
        spread = [max(v) - min(v) if len(v := list(found[name].values())) > 1 else None for name in columns]
        rows.append(["largest − smallest", *(shown(value) for value in spread)])
    table = _table("every_seed", rows)
    return Table(table.name, table.title, ["seed", *columns], table.rows, table.note)


def across_seeds(summary: dict[str, Any]) -> Table:
    named = {f"Δ {name}": delta for name, delta in summary["deltas"].items()} | {"interaction": summary["interaction"]}
    named |= {f"{row['arm']} − {row['plain']}": row["effect"] for row in summary["interventions"]}
    named |= {f"{row['arm']} − {row['against']}": row for row in summary["controls"]}
    named |= {f"{arm} − itself": floor for arm, floor in summary["noise_floor"].items()}
    found = {name: contrast["across"] for name, contrast in named.items() if contrast and contrast["across"]}
    rows = [
        [
            name,
            str(len(s["values"])),
            _interval({"value": s["mean"]} | s, "+.4f"),
            shown(s["std"]),
            f"{s['negative']} / {s['positive']}",
            "settled" if s["low"] > 0 or s["high"] < 0 else _count(s["settles"]),
            _count(s["needed"]),
        ]
        for name, s in found.items()
    ]
    return _table("across_seeds", rows)


def _count(seeds: int) -> str:
    return str(seeds) if seeds < 10_000 else "over 9,999"


def controls(summary: dict[str, Any]) -> Table:
    rows = []
    for row in summary["controls"]:
        stated = summary["arms"][row["arm"]]["paper_ce"]
        cells = [_compared(row["ce"], ".4f"), shown(stated), _compared(row), _seeds(row)]
        rows.append([row["arm"], *cells, shown(row["paper"], "+.4f")])
    return _table("controls", rows)


def interventions(summary: dict[str, Any]) -> Table:
    rows = [
        [
            row["arm"],
            _compared(row["effect"]),
            f"{_compared(row['gap'])} to {row['other']}",
            _interval(row["share"], "+.2f") if row["share"] else row["no_share"],
        ]
        for row in summary["interventions"]
    ]
    return _table("interventions", rows)


def noise_floor(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, floor in summary["noise_floor"].items():
        values = (
            floor["across"]["values"] if floor["across"] else [floor["estimate"]["value"]] if floor["valid"] else []
        )
        typical = (sum(v * v for v in values) / len(values)) ** 0.5 if values else None
        rows.append([arm, _compared(floor), shown(typical), str(len(values))])
    return _table("noise_floor", rows)


def quantities(summary: dict[str, Any]) -> Table:
    rows = [
        [
            arm,
            str(values["layers"]),
            str(len(values["seeds"])),
            *(
                shown((values["ce"]["estimate"] or {"value": None})["value"] if q == "ce" else values.get(q))
                for q in ("ce", "kl", "soft_ce")
            ),
            shown(values.get("teacher_entropy")),
            shown(values["ppl"], ".2f"),
            f"{values['parameters']['trainable']:,}",
        ]
        for arm, values in summary["arms"].items()
    ]
    held_out = summary["teacher"].get("held_out")
    if held_out:
        layers, count = summary["teacher"]["architecture"]["num_layers"], summary["teacher"]["parameters"]
        values = [shown(held_out["ce"]), MISSING, MISSING, MISSING, shown(held_out["ppl"], ".2f")]
        rows.append(["teacher", str(layers), MISSING, *values, f"{count:,} (frozen)"])
    for name, label in (("bigram", "bigram counts, smoothed"), ("unigram", "unigram counts")):
        if name in summary["baselines"]:
            counted = summary["baselines"][name]
            cells = [shown(counted["ce"]), MISSING, MISSING, MISSING, shown(counted["ppl"], ".2f")]
            rows.append([label, MISSING, MISSING, *cells, MISSING])
    return _table("quantities", rows)


def ce_per_phase(summary: dict[str, Any]) -> Table:
    rows = [
        [str(r["phase"]), str(r["layers"]), shown(r["pre"]), shown(r["post"]), _interval(r["delta"], "+.4f")]
        for r in summary["ce_per_phase"]
    ]
    return _table("ce_per_phase", rows)


def block_removal(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, phases in summary["diagnostics"].items():
        reference = summary["paper"]["blocks"].get(arm, [])
        for row in phases[-1]["blocks"]:
            stated = reference[row["block"]] if row["block"] < len(reference) else (None, None)
            cells = [_interval(row["removal"], ".3f"), shown(stated[0], ".2f"), _interval(row["angle"], ".3f")]
            rows.append(
                [arm, str(row["block"]), *cells, shown(stated[1], ".3f"), _interval(row["relative_update"], ".3f")]
            )
    return _table("block_removal", rows)


def layers(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, phases in summary["diagnostics"].items():
        for row in phases[-1]["layers"]:
            known = None not in row["sink"]
            sink = f"{max(row['sink']):.2f} ({sum(row['sink']) / len(row['sink']):.2f})" if known else MISSING
            values = [_interval(row[name], ".3f") for name in ("removal", "angle", "relative_update")]
            rows.append([arm, str(row["layer"]), *values, sink])
    return _table("layers", rows)


def boundary_scale(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, phases in summary["diagnostics"].items():
        for phase in phases:
            for row in phase["blocks"]:
                scale = row["rms"]["all"]
                shape = [shown(scale.get(k), f) for k, f in (("mean", ".3f"), ("std", ".3f"), ("kurtosis", ".1f"))]
                classes = [shown(row["rms"][kind].get("mean"), ".3f") for kind in CLASSES]
                rows.append([arm, str(phase["phase"]), str(row["block"]), *shape, *classes])
    return _table("boundary_scale", rows)


def outliers(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, phases in summary["diagnostics"].items():
        for row in phases[-1]["blocks"]:
            for t in row["outliers"][:3]:
                token = [repr(t["text"]), str(t["document"]), str(t["position"])]
                rows.append([arm, str(row["block"]), *token, shown(t["rms"], ".1f"), str(t["channel"])])
    return _table("outliers", rows)


def transitions(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, found in summary["transitions"].items():
        for number, row in enumerate(found):
            stated = dict(enumerate(summary["paper"]["transitions"].get(arm, []))).get(number)
            back = ", ".join(MISSING if r is None else str(r) for r in row["recovery"])
            cells = [_interval(row[name], ".3f") for name in ("jump", "peak")]
            cells += [_interval(row["auc"][share], ".3f") for share in row["auc"]]
            paper = MISSING
            if stated is not None:
                auc = stated["auc"]
                paper = f"{stated['jump']:.3f} / {auc['2%']:.3f} / {auc['10%']:.3f} / {stated['recovery']:,} of 50,000"
            rows.append([arm, f"{row['from']} → {row['to']}", *cells, f"{back} of {row['steps']:,}", paper])
    return _table("transitions", rows)


def gradients(summary: dict[str, Any]) -> Table:
    rows = []
    for arm, found in summary["transitions"].items():
        for row in found:
            for part, norms in row["grad_norms"].items():
                cells = [shown(norms[name], ".3f") for name in ("before", "after", "end")]
                rows.append([arm, f"{row['from']} → {row['to']}", part, *cells])
    return _table("gradients", rows)


def ledger(summary: dict[str, Any]) -> Table:
    names = ("total_tokens", "unique_tokens", "active_layer_tokens")
    rows = [
        [
            r["arm"],
            " → ".join(map(str, r["layers"])),
            f"{r['steps']:,}",
            *(f"{r[name]:,}" for name in names),
            f"{r['train_flops']:.3e}",
            f"{r['seconds']:.0f}",
        ]
        for r in summary["ledger"]
    ]
    return _table("ledger", rows)


def matches(summary: dict[str, Any]) -> Table:
    names = ("total_tokens", "unique_tokens", "active_layer_tokens", "train_flops")
    rows = [
        [r["arm"], *(f"{r['of_grow'][name]:.3f}" for name in names)]
        for r in summary["ledger"]
        if r["of_grow"] and not r["arm"].endswith("-grow")
    ]
    return _table("matches", rows)


def build_tables(summary: dict[str, Any]) -> list[Table]:
    """Every table that the study's finished arms have rows for: the functions of this module that definitions.yaml names."""
    built = (globals()[name](summary) for name in DEFINITIONS["tables"])
    return [table for table in built if table.rows]
