"""What a study would do and cost, in closed form: nothing is run, nothing is allocated, no teacher or text is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from depthgrow.architecture import Architecture
from depthgrow.config import fields_of, from_dict, to_dict
from depthgrow.curriculum import data_start
from depthgrow.files import UserError, cache_root, free_space
from depthgrow.ledger import Flops
from depthgrow.runtime import torch_dtype
from depthgrow.study import Facts, Study, parse_arm, plan_tree
from depthgrow.teacher.cache import pick_live, row_bytes
from depthgrow.teacher.sources import resolve_teacher
from depthgrow.trainer import step_work

# Shapes of teachers that a plan must know without a network: public facts of their config files.
KNOWN_SHAPES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("known_shapes.yaml").read_text())

# Mean target tokens per document: the published study's own (3.11B over 50,000 x 64), and the wiki lead sections'.
MEAN_TOKENS = {"paper": 3.1128e9 / (50_000 * 64), "laptop": 170.0, "smollm2": 120.0, "debug": 90.0}

PAPER_PARAMETERS = {"stack": 1.85e9, "without_head": 2.47e9, "total": 3.09e9}
PAPER_TOKENS = {"joint": (3.11e9, 3.11e9), "grow": (9.34e9, 3.11e9)}


def architecture_of(source: str) -> Architecture:
    """A teacher's shapes from its config alone."""
    if source in KNOWN_SHAPES:
        return from_dict(Architecture, KNOWN_SHAPES[source])
    try:
        return Architecture.from_hf(AutoConfig.from_pretrained(resolve_teacher(source), trust_remote_code=False))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"the config of teacher {source!r} cannot be read: {reason}") from None


def parameters(study: Study, arch: Architecture) -> dict[str, int]:
    """Parameters of the full-depth student by part, in closed form; equal for every placement."""
    layers = study.student.num_blocks * study.student.layers_per_block
    table = arch.vocab_size * arch.hidden_size
    stack = layers * arch.layer_parameters()
    norm = arch.hidden_size
    frozen = table if study.student.freeze_embedding else 0
    return {
        "stack": stack,
        "embedding": table,
        "head": table,
        "boundary_norm": norm,
        "without_head": stack + table + norm,
        "total": stack + 2 * table + norm,
        "trainable": stack + 2 * table + norm - frozen,
    }


def budget(study: Study, arm: str, arch: Architecture, mean_tokens: float) -> dict[str, Any]:
    """An arm's ledger in closed form, for documents of ``mean_tokens`` target tokens."""
    phases, flops = study.phases(arm), Flops.of(arch)
    batch_tokens = study.train.batch_documents * mean_tokens
    batch_pairs = study.train.batch_documents * mean_tokens * (mean_tokens + 1) / 2
    total = active = work = 0.0
    read: set[tuple[int, int]] = set()
    shard_batches = study.shard_documents // study.train.batch_documents
    for index, phase in enumerate(phases):
        step = step_work(phase, parse_arm(arm).placement, study.student.layers_per_block)
        total += phase.steps * batch_tokens
        active += phase.steps * batch_tokens * step["layers"]
        work += phase.steps * flops.train_step(int(batch_tokens), int(batch_pairs), **step)
        start = data_start(phases, index)
        if phase.steps >= shard_batches:
            read.update((start.shard, b) for b in range(shard_batches))
        else:
            read.update((start.shard, (start.batch + s) % shard_batches) for s in range(phase.steps))
    return {
        "arm": arm,
        "layers": [p.active * study.student.layers_per_block for p in phases],
        "steps": sum(p.steps for p in phases),
        "total_tokens": round(total),
        "unique_tokens": round(len(read) * batch_tokens),
        "active_layer_tokens": round(active),
        "train_flops": work,
    }


def memory(study: Study, arch: Architecture) -> dict[str, int]:
    """Bytes in the largest phase: weights, gradients and moments of the student in float32, and the teacher."""
    count = parameters(study, arch)
    table = arch.vocab_size * arch.hidden_size
    teacher = arch.num_layers * arch.layer_parameters() + 2 * table + arch.hidden_size
    return {
        "student_weights": 4 * count["total"],
        "gradients": 4 * count["trainable"],
        "moments": 8 * count["trainable"],
        "teacher": teacher * torch_dtype(study.teacher.dtype).itemsize,
    }


