"""The fused head against the plain one, and Liger's where it is installed: time, peak memory, error against float64.

    python benchmarks/head.py [--tokens 2048] [--hidden 576] [--vocab 1024,49152,151936] [--repeats 3] [--out head.json]

Both compute the same loss (0.7 KL + 0.3 CE, tau 1) and the same gradients of hidden states and head from the same float32
inputs. ``plain`` is the loop as people write it: full student and teacher logits, ``kl_div`` and ``cross_entropy``;
``liger`` is Liger's chunked loss, compiled as it comes. Each measurement is a process of its own; they alternate, and medians
are shown. Memory is the peak resident size of a first call over that after the inputs were made, time is of a second call.
One thread unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def measure(kind: str, tokens: int, hidden: int, vocab: int, scratch: Path) -> dict[str, float]:
    """Loss with its backward pass, once for memory and once for time; the gradients go into ``scratch``."""
    import torch
    import torch.nn.functional as F

    from depthgrow.head_loss import ObjectiveConfig, TeacherTargets, head_loss

    generator = torch.Generator().manual_seed(0)
    h_ND, teacher_ND = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
    head_VD = torch.randn(vocab, hidden, generator=generator) / hidden**0.5
    teacher_VD = head_VD + 0.1 * torch.randn(vocab, hidden, generator=generator) / hidden**0.5
    label_N = torch.randint(vocab, (tokens,), generator=generator)
    if kind == "reference":
        h_ND, teacher_ND, head_VD, teacher_VD = (x.double() for x in (h_ND, teacher_ND, head_VD, teacher_VD))
    h_ND.requires_grad_()
    head_VD.requires_grad_()

    def fused(part: slice) -> torch.Tensor:
        targets = TeacherTargets(teacher_ND[part], teacher_VD)
        return head_loss(h_ND[part], head_VD, label_N[part], targets, ObjectiveConfig(), tokens).loss

    def plain(part: slice) -> torch.Tensor:
        student = h_ND[part] @ head_VD.T
        with torch.no_grad():
            teacher = (teacher_ND[part] @ teacher_VD.T).softmax(-1)
        kl = F.kl_div(student.log_softmax(-1), teacher, reduction="sum")
        return (0.7 * kl + 0.3 * F.cross_entropy(student, label_N[part], reduction="sum")) / tokens

    def liger(part: slice) -> torch.Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.3, weight_soft_loss=0.7, beta=0.0)
        return loss(h_ND[part], head_VD, teacher_ND[part], teacher_VD, label_N[part])

    if kind == "reference":  # float64, in pieces that fit
        loss = 0.0
        for start in range(0, tokens, 128):
            piece = plain(slice(start, start + 128))
            piece.backward()
            loss += piece.item()
        seconds = peak = 0.0
    else:
        step = {"fused": fused, "plain": plain, "liger": liger}[kind]
        if kind == "liger":
            step(slice(0, tokens)).backward()  # compiles, which takes memory of its own: none is shown
        else:
            step(slice(0, 8)).backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(2):
            h_ND.grad = head_VD.grad = None
            clock = time.perf_counter()
            result = step(slice(0, tokens))
            result.backward()
            seconds = time.perf_counter() - clock
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
        loss = result.item()
    assert h_ND.grad is not None
    assert head_VD.grad is not None
    found = {"seconds": seconds, "peak_mib": peak, "loss": loss}
    torch.save((h_ND.grad, head_VD.grad), scratch / f"{kind}.pt")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", default="1024,49152,151936")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, vocab, scratch = options.one
        print(json.dumps(measure(kind, options.tokens, options.hidden, int(vocab), Path(scratch))))
        return
    import importlib.util

    import torch

    from common import save, show

    scratch = tempfile.TemporaryDirectory()

    def child(kind: str, vocab: int) -> dict[str, float]:
        shape = ["--tokens", str(options.tokens), "--hidden", str(options.hidden)]
        command = [sys.executable, __file__, *shape, "--one", kind, str(vocab), scratch.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    kinds = ["fused", "plain"] + ["liger"] * bool(importlib.util.find_spec("liger_kernel"))
    rows, cells = [], []
    for vocab in map(int, options.vocab.split(",")):
        reference = child("reference", vocab)
        exact = torch.load(Path(scratch.name) / "reference.pt")
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, found in runs.items():
                found.append(child(kind, vocab))
        for kind, found in runs.items():
            grads = torch.load(Path(scratch.name) / f"{kind}.pt")
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(grads, exact, strict=True)]
            row = {"vocab": vocab, "kind": kind, "gradient_error": max(errors)}
            row |= {k: statistics.median(f[k] for f in found) for k in ("seconds", "peak_mib")}
            row["loss_error"] = abs(found[0]["loss"] - reference["loss"]) / abs(reference["loss"])
            rows.append(row)
            memory = "" if kind == "liger" else f"{row['peak_mib']:,.0f}"
            errors_shown = f"{row['loss_error']:.0e} / {row['gradient_error']:.0e}"
            cells.append([f"{vocab:,}", kind, f"{row['seconds']:.2f}", memory, errors_shown])
    show(
        f"{options.tokens} tokens, hidden {options.hidden}, {os.environ['OMP_NUM_THREADS']} thread(s), float32",
        ["vocabulary", "head", "seconds", "peak MiB", "error of loss / gradients"],
        cells,
    )
    save(options, rows)


if __name__ == "__main__":
    main()
