"""Ways of computing the same step that differ by a few per cent: which operations a layer is made of.

    python benchmarks/layer.py [--recipe laptop-deep] [--arm pre-joint] [--steps 10] [--rounds 15] [--threads 1]

Every step is made in each way before the next step is, since a machine's speed drifts by more than what is looked for;
times are the sums over steps of the median (and of the least) over rounds. All ways must give the same first loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from common import arguments, last_node, ready, save, short, show
from depthgrow import student as module
from depthgrow.curriculum import DataPosition
from depthgrow.optim import NamedAdamW
from depthgrow.parallel import set_layers
from depthgrow.phase import build_student

OURS = (module.RMSNorm.forward, module.Layout.rotate)


def rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * F.rms_norm(x, norm.weight.shape, eps=norm.eps)


def rotate_halves(layout: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    if not hasattr(layout, "unsigned_N1d"):  # once a pass, as the tables themselves
        layout.unsigned_N1d = layout.sin_N1d.chunk(2, dim=-1)[1].repeat(1, 1, 2)
    return x * layout.cos_N1d + torch.cat((-second, first), dim=-1) * layout.unsigned_N1d


def main() -> None:
    options = arguments(__doc__ or "", recipe="laptop-deep", arm="pre-joint", steps=10, rounds=15, threads=1)
    transformers.utils.logging.disable_progress_bar()
    study, prepared = ready(
        options.recipe, **short(options.steps, **{"arms": [options.arm], "train.threads": options.threads})
    )
    run, materials = last_node(study, prepared).run, prepared.materials(study, study.seed)
    torch.set_num_threads(options.threads)
    student = build_student(run, materials, torch.device("cpu"))
    optimizer = NamedAdamW(student.named_parameters(), run.optim)
    batches = [materials.batches.global_batch(DataPosition(0, step), 0, 1) for step in range(options.steps)]
    targets = [[materials.train_targets(batch) for batch in step] for step in batches]
    tokens = [sum(batch.num_targets for batch in step) for step in batches]

    def make(step: int) -> float:
        loss = 0.0
        for batch, target in zip(batches[step], targets[step], strict=True):
            h_ND = student(batch.ids_N, batch.lengths)
            result = student.lm_head(h_ND, batch.label_N, target, run.objective, tokens[step])
            result.loss.backward()
            loss += result.loss.item()
        optimizer.step(0.0, torch.zeros(()))  # the weights stay, so that all ways do the same work
        return loss

    def layers(norm: Any, rotate: Any, compiled: bool = False) -> Callable[[], None]:
        def enter() -> None:
            module.RMSNorm.forward, module.Layout.rotate = norm, rotate
            for layer, forward in zip(student.layers, forwards[compiled], strict=True):
                layer.forward = forward

        return enter

    forwards = {}
    for compiled in (True, False):
        set_layers(student, recompute=False, compiled=compiled)
        forwards[compiled] = [layer.forward for layer in student.layers]
    ways = {
        "ours": layers(*OURS),
        "norm by F.rms_norm": layers(rms_norm, OURS[1]),
        "rotary from halves": layers(OURS[0], rotate_halves),
        "both": layers(rms_norm, rotate_halves),
        "ours, compiled": layers(*OURS, compiled=True),
    }
    losses, compiling = {}, 0.0
    for name, enter in ways.items():
        enter()
        clock = time.perf_counter()
        losses[name] = make(0)
        compiling = time.perf_counter() - clock  # of the last way
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in tokens] for name in ways}
    for number in range(options.rounds):
        turn = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for step in range(options.steps):
            for name in turn:
                ways[name]()
                clock = time.perf_counter()
                make(step)
                seconds[name][step].append(time.perf_counter() - clock)
    found = {
        name: {
            "median_ms": 1e3 * sum(map(statistics.median, steps)) / options.steps,
            "least_ms": 1e3 * sum(map(min, steps)) / options.steps,
            "first_loss": losses[name],
        }
        for name, steps in seconds.items()
    }
    ours = found["ours"]
    show(
        f"{options.recipe}, {options.arm}, {options.threads} thread(s), {options.rounds} rounds of {options.steps} steps",
        ["", "median ms a step", "speed, of ours", "least ms a step", "speed, of ours", "first loss"],
        [
            [
                name,
                f"{f['median_ms']:.1f}",
                f"{ours['median_ms'] / f['median_ms']:.3f}",
                f"{f['least_ms']:.1f}",
                f"{ours['least_ms'] / f['least_ms']:.3f}",
                f"{f['first_loss']:.6f}",
            ]
            for name, f in found.items()
        ],
    )
    print(f"compiling took {compiling:.0f} s")
    save(options, {"ways": found, "compiling_seconds": compiling})


if __name__ == "__main__":
    main()
