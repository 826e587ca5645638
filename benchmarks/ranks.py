"""What torchrun costs on one rank, and two ranks of one thread against one process of two.

    python benchmarks/ranks.py [--recipe laptop-deep] [--arm pre-joint] [--steps 24] [--repeats 3]

Each measurement is a process of its own, torchrun's where it says ranks; two phases side by side, as a study runs them, are
shown beside it. Speed is in target tokens per second of all processes together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import arguments, in_turn, rates, save, short, show
from depthgrow.metrics import read_metrics


def start(recipe: str, arm: str, steps: int, threads: int, ranks: int, out: str) -> subprocess.Popen[bytes]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    fixed = short(steps) | {"train.log_every": 4, "data.held_out_documents": 16, "train.threads": threads}
    fixed |= {"train.jobs": 1, "seeds": 1}
    flags = [text for name, value in fixed.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", *launcher, "depthgrow", "train", recipe, "--arm", arm, "--out", out, *flags]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, **quiet)


def measure(recipe: str, arm: str, steps: int, threads: int, ranks: int, beside: int = 1) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as root:
        processes = [start(recipe, arm, steps, threads, ranks, f"{root}/{i}") for i in range(beside)]
        if any(process.wait() for process in processes):
            raise SystemExit("a run failed; try its command by hand: depthgrow train " + recipe)
        logs = [read_metrics(path) for path in sorted(Path(root).glob("*/nodes/*/metrics.jsonl"))]
        found = [rates([r for r in log if r["kind"] == "train"]) for log in logs]
    return {"tokens_per_second": sum(f["tokens_per_second"] for f in found), "last_loss": found[-1]["last_loss"]}


def main() -> None:
    options = arguments(__doc__ or "", recipe="laptop-deep", arm="pre-joint", steps=24, repeats=3)
    one = (options.recipe, options.arm, options.steps)
    measure(*one, threads=1, ranks=0)  # fills the caches
    ways = {
        "one process, 1 thread": lambda: measure(*one, threads=1, ranks=0),
        "1 rank, 1 thread": lambda: measure(*one, threads=1, ranks=1),
        "one process, 2 threads": lambda: measure(*one, threads=2, ranks=0),
        "2 ranks of 1 thread": lambda: measure(*one, threads=1, ranks=2),
        "2 phases side by side, 1 thread each": lambda: measure(*one, threads=1, ranks=0, beside=2),
    }
    found = in_turn(ways, options.repeats)
    base = found["one process, 1 thread"]["tokens_per_second"]
    rows = [
        [name, f"{f['tokens_per_second']:,.0f}", f"{f['tokens_per_second'] / base:.2f}", f"{f['last_loss']:.6f}"]
        for name, f in found.items()
    ]
    show(f"{options.recipe}, {options.arm}", ["", "tokens/s", "of one process, 1 thread", "last loss"], rows)
    save(options, found)


if __name__ == "__main__":
    main()
