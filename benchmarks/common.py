"""What every benchmark needs: a study made ready, measurements in turn, a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from depthgrow.config import override
from depthgrow.metrics import read_metrics
from depthgrow.prepare import Prepared, prepare
from depthgrow.recipes import load_recipe
from depthgrow.study import Node, Study, plan_tree
from depthgrow.trainer import run_phase

WARM = 4  # steps not timed


class Quiet:
    """A listener and a stop signal that do nothing."""

    requested = False

    def note(self, text: str) -> None: ...

    def begin(self, *work: Any) -> None: ...

    def progress(self, *facts: Any) -> None: ...


def arguments(doc: str, **defaults: Any) -> argparse.Namespace:
    """Options ``--name value`` with these defaults and types, and ``--out FILE.json``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def ready(recipe: str, **changes: Any) -> tuple[Study, Prepared]:
    """A recipe shortened to one phase without evaluations in between, its teacher, text and filled cache."""
    fixed = {"train.log_every": WARM, "data.held_out_documents": 16, "seeds": 1, "train.compile": False}
    study = override(load_recipe(recipe), fixed | changes)
    prepared = prepare(study, Quiet())
    prepared.fill(study, Quiet(), Quiet())
    return study, prepared


def short(steps: int, **changes: Any) -> dict[str, Any]:
    """Changes that make every phase ``steps`` long and evaluate at its end only."""
    lengths = {f"train.{name}": steps for name in ("steps_per_phase", "eval_every", "checkpoint_every")}
    return lengths | {"optim.warmup_steps": min(WARM, steps - 1)} | changes


def last_node(study: Study, prepared: Prepared) -> Node:
    """The last phase of the study's first arm."""
    tree = plan_tree(study, prepared.facts)
    return tree.nodes[tree.paths[study.arms[0], study.seed][-1]]


def timed_phase(study: Study, prepared: Prepared, node: Node) -> dict[str, float]:
    """The package's own loop: target tokens a second after the warm-up, first and last loss, share of time waited for data."""
    with tempfile.TemporaryDirectory() as folder:
        materials = prepared.materials(study, node.run.seed)
        run_phase(node.run, materials, Path(folder), None, stop=Quiet(), listener=Quiet())
        train = [r for r in read_metrics(Path(folder) / "metrics.jsonl") if r["kind"] == "train"]
    return rates(train)


def rates(train: list[dict[str, Any]]) -> dict[str, float]:
    """The same from a phase's training records, logged every WARM steps."""
    ends = [i for i, record in enumerate(train) if "tokens_per_second" in record]
    tokens = [sum(r["tokens"] for r in train[a + 1 : b + 1]) for a, b in pairwise(ends)]
    seconds = [n / train[b]["tokens_per_second"] for n, b in zip(tokens, ends[1:], strict=True)]
    waited = sum(train[b]["data_wait"] * s for b, s in zip(ends[1:], seconds, strict=True))
    return {
        "tokens_per_second": sum(tokens) / sum(seconds),
        "first_loss": train[0]["loss"],
        "last_loss": train[-1]["loss"],
        "data_wait": waited / sum(seconds),
    }


def in_turn(ways: dict[str, Callable[[], dict[str, float]]], repeats: int) -> dict[str, dict[str, float]]:
    """Every way once, then every way again ..: medians of what each returns, so that a slow minute meets all of them."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    return {name: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for name, runs in found.items()}


def median_seconds(action: Callable[[], Any], repeats: int) -> float:
    """The median time of ``action`` after one call that is not timed."""
    action()
    seconds = []
    for _ in range(repeats):
        clock = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - clock)
    return statistics.median(seconds)


def show(title: str, header: list[str], rows: list[list[Any]]) -> None:
    """A table on standard output; numbers are to be formatted already."""
    print(f"\n{title}")
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        first = row[0].ljust(widths[0])
        print("  ".join([first, *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]), flush=True)


def save(options: argparse.Namespace, rows: Any) -> None:
    """Write the figures where ``--out`` says, with what they were made by."""
    if options.out is None:
        return
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
    content = {"options": {k: str(v) for k, v in vars(options).items() if k not in ("out", "one")}, "machine": machine}
    content["rows"] = rows
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
