"""The study's step at the published shape with random weights: tokens/s, model FLOP utilisation, peak memory.

    python benchmarks/paper_shape.py [--hidden 4096] [--teacher-layers 36] [--micro-tokens 16384] [--peak-tflops 989]

Nine layers are distilled from a random Qwen3 of the teacher's shape (8B parameters by default) on random documents whose
lengths are log-normal around the published mean of 973 tokens, by `depthgrow.trainer.run_phase` itself: once with the teacher
live at every step, once from a warm cache. Utilisation counts the student's products (the ledger's) over the device's peak in
bfloat16; the live teacher's own products are shown apart.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from common import WARM, Quiet, arguments, rates, save, short, show
from depthgrow.architecture import Architecture
from depthgrow.config import override
from depthgrow.data.batches import Batches
from depthgrow.data.classes import TokenClasses
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.ledger import Flops, StepWork, causal_pairs
from depthgrow.metrics import read_metrics
from depthgrow.phase import Materials
from depthgrow.recipes import load_recipe
from depthgrow.runtime import pick_device
from depthgrow.study import Facts, plan_tree
from depthgrow.teacher.cache import Rows, open_cache
from depthgrow.teacher.live import LiveTeacher
from depthgrow.trainer import run_phase


class Untold(LiveTeacher):
    """A teacher without a tokenizer: no token is special."""

    classes = TokenClasses(special_ids=[], delimiter_ids=[], text=str)


def random_documents(count: int, mean: int, vocab: int, longest: int, seed: int) -> TokenizedDocuments:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0, count), 16, longest).astype(int)
    return TokenizedDocuments.from_lists([rng.integers(vocab, size=n + 1) for n in lengths])


def main() -> None:
    options = arguments(
        __doc__ or "",
        hidden=4096,
        vocab=151_936,
        teacher_layers=36,
        steps=8,
        documents=64,
        mean=973,
        longest=8192,
        micro_tokens=16_384,
        dtype="bfloat16",
        peak_tflops=989.0,
    )
    device = pick_device("auto")
    heads = max(1, options.hidden // 128)
    arch = Architecture(
        family="qwen3",
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_layers=options.teacher_layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 4),
        head_dim=min(128, options.hidden),
        qk_norm=True,
        max_positions=options.longest,
        rope={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(arch.to_hf(arch.num_layers), dtype=dtype).requires_grad_(False)
    teacher = Untold(model.eval(), None, arch, "random")
    count = options.documents * options.steps
    documents = random_documents(count, options.mean, options.vocab, options.longest, seed=1)
    held_out = random_documents(4, options.mean, options.vocab, options.longest, seed=2)
    changes = short(options.steps, **{"arms": ["pre-joint"], "train.batch_documents": options.documents})
    changes |= {"train.dtype": options.dtype, "train.micro_tokens": options.micro_tokens, "train.log_every": WARM}
    study = override(load_recipe("paper"), changes)
    node = next(iter(plan_tree(study, Facts("random", ("s",), "h", device.type)).nodes.values()))
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        cache = open_cache(root, Rows(teacher, dtype), documents, options.micro_tokens)
        cache.fill(Quiet(), lambda done, total: None)
        for name, targets in (("live teacher", teacher.targets), ("cache", cache.targets)):
            batches = Batches(
                documents,
                shard_documents=count,
                batch_documents=options.documents,
                micro_tokens=options.micro_tokens,
                seed=study.seed,
            )
            materials = Materials(
                arch=arch,
                initial=teacher.initial,
                classes=teacher.classes,
                batches=batches,
                held_out=held_out,
                train_targets=targets,
                held_out_targets=teacher.targets,
                read_ahead=name == "cache",
            )
            folder = root / name
            folder.mkdir()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            run_phase(node.run, materials, folder, None, stop=Quiet(), listener=Quiet())
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
            found = rates([r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"])
            rows[name] = found | {"peak_gib": peak}
    lengths = documents.num_targets.tolist()
    flops, work, spent = Flops.of(arch), StepWork(layers=9, trained=9), (sum(lengths), causal_pairs(lengths))
    step_flops = (flops.student(*spent, work) + flops.teacher(*spent, work)) / sum(lengths)  # the teacher's logits too
    teacher_flops = flops.forward(*spent, arch.num_layers) / sum(lengths)
    for row in rows.values():
        row["tflops"] = row["tokens_per_second"] * step_flops / 1e12
        row["utilisation"] = row["tflops"] / options.peak_tflops
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    show(
        f"9 x {options.hidden}, vocabulary {options.vocab:,}, {options.dtype}, {where}; GFLOP a token: student "
        f"{step_flops / 1e9:.2f}, live teacher {teacher_flops / 1e9:.2f}",
        ["", "tokens/s", "student TFLOP/s", "utilisation", "peak GiB", "waits for data", "last loss"],
        [
            [
                name,
                f"{r['tokens_per_second']:,.0f}",
                f"{r['tflops']:.3g}",
                f"{100 * r['utilisation']:.1f} %",
                f"{r['peak_gib']:.1f}",
                f"{100 * r['data_wait']:.2f} %",
                f"{r['last_loss']:.4f}",
            ]
            for name, r in rows.items()
        ],
    )
    save(options, rows)


if __name__ == "__main__":
    main()