def make_plan(study: Study) -> dict[str, Any]:
    """Everything `depthgrow plan` shows."""
    arch = architecture_of(study.teacher.source)
    mean_tokens = min(MEAN_TOKENS.get(study.name, 170.0), study.data.max_tokens)
    tree = plan_tree(study, Facts(study.teacher.source, tuple(map(str, range(study.num_shards()))), "held-out", "any"))
    dtype = torch_dtype(study.teacher.dtype)
    trained, held_out = study.shard_documents * study.num_shards(), study.data.held_out_documents
    return {
        "study": study.name,
        "architecture": to_dict(arch),
        "parameters": parameters(study, arch),
        "mean_tokens_per_document": mean_tokens,
        "budgets": [budget(study, arm, arch, mean_tokens) for arm in study.arms],
        "nodes": [
            {
                "phase": i + 1,
                "layers": n.run.phase.active * study.student.layers_per_block,
                "steps": n.run.phase.steps,
                "trainable": n.run.phase.trainable,
                "arms": [f"{arm} seed {seed}" for arm, seed in n.users],
            }
            for n in tree.nodes.values()
            for i in (len(n.run.phases) - 1,)
        ],
        "phases_named": sum(len(n.users) for n in tree.nodes.values()),
        "memory_bytes": memory(study, arch),
        "teacher_cache_bytes": {
            # held-out targets are exact in every mode
            name: round(mean_tokens * (trained * row_bytes(arch, dtype, top) + held_out * row_bytes(arch, dtype)))
            for name, top in (("hidden", 0), ("topk", study.teacher.top))
        },
        "fields": dict(fields_of(study)),
    }


def plan(study: Study, *, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    content = make_plan(study)
    if as_json:
        print(json.dumps(content, indent=1))
        return 0
    console = Console(soft_wrap=True, highlight=False)
    arch = content["architecture"]
    console.print(
        f"study {study.name}: teacher {study.teacher.source} ({arch['family']}, hidden {arch['hidden_size']}, "
        f"{arch['num_layers']} layers, vocabulary {arch['vocab_size']:,})"
    )
    paper = study.name == "paper"
    table = Table("student parameters", "count", "", *(["paper says about"] if paper else []), box=None)
    for name, value in content["parameters"].items():
        stated = f"{PAPER_PARAMETERS[name] / 1e9:.2f}B" if name in PAPER_PARAMETERS else ""
        table.add_row(name.replace("_", " "), f"{value:,}", f"{value / 1e9:.3f}B", *([stated] if paper else []))
    console.print(table)
    console.print(f"budgets in tokens, at {content['mean_tokens_per_document']:.0f} target tokens a document:")
    table = Table(
        "arm", "layers", "steps", "total", "unique", "active-layer", "FLOPs", *(["paper"] if paper else []), box=None
    )
    for row in content["budgets"]:
        tokens = PAPER_TOKENS.get(row["arm"].partition("-")[2])
        extra = [f"{tokens[0] / 1e9:.2f}B, {tokens[1] / 1e9:.2f}B" if tokens else ""] if paper else []
        table.add_row(
            row["arm"],
            "→".join(map(str, row["layers"])),
            f"{row['steps']:,}",
            *(_short(row[k]) for k in ("total_tokens", "unique_tokens", "active_layer_tokens")),
            f"{row['train_flops']:.2e}",
            *extra,
        )
    console.print(table)
    console.print(f"tree: {content['phases_named']} phases named by arms, {len(content['nodes'])} to compute")
    for node in content["nodes"]:
        console.print(
            f"  phase {node['phase']}  {node['layers']} layers  {node['steps']:,} steps  {node['trainable']}  "
            f"{', '.join(node['arms'])}"
        )
    bytes_ = content["memory_bytes"]
    parts = ", ".join(f"{k.replace('_', ' ')} {v / 2**30:.2f} GiB" for k, v in bytes_.items())
    console.print(f"memory (without activations): {parts}")
    root = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    hidden, top = (content["teacher_cache_bytes"][name] for name in ("hidden", "topk"))
    picked = study.teacher.targets
    if picked == "auto":
        picked = f"auto: {'live' if pick_live(hidden, root)[0] else 'hidden'}"
    console.print(
        f"teacher targets: {picked}; on disk hidden states take {hidden / 2**30:.2f} GiB, the top {study.teacher.top} "
        f"{top / 2**30:.2f} GiB, live none; free {free_space(root) / 2**30:.0f} GiB"
    )
    console.print("options:")
    for name, value in content["fields"].items():
        console.print(f"  --{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}", markup=False)
    return 0


def _short(count: float) -> str:
    """3112800000 -> '3.113B'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3f}{unit}"
    return str(count)
