"""What a study would do and cost, in closed form: nothing is run, nothing is allocated, no teacher or text is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from depthgrow.architecture import Architecture
from depthgrow.config import fields_of, from_dict, to_dict
from depthgrow.curriculum import Phase, data_start
from depthgrow.data.lengths import Lengths, expected_lengths
from depthgrow.files import UserError, cache_root, free_space, read_yaml
from depthgrow.ledger import Flops
from depthgrow.phase import step_work
from depthgrow.runtime import torch_dtype
from depthgrow.study import Facts, Study, parse_arm, plan_tree
from depthgrow.teacher.cache import pick_live, row_bytes, teacher_work
from depthgrow.teacher.sources import resolve_teacher

# Shapes of teachers that a plan must know without a network: public facts of their config files.
KNOWN_SHAPES: dict[str, Any] = read_yaml(Path(__file__).with_name("known_shapes.yaml"))

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


def phase_cost(
    study: Study, phase: Phase, placement: str, arch: Architecture, lengths: Lengths, live: bool
) -> dict[str, float]:
    """What one phase reads and computes: 'total_tokens', 'active_layer_tokens', 'train_flops', 'teacher_flops'."""
    flops = Flops.of(arch)
    tokens, pairs = (study.train.batch_documents * mean for mean in (lengths.tokens, lengths.pairs))
    work = step_work(phase, placement, study.student, **teacher_work(arch, live=live, kept=study.teacher.kept))
    return {
        "total_tokens": phase.steps * tokens,
        "active_layer_tokens": phase.steps * tokens * work.layers,
        "train_flops": phase.steps * flops.student(tokens, pairs, work),
        "teacher_flops": phase.steps * flops.teacher(tokens, pairs, work),
    }


def _sum(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def budget(study: Study, arm: str, arch: Architecture, lengths: Lengths, live: bool) -> dict[str, Any]:
    """An arm's ledger in closed form, for documents of ``lengths``."""
    phases, placement = study.phases(arm), parse_arm(arm).placement
    spent = _sum([phase_cost(study, phase, placement, arch, lengths, live) for phase in phases])
    read: set[tuple[int, int]] = set()
    shard_batches = study.shard_documents // study.train.batch_documents
    for index, phase in enumerate(phases):
        start = data_start(phases, index)
        if phase.steps >= shard_batches:
            read.update((start.shard, b) for b in range(shard_batches))
        else:
            read.update((start.shard, (start.batch + s) % shard_batches) for s in range(phase.steps))
    return {
        "arm": arm,
        "layers": [p.active * study.student.layers_per_block for p in phases],
        "steps": sum(p.steps for p in phases),
        "total_tokens": round(spent["total_tokens"]),
        "unique_tokens": round(len(read) * study.train.batch_documents * lengths.tokens),
        "active_layer_tokens": round(spent["active_layer_tokens"]),
        "train_flops": spent["train_flops"],
        "teacher_flops": spent["teacher_flops"],
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
    lengths = expected_lengths(study.data.corpora, study.teacher.source, study.data.max_tokens)
    tree = plan_tree(study, Facts(study.teacher.source, tuple(map(str, range(study.num_shards()))), "held-out", "any"))
    cache = cache_bytes(study, arch, lengths)
    root = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    picked = study.teacher.targets
    if picked == "auto":
        picked = "live" if pick_live(cache["hidden"], root)[0] else "hidden"
    costs = {
        key: phase_cost(study, node.run.phase, node.run.placement, arch, lengths, picked == "live")
        for key, node in tree.nodes.items()
    }
    return {
        "study": study.name,
        "architecture": to_dict(arch),
        "parameters": parameters(study, arch),
        "mean_tokens_per_document": lengths.tokens,
        "mean_pairs_per_document": lengths.pairs,
        "lengths_basis": lengths.basis,
        "budgets": [budget(study, arm, arch, lengths, picked == "live") for arm in study.arms],
        "computed": _sum(list(costs.values())),
        "named": _sum([costs[key] for keys in tree.paths.values() for key in keys]),
        "nodes": [
            {
                "phase": len(n.run.phases),
                "layers": n.run.phase.active * study.student.layers_per_block,
                "steps": n.run.phase.steps,
                "trainable": n.run.phase.trainable,
                "arms": [f"{arm} seed {seed}" for arm, seed in n.users],
            }
            for n in tree.nodes.values()
        ],
        "phases_named": sum(len(n.users) for n in tree.nodes.values()),
        "memory_bytes": memory(study, arch),
        "targets": picked,
        "teacher_cache_bytes": cache,
        "fields": dict(fields_of(study)),
    }


def cache_bytes(study: Study, arch: Architecture, lengths: Lengths) -> dict[str, int]:
    """Bytes on disk of the teacher's targets, by what is kept; held-out targets are exact in every mode."""
    dtype = torch_dtype(study.teacher.dtype)
    trained, held_out = study.shard_documents * study.num_shards(), study.data.held_out_documents
    return {
        name: round(lengths.tokens * (trained * row_bytes(arch, dtype, top) + held_out * row_bytes(arch, dtype)))
        for name, top in (("hidden", 0), ("topk", study.teacher.top))
    }


def plan(study: Study, *, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    content = make_plan(study)
    if as_json:
        print(json.dumps(content, indent=1))
        return 0
    console = Console(soft_wrap=True, highlight=False, markup=False)
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
    _print_budgets(console, content, paper=paper)
    bytes_ = content["memory_bytes"]
    parts = ", ".join(f"{k.replace('_', ' ')} {v / 2**30:.2f} GiB" for k, v in bytes_.items())
    console.print(f"memory (without activations): {parts}")
    root = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    hidden, top = (content["teacher_cache_bytes"][name] for name in ("hidden", "topk"))
    chosen = f"auto: {content['targets']}" if study.teacher.targets == "auto" else study.teacher.targets
    console.print(
        f"teacher targets: {chosen}; on disk hidden states take {hidden / 2**30:.2f} GiB, the top {study.teacher.top} "
        f"{top / 2**30:.2f} GiB, live none; free {free_space(root) / 2**30:.0f} GiB"
    )
    console.print("options:")
    for name, value in content["fields"].items():
        console.print(f"  --{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}", markup=False)
    return 0


def _print_budgets(console: Console, content: dict[str, Any], *, paper: bool) -> None:
    """What every arm reads and computes, and what the tree saves by computing shared phases once."""
    mean = content["mean_tokens_per_document"]
    console.print(
        f"budgets in tokens, at {mean:.0f} target tokens and {content['mean_pairs_per_document'] / mean:.0f} attention "
        f"pairs a token in a document ({content['lengths_basis']}):"
    )
    table = Table(
        *("arm", "layers", "steps", "total", "unique", "active-layer", "student FLOPs", "teacher FLOPs"),
        *(["paper"] if paper else []),
        box=None,
    )
    for row in content["budgets"]:
        tokens = PAPER_TOKENS.get(row["arm"].partition("-")[2])
        extra = [f"{tokens[0] / 1e9:.2f}B, {tokens[1] / 1e9:.2f}B" if tokens else ""] if paper else []
        table.add_row(
            row["arm"],
            "→".join(map(str, row["layers"])),
            f"{row['steps']:,}",
            *(_short(row[k]) for k in ("total_tokens", "unique_tokens", "active_layer_tokens")),
            *(f"{row[k]:.2e}" for k in ("train_flops", "teacher_flops")),
            *extra,
        )
    console.print(table)
    spent = {name: content[name]["train_flops"] + content[name]["teacher_flops"] for name in ("computed", "named")}
    console.print(
        f"tree: {content['phases_named']} phases named by arms and seeds, {len(content['nodes'])} to compute: "
        f"{spent['computed']:.2e} FLOPs instead of {spent['named']:.2e}"
    )
    for node in content["nodes"]:
        console.print(
            f"  phase {node['phase']}  {node['layers']} layers  {node['steps']:,} steps  {node['trainable']}  "
            f"{', '.join(node['arms'])}"
        )


def _short(count: float) -> str:
    """3112800000 -> '3.113B'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3f}{unit}"
    return str(count)
