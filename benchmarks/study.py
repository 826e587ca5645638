"""A study's wall time with everything on, with each mechanism off in turn, and against a plain loop run arm by arm.

    python benchmarks/study.py [--recipe laptop-deep] [--steps 40] [--repeats 1]

The study is the recipe's own, each phase cut to ``steps`` steps (evaluations and checkpoints keep their distance in steps, at
most one phase). Off in turn: the teacher cache (live targets), the tree (every arm in a folder of its own), side by side (one
phase at a time, on as many threads as there are cores). The plain loop trains every phase of every arm with a live teacher,
two threads, right-padded batches and full logits; it makes no evaluations, checkpoints, diagnostics or report at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import loops
from common import arguments, in_turn, ready, save, short, show
from depthgrow.recipes import load_recipe
from depthgrow.runtime import num_cores
from depthgrow.study import plan_tree


def run(recipe: str, out: str, cache: str, flags: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "depthgrow", "study", recipe, "--out", out]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env=os.environ | {"XDG_CACHE_HOME": cache}, **quiet)


def timed(action: Callable[[], None]) -> dict[str, float]:
    clock = time.perf_counter()
    action()
    return {"seconds": time.perf_counter() - clock}


def main() -> None:
    options = arguments(__doc__ or "", recipe="laptop-deep", steps=40, repeats=1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    study = load_recipe(options.recipe)
    steps, train = min(options.steps, study.train.steps_per_phase), study.train
    flags: dict[str, Any] = {
        "train.steps_per_phase": steps,
        "train.eval_every": min(train.eval_every, steps),
        "train.checkpoint_every": min(train.checkpoint_every, steps),
        "optim.warmup_steps": min(study.optim.warmup_steps or 1, steps // 4),
    }
    cores = num_cores()
    with tempfile.TemporaryDirectory() as scratch:
        count = iter(range(1000))

        def ours(**more: Any) -> dict[str, float]:
            changed = {name.replace("__", "."): value for name, value in more.items()}
            place = f"{scratch}/{next(count)}"
            return timed(lambda: run(options.recipe, place, f"{place}-cache", flags | changed))

        def apart() -> None:
            cache = f"{scratch}/apart-cache-{next(count)}"
            for arm in study.arms:
                place = f"{scratch}/{next(count)}"
                run(options.recipe, place, cache, flags | {"arms": arm})

        def plain() -> None:
            torch.set_num_threads(cores)
            for arm in study.arms:
                if not arm.startswith("pre-"):
                    continue
                changed, prepared = plain_ready[arm]
                for node in plan_tree(changed, prepared.facts).nodes.values():
                    loops.plain(changed, prepared, node, cached=False)

        alone = {"train.threads": cores, "teacher.targets": "live"}
        plain_ready = {
            arm: ready(options.recipe, **short(steps, **{"arms": [arm]}, **alone))
            for arm in study.arms
            if arm.startswith("pre-")
        }
        twice = len(study.arms) / max(1, sum(arm.startswith("pre-") for arm in study.arms))
        ways = {
            "everything on": ours,
            "live teacher": lambda: ours(teacher__targets="live"),
            "no tree": lambda: timed(apart),
            "one phase at a time": lambda: ours(train__jobs=1, train__threads=cores),
            # Hugging Face has no post-norm counterpart: its arms cost what the pre arms do
            "plain loop, arm by arm": lambda: {"seconds": twice * timed(plain)["seconds"]},
        }
        found = in_turn(ways, options.repeats)
    base = found["everything on"]["seconds"]
    show(
        f"{options.recipe}, {len(study.arms)} arms, {steps} steps a phase, {cores} cores, teacher cache empty at the start",
        ["", "seconds", "of everything on"],
        [[name, f"{f['seconds']:.1f}", f"{f['seconds'] / base:.2f}"] for name, f in found.items()],
    )
    save(options, found)


if __name__ == "__main__":
    main()
