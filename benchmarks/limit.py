"""How near a training step is to what the machine's matrix products allow, and where the rest of its time goes.

    python benchmarks/limit.py [--recipe laptop-deep] [--arm pre-joint] [--steps 12] [--threads 1] [--repeats 15]

The products of a step (forward, gradient of the input, gradient of the weight, of every linear map and of both heads) are
timed alone, at the same shapes, in the same process; attention's products are counted in the step's FLOPs and taken at the
same rate. The share is (FLOPs of the step / its time) over (FLOPs of the products / their time). Then a profile by part.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from common import Quiet, arguments, in_turn, last_node, median_seconds, ready, save, short, show, timed_phase
from depthgrow.curriculum import DataPosition
from depthgrow.ledger import Flops, causal_pairs
from depthgrow.phase import step_work
from depthgrow.trainer import run_phase

PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("scaled_dot_product",),
    "optimizer": ("adamw", "Optimizer", "foreach"),
    "softmax, cross-entropy, KL": ("softmax", "aten::exp", "amax", "gather", "scatter", "xlogy"),
    "element-wise (norms, rotary, SwiGLU, residual)": (
        "aten::mul",
        "aten::add",
        "aten::sub",
        "aten::div",
        "aten::pow",
        "rsqrt",
        "aten::sum",
        "aten::mean",
        "aten::neg",
        "silu",
        "rms_norm",
        "vector_norm",
        "UnitRMS",
        "addcmul",
        "aten::roll",
        "aten::cat",
    ),
    "copies, allocation, views": (
        "copy_",
        "empty",
        "zero",
        "fill_",
        "view",
        "transpose",
        "slice",
        "as_strided",
        "split",
    ),
}


def product_seconds(shapes: list[tuple[int, int, int]], threads: int) -> tuple[float, float]:
    """(FLOPs, seconds) of the three products of every linear map (tokens, in, out), each timed alone."""
    torch.set_num_threads(threads)
    flops = seconds = 0.0
    for tokens, size_in, size_out in shapes:
        x, w, g = torch.randn(tokens, size_in), torch.randn(size_out, size_in), torch.randn(tokens, size_out)
        for product in (lambda x=x, w=w: x @ w.T, lambda g=g, w=w: g @ w, lambda g=g, x=x: g.T @ x):
            flops += 2 * tokens * size_in * size_out
            seconds += median_seconds(product, 7)
    return flops, seconds


def main() -> None:
    options = arguments(__doc__ or "", recipe="laptop-deep", arm="pre-joint", steps=12, repeats=15, threads=1)
    transformers.utils.logging.disable_progress_bar()
    study, prepared = ready(
        options.recipe, **short(options.steps, **{"arms": [options.arm], "train.threads": options.threads})
    )
    node, arch = last_node(study, prepared), prepared.teacher.arch
    batches = prepared.materials(study, study.seed).batches
    lengths = [batches.lengths(DataPosition(0, step)) for step in range(options.steps)]
    tokens = sum(map(sum, lengths)) / options.steps
    pairs = sum(map(causal_pairs, lengths)) / options.steps
    work, flops = step_work(node.run.phase, node.run.placement, study.student), Flops.of(arch)
    step_flops = flops.student(tokens, pairs, work) + flops.teacher(tokens, pairs, work)
    query, key = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, wide = arch.hidden_size, arch.intermediate_size
    layer = [
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, wide),
        (hidden, wide),
        (wide, hidden),
    ]
    shapes = [(round(tokens), *pair) for pair in [*layer, (hidden, arch.vocab_size)]]
    ways: dict[str, Any] = {
        "step": lambda: timed_phase(study, prepared, node),
        "products": lambda: dict(zip(("flops", "seconds"), product_seconds(shapes, options.threads), strict=True)),
    }
    found = in_turn(ways, options.repeats)
    step_rate = step_flops * found["step"]["tokens_per_second"] / tokens
    product_rate = found["products"]["flops"] / found["products"]["seconds"]
    row = {
        "tokens_per_step": tokens,
        "flops_per_token": step_flops / tokens,
        "tokens_per_second": found["step"]["tokens_per_second"],
        "step_gflops": step_rate / 1e9,
        "product_gflops": product_rate / 1e9,
        "share": step_rate / product_rate,
        "data_wait": found["step"]["data_wait"],
    }
    show(
        f"{options.recipe}, {options.arm}, {options.threads} thread(s)",
        ["", "tokens/step", "MFLOP/token", "tokens/s", "GFLOP/s", "products alone", "share", "waits for data"],
        [
            [
                options.recipe,
                f"{tokens:.0f}",
                f"{row['flops_per_token'] / 1e6:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['step_gflops']:.0f}",
                f"{row['product_gflops']:.0f}",
                f"{100 * row['share']:.0f} %",
                f"{100 * row['data_wait']:.2f} %",
            ]
        ],
    )
    parts = parts_of_a_step(study, prepared, node)
    total = sum(parts.values())
    show("where a step's time goes", ["", "share"], [[k, f"{100 * v / total:.1f} %"] for k, v in parts.items()])
    save(options, row | {"parts": {k: v / total for k, v in parts.items()}})


def parts_of_a_step(study: Any, prepared: Any, node: Any) -> dict[str, float]:
    """Self time by part, of a whole phase under the profiler, its evaluation and files included under 'other'."""
    with tempfile.TemporaryDirectory() as folder:
        materials = prepared.materials(study, node.run.seed)
        clock = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run_phase(node.run, materials, Path(folder), None, stop=Quiet(), listener=Quiet())
        wall = (time.perf_counter() - clock) * 1e6
    parts = dict.fromkeys(PARTS, 0.0)
    seen = 0.0
    for event in profiler.key_averages():
        for part, names in PARTS.items():
            if any(name in event.key for name in names):
                parts[part] += event.self_cpu_time_total
                seen += event.self_cpu_time_total
                break
    return parts | {"other (autograd, Python, files)": max(0.0, wall - seen)}


if __name__ == "__main__":
    main()
