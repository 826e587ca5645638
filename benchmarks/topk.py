"""What keeping the k most probable teacher tokens leaves out, for a finished arm: KL by bucket against the full KL.

    python benchmarks/topk.py [--study runs/laptop] [--arm post-grow]

On the study's held-out documents: the teacher's probability outside the k tokens, the KL between distributions over k + 1
outcomes (a lower bound of the full KL), the angle between the gradients of the hidden states, and bytes a target token.
"""

from __future__ import annotations

from pathlib import Path

import torch

from common import Quiet, arguments, save, show
from depthgrow.arms import finished_arm, load_student
from depthgrow.data.batches import group_by_length, pack
from depthgrow.head_loss import ObjectiveConfig, TeacherTargets, TopTargets, head_loss, top_targets
from depthgrow.prepare import prepare
from depthgrow.runtime import torch_dtype
from depthgrow.teacher.cache import row_bytes


def main() -> None:
    options = arguments(__doc__ or "", study="runs/laptop", arm="post-grow", documents=64)
    root = Path(options.study)
    study, key, seed = finished_arm(root, options.arm, None)
    prepared = prepare(study, Quiet())
    student = load_student(root, study, options.arm, key, seed, prepared.teacher)
    documents, arch = prepared.tokens.held_out, prepared.teacher.arch
    group = [i for g in group_by_length(documents, range(min(options.documents, len(documents))), 1) for i in g]
    batch = pack(documents, group)
    targets = prepared.teacher.targets(batch)
    with torch.no_grad():
        hidden_ND = student(batch.ids_N, batch.lengths)

    def found(said: TeacherTargets | TopTargets) -> tuple[float, torch.Tensor]:
        h_ND = hidden_ND.clone().requires_grad_()
        soft = ObjectiveConfig(alpha=1.0, gamma=0.0)
        result = head_loss(h_ND, student.lm_head.weight.detach(), batch.label_N, said, soft, batch.num_targets)
        result.loss.backward()
        assert h_ND.grad is not None
        return float(result.kl_sum) / batch.num_targets, h_ND.grad.flatten()

    full, full_gradient = found(targets)
    exact = row_bytes(arch, torch_dtype(study.teacher.dtype))
    rows = [{"k": 0, "left_out": 0.0, "kl": full, "cosine": 1.0, "bytes": exact}]
    for k in (4, 16, 64, 256, 1024):
        top = top_targets(targets.hidden_ND, targets.head_VD, k)
        kl, gradient = found(top)
        left_out = 1 - float(top.log_q_Nk.exp().sum(1).mean())
        cosine = float(torch.nn.functional.cosine_similarity(gradient, full_gradient, dim=0))
        rows.append(
            {"k": k, "left_out": left_out, "kl": kl, "cosine": cosine, "bytes": row_bytes(arch, torch.float32, k)}
        )
    show(
        f"{options.arm} of study {study.name}, {batch.num_targets:,} held-out target tokens",
        ["k", "left out", "KL, nats", "short of the full KL", "cosine of gradients", "bytes a token"],
        [
            [
                str(r["k"] or "all"),
                f"{100 * r['left_out']:.2f} %",
                f"{r['kl']:.4f}",
                f"{full - r['kl']:.4f}",
                f"{r['cosine']:.4f}",
                f"{r['bytes']:,}",
            ]
            for r in rows
        ],
    )
    save(options, rows)


if __name__ == "__main__":
    main()
