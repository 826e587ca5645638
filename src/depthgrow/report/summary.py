"""Every number of the report, computed once into one dictionary: report.json is this dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from depthgrow.files import UserError
from depthgrow.report.load import Run, StudyFiles
from depthgrow.report.statistics import across_documents, across_seeds, mean_over_seeds
from depthgrow.report.transitions import smoothed, transitions
from depthgrow.report.verdict import PAPER, claims, headline, sentence

SCHEMA = 3
CURRICULA = ("joint", "grow", "freeze", "single")
INTERACTION = {"post-grow": 1.0, "pre-grow": -1.0, "post-joint": -1.0, "pre-joint": 1.0}
GROWN = ("pre-grow", "post-grow")
BUDGET = {"total_tokens": "tokens", "active_layer_tokens": "active_layer_tokens", "train_flops": "flops"}


def summarise(study: StudyFiles) -> dict[str, Any]:
    """The report's content. Arms that are not finished are absent, and named in ``missing``."""
    arms = [arm for arm in study.arms if study.complete_seeds(arm)]
    summary = {
        "schema": SCHEMA,
        "study": study.config["name"],
        "folder": str(study.root),
        "verdict": study.config.get("verdict", True),
        "seeds": study.seeds,
        "arms": {arm: _arm(study, arm) for arm in arms},
        "deltas": {
            c: _contrast(study, {f"post-{c}": 1.0, f"pre-{c}": -1.0}) | {"paper": PAPER["delta"].get(c)}
            for c in CURRICULA
            if f"post-{c}" in study.arms and f"pre-{c}" in study.arms
        },
        "interaction": _contrast(study, INTERACTION) | {"paper": PAPER["interaction"]}
        if set(INTERACTION) <= set(study.arms)
        else None,
        "grid": _grid(study),
        "controls": _controls(study, arms),
        "interventions": _interventions(study),
        "noise_floor": {
            arm: _contrast(study, {arm: 1.0, arm.removesuffix("+reinit"): -1.0})
            for arm in study.arms
            if arm.endswith("+reinit") and arm.removesuffix("+reinit") in study.arms
        },
        "ce_per_phase": _ce_per_phase(study),
        "grown": _grown(study),
        "baselines": study.baselines,
        "curves": {arm: _curves(study.runs[arm, study.seeds[0]]) for arm in study.arms},
        "diagnostics": {arm: _diagnostics([study.runs[arm, s] for s in study.complete_seeds(arm)]) for arm in arms},
        "transitions": {arm: _transitions([study.runs[arm, s] for s in study.complete_seeds(arm)]) for arm in arms},
        "ledger": _ledgers(study, arms),
        "teacher": study.teacher,
        "data": {k: study.data.get(k) for k in ("corpora", "train", "held_out", "train_text_sha256", "skipped_files")},
        "config": study.config,
        "environment": next((p.environment for run in study.runs.values() for p in run.phases), {}),
        "nodes": {f"{arm} seed {seed}": [p.key for p in run.phases] for (arm, seed), run in study.runs.items()},
        "wall_seconds": sum(
            {p.key: p.done["counted"]["seconds"] for run in study.runs.values() for p in run.phases}.values()
        ),
        # block by block the paper's three stand beside three, not beside any other number
        "paper": PAPER if study.config["student"]["num_blocks"] == 3 else PAPER | {"blocks": {}, "transitions": {}},
    }
    summary |= _left_out(study)
    return summary | {"claims": claims(summary), "sentence": sentence(summary)}


def _left_out(study: StudyFiles) -> dict[str, list[str]]:
    """In words: runs that are not finished, that diverged, and phases of which lines of metrics are lost."""
    return {
        "missing": [
            f"{arm} seed {seed}: {len(run.phases)} of {run.planned} phases done"
            for (arm, seed), run in study.runs.items()
            if not run.complete and run.diverged is None
        ],
        "lost_lines": sorted(
            {
                f"{phase.folder.name}: {phase.lost_lines:,} of {phase.steps:,} steps have no line in metrics.jsonl"
                for run in study.runs.values()
                for phase in run.phases
                if phase.lost_lines
            }
        ),
        "diverged": [
            f"{arm} seed {seed}: phase {len(run.phases) + 1} of {run.planned}, {run.diverged}"
            for (arm, seed), run in study.runs.items()
            if run.diverged is not None
        ],
    }


