"""Whether the device computes what the CPU does: one step's loss and gradients, per document and by its own attention kernel.

    python benchmarks/device_check.py

Exits with 1 where a relative error exceeds its bound (float32 1e-4; bfloat16 products 6e-2).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from depthgrow.head_loss import ObjectiveConfig, TeacherTargets
from depthgrow.plan import architecture_of
from depthgrow.runtime import pick_device
from depthgrow.student import Student, StudentConfig

ARCH = replace(architecture_of("laptop"), vocab_size=997, hidden_size=256, head_dim=64)


def gradients(placement: str, device: torch.device, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    student = Student(StudentConfig(num_blocks=2, layers_per_block=2), ARCH, placement, seed=0).to(device)
    student.append_blocks(2)
    generator = torch.Generator().manual_seed(1)
    lengths = [130, 7, 64, 211]
    ids_N, label_N = (torch.randint(997, (sum(lengths),), generator=generator).to(device) for _ in range(2))
    hidden = torch.randn(sum(lengths), 256, generator=generator).to(device, dtype)
    targets = TeacherTargets(hidden, student.lm_head.weight.detach().to(dtype))
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        h_ND = student(ids_N, lengths)
    result: Any = student.lm_head(h_ND.to(dtype), label_N, targets, ObjectiveConfig(), sum(lengths))
    result.loss.backward()
    return result.loss.item(), {n: p.grad.cpu() for n, p in student.named_parameters() if p.grad is not None}


def main() -> None:
    device, failed = pick_device("auto"), False
    for placement in ("pre", "post"):
        loss, expected = gradients(placement, torch.device("cpu"), torch.float32)
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
            found_loss, found = gradients(placement, device, dtype)
            whole = [torch.cat([g[n].flatten() for n in expected]) for g in (expected, found)]
            error = ((whole[1] - whole[0]).norm() / whole[0].norm()).item()
            bad = not (error < bound and abs(found_loss - loss) < bound * abs(loss))
            failed |= bad
            print(
                f"{placement:5} {device.type:5} {dtype!s:15} loss {found_loss:.5f} ({loss:.5f}), "
                f"gradients off by {error:.1e}{'  TOO FAR' if bad else ''}"
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
