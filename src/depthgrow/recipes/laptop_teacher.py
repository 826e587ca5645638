"""The teacher that ships with the package: Qwen3 architecture, 2.9M parameters, trained on this machine's packages."""

from __future__ import annotations

from depthgrow.architecture import Architecture
from depthgrow.data.tokens import DataConfig
from depthgrow.optim import OptimConfig
from depthgrow.phase import TrainConfig
from depthgrow.pretrain import Pretrain


def laptop_teacher() -> Pretrain:
    return Pretrain(
        name="laptop-teacher",
        arch=Architecture(
            family="qwen3",
            vocab_size=2048,
            hidden_size=128,
            intermediate_size=384,
            num_layers=12,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            qk_norm=True,
            max_positions=2048,
        ),
        data=DataConfig(corpora=("wiki", "docstrings:stdlib+numpy"), max_tokens=512, held_out_documents=400),
        optim=OptimConfig(peak_lr=3e-3, min_lr=3e-5, warmup_steps=200, beta2=0.98, weight_decay=0.05, clip_norm=1.0),
        train=TrainConfig(
            steps_per_phase=5600,
            batch_documents=8,
            micro_tokens=2048,
            eval_every=400,
            checkpoint_every=100,
            log_every=20,
        ),
    )