def _contrast(
    study: StudyFiles,
    weights: Mapping[str, float],
    over: Mapping[str, float] | None = None,
    beside: Sequence[str] = (),
    at: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A weighted sum of arms' final held-out CE, or its ratio to a second one.

    Only seeds that all of its arms, and those of ``beside``, have finished count; with ``at``, those seeds or none.

    'estimate': per-document sums averaged over the seeds that all of the arms have, bootstrapped over documents;
    'values': one a seed of 'seeds'; 'across': their mean and interval, where there are two or more; 'reason': in words,
    where there is no valid answer.
    """
    arms = [*weights, *(over or {})]
    seeds = study.complete_seeds(*arms, *beside)
    result: dict[str, Any] = {
        "estimate": None,
        "across": None,
        "valid": False,
        "seeds": seeds,
        "values": [],
        "reason": None,
    }
    if at is not None and (left := len(set(at) - set(seeds))):
        waiting = [arm for arm in arms if not set(at) <= set(study.complete_seeds(arm))]
        return result | {"seeds": [], "reason": f"{', '.join(waiting)} not finished at {left} of {len(at)} seeds"}
    seeds = result["seeds"] = seeds if at is None else list(at)
    if not seeds:
        absent = [arm for arm in dict.fromkeys([*arms, *beside]) if not study.complete_seeds(arm)]
        lost = [
            arm for arm in absent if any(study.runs[arm, s].diverged for s in study.seeds if (arm, s) in study.runs)
        ]
        if lost:
            return result | {"reason": f"{', '.join(lost)} diverged"}
        return result | {"reason": f"{', '.join(absent) or 'no seed of all its arms'} not finished"}
    finals = {arm: [study.runs[arm, seed].phases[-1].documents() for seed in seeds] for arm in arms}
    broken = [arm for arm, found in finals.items() if any(not np.isfinite(f["ce"]).all() for f in found)]
    if broken:
        return result | {"reason": f"a loss of {', '.join(broken)} is not finite"}
    tokens = finals[arms[0]][0]["tokens"]
    if any(not np.array_equal(final["tokens"], tokens) for found in finals.values() for final in found):
        raise UserError(
            f"{study.root}: {', '.join(arms)} were evaluated on different documents; delete it and run again"
        )
    sums = {arm: mean_over_seeds([final["ce"] for final in found]) for arm, found in finals.items()}
    estimate = across_documents(tokens, sums, weights, over=over)
    if over is None:
        ce = {arm: [float(final["ce"].sum() / tokens.sum()) for final in found] for arm, found in finals.items()}
        values = [sum(w * ce[arm][i] for arm, w in weights.items()) for i in range(len(seeds))]
        result["values"] = values
        result["across"] = asdict(across_seeds(values)) if len(seeds) >= 2 else None
    return result | {"estimate": estimate.as_dict(), "valid": True}


def _grid(study: StudyFiles) -> dict[str, Any]:
    """The table of placements and curricula, every number from the same seeds, so that its rows subtract: the seeds at which
    all arms of the 2 x 2 that are finished at one are. An arm of another curriculum without one of these seeds has none."""
    plain = [
        arm for arm in study.arms if _split(arm)[1] in CURRICULA and not _split(arm)[2] and study.complete_seeds(arm)
    ]
    seeds = study.complete_seeds(*([arm for arm in plain if arm in INTERACTION] or plain))
    found = {
        "ce": {arm: _contrast(study, {arm: 1.0}, at=seeds) for arm in plain},
        "deltas": {
            c: _contrast(study, {f"post-{c}": 1.0, f"pre-{c}": -1.0}, at=seeds)
            for c in CURRICULA
            if {f"post-{c}", f"pre-{c}"} <= set(study.arms)
        },
        "interaction": _contrast(study, INTERACTION, at=seeds) if set(INTERACTION) <= set(study.arms) else None,
    }
    return {"seeds": seeds, **found}


def _over_seeds(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean of one value a seed, with its t-interval where there are two or more; all None where one is missing."""
    finite = [v for v in values if v is not None and np.isfinite(v)]
    if len(finite) < len(values) or not finite:
        return {"value": None, "low": None, "high": None}
    if len(finite) == 1:
        return {"value": finite[0], "low": None, "high": None}
    found = across_seeds(finite)
    return {"value": found.mean, "low": found.low, "high": found.high}


def _arm(study: StudyFiles, arm: str) -> dict[str, Any]:
    seeds = study.complete_seeds(arm)
    phases = [study.runs[arm, seed].phases[-1] for seed in seeds]
    finals = [phase.done["final"] for phase in phases]
    # null stands for a number that was not finite: the mean is none either
    mean = {name: float(np.mean([np.nan if f[name] is None else f[name] for f in finals])) for name in finals[0]}
    return mean | {
        "ppl": float(np.exp(mean["ce"])),
        "ce": _contrast(study, {arm: 1.0}),
        "layers": phases[0].active * study.config["student"]["layers_per_block"],
        "seeds": seeds,
        "paper_ce": PAPER["ce"].get(arm),
        "parameters": phases[0].done["parameters"],
    }


def _split(arm: str) -> tuple[str, str, str]:
    """'pre-grow+forward-norm' -> ('pre', 'grow', 'forward-norm')."""
    base, _, extra = arm.partition("+")
    placement, _, curriculum = base.partition("-")
    return placement, curriculum, extra


def _controls(study: StudyFiles, arms: list[str]) -> list[dict[str, Any]]:
    """Every finished plain arm that is neither of the 2 x 2: its CE against the grown arm of its placement."""
    rows = []
    for arm in arms:
        placement, curriculum, extra = _split(arm)
        grown = f"{placement}-grow"
        if grown in study.arms and curriculum != "grow" and not extra:
            stated = PAPER["ce"].get(arm), PAPER["ce"].get(grown)
            reference = None if None in stated else stated[0] - stated[1]
            ce = _contrast(study, {arm: 1.0}, beside=[grown])
            row = {"arm": arm, "against": grown, "paper": reference, "ce": ce}
            rows.append(row | _contrast(study, {arm: 1.0, grown: -1.0}))
    return rows


def _interventions(study: StudyFiles) -> list[dict[str, Any]]:
    """Each intervention arm against the plain arm, and that effect as a share of the gap to the other placement."""
    rows = []
    for arm in study.arms:
        placement, curriculum, name = _split(arm)
        draw = "+reinit" if name.endswith("+reinit") else ""  # compared within the same initial draw
        plain, other = (f"{p}-{curriculum}{draw}" for p in (placement, "post" if placement == "pre" else "pre"))
        if not name or name == "reinit" or plain not in study.arms:
            continue
        effect, gap = {arm: 1.0, plain: -1.0}, {other: 1.0, plain: -1.0}
        shared = [a for a in (arm, plain, other) if study.complete_seeds(a)]
        row: dict[str, Any] = {
            "arm": arm,
            "plain": plain,
            "other": other,
            "effect": _contrast(study, effect, beside=shared),
            "share": None,
        }
        row["gap"], row["no_share"] = _contrast(study, gap, beside=shared), "–"
        if row["gap"]["valid"] and row["effect"]["valid"]:
            if headline(row["gap"]).excludes_zero:
                row["share"] = _contrast(study, effect, over=gap)["estimate"]
            else:
                row["no_share"] = "no gap to explain"
        rows.append(row)
    return rows


def _ce_per_phase(study: StudyFiles) -> list[dict[str, Any]]:
    """CE at the end of each of grow's phases, mean over the seeds finished in both placements (else the first's finished
    phases), and the difference."""
    if not {"pre-grow", "post-grow"} <= set(study.arms):
        return []
    seeds = study.complete_seeds("pre-grow", "post-grow") or study.seeds[:1]
    runs = {p: [study.runs[f"{p}-grow", s].phases for s in seeds] for p in ("pre", "post")}
    rows = []
    for number in range(min(len(phases) for found in runs.values() for phases in found)):
        ends = {p: [phases[number] for phases in found] for p, found in runs.items()}
        documents = {p: [phase.documents() for phase in found] for p, found in ends.items()}
        if not all(np.isfinite(d["ce"]).all() for found in documents.values() for d in found):
            continue
        tokens = documents["pre"][0]["tokens"]
        sums = {p: mean_over_seeds([d["ce"] for d in found]) for p, found in documents.items()}
        ce = {p: float(value.sum() / tokens.sum()) for p, value in sums.items()}
        values = [
            float((b["ce"].sum() - a["ce"].sum()) / tokens.sum())
            for a, b in zip(documents["pre"], documents["post"], strict=True)
        ]
        delta = across_documents(tokens, sums, {"post": 1.0, "pre": -1.0}).as_dict()
        layers = ends["pre"][0].active * study.config["student"]["layers_per_block"]
        row = {"phase": number + 1, "layers": layers, **ce, "seeds": len(seeds)}
        rows.append(row | {"delta": _over_seeds(values) if len(seeds) >= 2 else delta})
    return rows


def _curves(run: Run) -> dict[str, Any]:
    """Over an arm's steps: held-out CE, training loss and gradient norms (bin means), and where blocks were appended."""
    steps: list[int] = []
    ce: list[float] = []
    appended: list[int] = []
    offset, active = 0, 0
    for phase in run.phases:
        if active and phase.active > active:
            appended.append(offset)
        for record in phase.evaluations():
            steps.append(offset + record["step"])
            ce.append(record["ce"])
        offset, active = offset + phase.steps, phase.active
    parts = [f"grad_norm block {b}" for b in range(active)]
    norms = {part.removeprefix("grad_norm "): smoothed(run, part) for part in parts}
    return {"steps": steps, "ce": ce, "transitions": appended, "loss": smoothed(run, "loss"), "grad_norms": norms}


def _diagnostics(runs: list[Run]) -> list[dict[str, Any]]:
    """Of each phase: its blocks' and layers' removal, angle and relative update over seeds; the scale of the stream (first
    seed)."""
    result = []
    for number in range(len(runs[0].phases)):
        found = [run.phases[number].diagnostics for run in runs]

        def over(kind: str, index: int, names: tuple[str, ...], found: list[Any] = found) -> dict[str, Any]:
            return {name: _over_seeds([f[kind][index][name] for f in found]) for name in names}

        names = ("removal", "angle", "relative_update")
        first = found[0]
        blocks = [
            {"block": b, "rms": row["rms"], "outliers": row["outliers"]} | over("blocks", b, names)
            for b, row in enumerate(first["blocks"])
        ]
        layers = [{"layer": i, "sink": row["sink"]} | over("layers", i, names) for i, row in enumerate(first["layers"])]
        result.append({"phase": number + 1, "tokens": first["tokens"], "blocks": blocks, "layers": layers})
    return result


def _transitions(runs: list[Run]) -> list[dict[str, Any]]:
    """Each transition's metrics over seeds; recovery is the first seed's list of steps, None where a phase ended first."""
    result = []
    for found in zip(*map(transitions, runs), strict=True):
        row = {k: found[0][k] for k in ("from", "to", "window", "steps", "grad_norms")}
        row |= {name: _over_seeds([f[name] for f in found]) for name in ("baseline", "jump", "peak")}
        row["auc"] = {share: _over_seeds([f["auc"][share] for f in found]) for share in found[0]["auc"]}
        result.append(row | {"recovery": [f["recovery"] for f in found]})
    return result


def _grown(study: StudyFiles) -> list[dict[str, Any]]:
    """Of each seed at which pre-grow and post-grow are finished, and of each of the two: every block's removal at the end,
    the std over tokens of the RMS after block 0 at each phase's end, and the jump of the loss at each append."""
    if not set(GROWN) <= set(study.arms):
        return []
    return [
        {"seed": seed} | {arm: _inside(study.runs[arm, seed]) for arm in GROWN} for seed in study.complete_seeds(*GROWN)
    ]


def _inside(run: Run) -> dict[str, list[float | None]]:
    ends = [phase.diagnostics["blocks"] for phase in run.phases]
    return {
        "removal": [row["removal"] for row in ends[-1]],
        "std": [blocks[0]["rms"]["all"].get("std") for blocks in ends],
        "jump": [row["jump"] for row in transitions(run)],
    }


def _ledgers(study: StudyFiles, arms: list[str]) -> list[dict[str, Any]]:
    """What each arm consumed (first seed), and that as a ratio to the grown arm of its placement."""
    rows = {}
    for arm in arms:
        run = study.runs[arm, study.complete_seeds(arm)[0]]
        counted = [phase.done["counted"] for phase in run.phases]
        spent = {name: sum(c[key] for c in counted) for name, key in BUDGET.items()}
        rows[arm] = {
            "arm": arm,
            "layers": [phase.active * study.config["student"]["layers_per_block"] for phase in run.phases],
            "steps": sum(phase.steps for phase in run.phases),
            "unique_tokens": run.phases[-1].done["unique_tokens"],
            "seconds": sum(c["seconds"] for c in counted),
        } | spent
    for arm, row in rows.items():
        grown = rows.get(f"{_split(arm)[0]}-grow")
        row["of_grow"] = {k: row[k] / grown[k] for k in (*BUDGET, "unique_tokens")} if grown else None
    return list(rows.values())
