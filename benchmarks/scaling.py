"""What a step costs as one thing grows: exponent and constant of cost = c x^a, fitted to the logarithms, with a plot.

    python benchmarks/scaling.py [--tokens 512] [--repeats 5] [--plot scaling.png]

Tokens of a batch, depth, width, vocabulary and the spread of document lengths are varied one at a time around a student of
hidden size 128, 6 layers, vocabulary 2,048 and ``tokens`` tokens in four documents; cost is the time of one forward and
backward pass with the fused head (random weights and targets, pre placement). Arms and seeds are counted, not timed: phases to
compute by the study's tree over phases named by its arms.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from common import arguments, median_seconds, save, show
from depthgrow.architecture import Architecture
from depthgrow.config import override
from depthgrow.head_loss import ObjectiveConfig, TeacherTargets
from depthgrow.plan import architecture_of
from depthgrow.recipes import load_recipe
from depthgrow.student import Student, StudentConfig
from depthgrow.study import Facts, plan_tree

BASE = architecture_of("laptop")  # hidden 128, vocabulary 2,048


def widened(width: int) -> Architecture:
    return replace(
        BASE, hidden_size=width, intermediate_size=3 * width, num_heads=width // 32, num_kv_heads=width // 64
    )


def step_seconds(arch: Architecture, layers: int, lengths: list[int], repeats: int) -> float:
    student = Student(StudentConfig(num_blocks=1, layers_per_block=layers), arch, "pre", seed=0)
    student.append_blocks(1)
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    ids_N, label_N = (torch.randint(arch.vocab_size, (tokens,), generator=generator) for _ in range(2))
    targets = TeacherTargets(
        torch.randn(tokens, arch.hidden_size, generator=generator), student.lm_head.weight.detach()
    )

    def step() -> None:
        student.zero_grad(set_to_none=True)
        loss: Any = student.lm_head(student(ids_N, lengths), label_N, targets, ObjectiveConfig(), tokens)
        loss.loss.backward()

    return median_seconds(step, repeats)


def spread(factor: int, tokens: int) -> list[int]:
    """Eight documents of ``tokens`` tokens together, one ``factor`` times as long as each of the others."""
    small = tokens // (factor + 7)
    return [tokens - 7 * small, *[small] * 7] if small else [tokens]


def main() -> None:
    options = arguments(__doc__ or "", tokens=512, repeats=5, threads=1, plot="")
    torch.set_num_threads(options.threads)
    size = options.tokens
    even = [size // 4] * 4
    sweeps: dict[str, list[tuple[float, Any]]] = {
        "tokens": [(n * size // 4, (BASE, 6, [size // 4] * n)) for n in (1, 2, 4, 8, 16)],
        "document length": [(2 * size // n, (BASE, 6, [2 * size // n] * n)) for n in (16, 8, 4, 2, 1)],
        "depth": [(n, (BASE, n, even)) for n in (3, 6, 9, 12, 18)],
        "width": [(n, (widened(n), 6, even)) for n in (64, 128, 256, 512, 1024)],
        "vocabulary": [(n, (replace(BASE, vocab_size=n), 6, even)) for n in (1024, 4096, 16384, 49152, 151936)],
        "spread of lengths": [(n, (BASE, 6, spread(n, 2 * size))) for n in (1, 2, 4, 8, 16)],
    }
    rows: dict[str, Any] = {}
    for name, points in sweeps.items():
        x = [value for value, _ in points]
        y = [step_seconds(*shape, options.repeats) for _, shape in points]
        slopes = np.polyfit(np.log(x), np.log(y), 1)
        last = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
        rows[name] = {"x": x, "seconds": y, "exponent": slopes[0], "constant": math.exp(slopes[1]), "last": last}
    arms = (
        "pre-joint",
        "post-joint",
        "pre-grow",
        "post-grow",
        "pre-freeze",
        "post-freeze",
        "pre-single",
        "post-single",
    )
    for name, counts in (("arms", (2, 4, 6, 8)), ("seeds", (1, 2, 4, 8))):
        computed, named = [], []
        for n in counts:
            changes = {"arms": arms[:n]} if name == "arms" else {"seeds": n}
            tree = plan_tree(override(load_recipe("laptop-deep"), changes), Facts("t", ("s",), "h", "cpu"))
            computed.append(sum(n.run.phase.active * n.run.phase.steps for n in tree.nodes.values()))
            named.append(sum(n.run.phase.active * n.run.phase.steps * len(n.users) for n in tree.nodes.values()))
        slopes = np.polyfit(np.log(counts), np.log(computed), 1)
        rows[name] = {"x": list(counts), "computed": computed, "named": named, "exponent": slopes[0]}
        rows[name]["constant"] = math.exp(slopes[1])
        rows[name]["last"] = math.log(computed[-1] / computed[-2]) / math.log(counts[-1] / counts[-2])
    show(
        f"cost = c x^a, {options.threads} thread(s)",
        ["", "from", "to", "exponent a", "at the end", "c"],
        [
            [
                name,
                f"{row['x'][0]:,.0f}",
                f"{row['x'][-1]:,.0f}",
                f"{row['exponent']:.2f}",
                f"{row['last']:.2f}",
                f"{row['constant']:.3g} {'s' if 'seconds' in row else 'block-steps'}",
            ]
            for name, row in rows.items()
        ],
    )
    if options.plot:
        plot(rows, Path(options.plot))
    save(options, rows)


def plot(rows: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    for number, (name, row) in enumerate(rows.items(), 1):
        axes: Any = figure.add_subplot(2, 4, number)
        y = row.get("seconds") or row["computed"]
        fitted = [row["constant"] * x ** row["exponent"] for x in row["x"]]
        axes.loglog(row["x"], y, "o", color="#2f6db3")
        axes.loglog(row["x"], fitted, "-", color="#c8553d", linewidth=1)
        axes.set(title=f"{name}: exponent {row['exponent']:.2f}", ylabel="s" if "seconds" in row else "block-steps")
        axes.set_xticks(row["x"], [f"{x:,.0f}" for x in row["x"]], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
