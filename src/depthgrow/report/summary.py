"""Every number of the report, computed once into one dictionary: report.json is this dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthgrow.files import UserError
from depthgrow.report import paper
from depthgrow.report.load import Run, StudyFiles
from depthgrow.report.statistics import Estimate, across_seeds, mean_over_seeds, paired_bootstrap

SCHEMA = 1
INTERACTION = {"post-grow": 1.0, "pre-grow": -1.0, "post-joint": -1.0, "pre-joint": 1.0}


def summarise(study: StudyFiles) -> dict[str, Any]:
    """The report's content. Cells whose runs are not finished are absent, and named in ``missing``."""
    arms = {arm: _arm(study, arm) for arm in study.arms if study.complete_seeds(arm)}
    deltas = {
        curriculum: _delta(study, f"post-{curriculum}", f"pre-{curriculum}")
        for curriculum in ("joint", "grow", "freeze", "single")
        if study.complete_seeds(f"post-{curriculum}", f"pre-{curriculum}")
    }
    return {
        "schema": SCHEMA,
        "study": study.config["name"],
        "seeds": study.seeds,
        "arms": arms,
        "deltas": deltas,
        "interaction": _interaction(study),
        "across_seeds": _across_seeds(study),
        "ce_per_phase": _ce_per_phase(study),
        "validation_curves": {arm: _curve(study.runs[arm, study.seeds[0]]) for arm in study.arms},
        "diagnostics": {arm: _diagnostics(study.runs[arm, study.complete_seeds(arm)[0]]) for arm in arms},
        "ledger": [_ledger(study, arm) for arm in arms],
        "teacher": study.teacher,
        "data": {k: study.data.get(k) for k in ("corpora", "train", "held_out", "train_text_sha256", "skipped_files")},
        "config": study.config,
        "environment": next((p.environment for run in study.runs.values() for p in run.phases), {}),
        "nodes": {f"{arm} seed {seed}": [p.key for p in run.phases] for (arm, seed), run in study.runs.items()},
        "wall_seconds": sum(
            {p.key: p.done["counted"]["seconds"] for run in study.runs.values() for p in run.phases}.values()
        ),
        "missing": [
            f"{arm} seed {seed}: {len(run.phases)} of {run.planned} phases done"
            for (arm, seed), run in study.runs.items()
            if not run.complete
        ],
        "paper": {
            "source": paper.SOURCE,
            "ce": paper.CE,
            "delta": paper.DELTA,
            "interaction": paper.INTERACTION,
            "blocks": paper.BLOCKS,
        },
    } | {"sentence": sentence(study, deltas)}


def _final(run: Run) -> dict[str, NDArray[Any]]:
    return run.phases[-1].documents()


def _estimate(study: StudyFiles, contrast: Mapping[str, float], quantity: str = "ce") -> Estimate | None:
    """A contrast of arms' final values, per-document sums averaged over the seeds all of them have; None if none has."""
    seeds = study.complete_seeds(*contrast)
    if not seeds:
        return None
    finals = {arm: [_final(study.runs[arm, seed]) for seed in seeds] for arm in contrast}
    tokens = next(iter(finals.values()))[0]["tokens"]
    sums = {arm: mean_over_seeds([final[quantity] for final in found]) for arm, found in finals.items()}
    if any(not np.isfinite(value).all() for value in sums.values()):
        return None
    if any(not np.array_equal(final["tokens"], tokens) for found in finals.values() for final in found):
        raise UserError(
            f"{study.root}: {', '.join(contrast)} were evaluated on different documents; delete it and run again"
        )
    return paired_bootstrap(tokens, sums, contrast)


def _as_dict(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate.as_dict()


def _arm(study: StudyFiles, arm: str) -> dict[str, Any]:
    seeds = study.complete_seeds(arm)
    finals = [study.runs[arm, seed].phases[-1].done["final"] for seed in seeds]
    # null stands for a number that was not finite: the mean is none either
    mean = {name: float(np.mean([np.nan if f[name] is None else f[name] for f in finals])) for name in finals[0]}
    layers = study.runs[arm, seeds[0]].phases[-1].active * study.config["student"]["layers_per_block"]
    return mean | {
        "ce": _as_dict(_estimate(study, {arm: 1.0})) or {"value": mean["ce"], "low": mean["ce"], "high": mean["ce"]},
        "layers": layers,
        "seeds": seeds,
        "valid": _estimate(study, {arm: 1.0}) is not None,
        "paper_ce": paper.CE.get(arm),
        "parameters": study.runs[arm, seeds[0]].phases[-1].done["parameters"],
    }


def _delta(study: StudyFiles, post: str, pre: str) -> dict[str, Any]:
    estimate = _estimate(study, {post: 1.0, pre: -1.0})
    curriculum = post.partition("-")[2]
    reference = paper.SINGLE_DELTA if curriculum == "single" else paper.DELTA.get(curriculum)
    seeds = study.complete_seeds(post, pre)
    return {"estimate": _as_dict(estimate), "valid": estimate is not None, "paper": reference, "seeds": seeds}


def _interaction(study: StudyFiles) -> dict[str, Any] | None:
    if not study.complete_seeds(*INTERACTION):
        return None
    estimate = _estimate(study, INTERACTION)
    return {"estimate": _as_dict(estimate), "valid": estimate is not None, "paper": paper.INTERACTION}


def _across_seeds(study: StudyFiles) -> dict[str, Any]:
    """Each difference and the interaction, one value a seed; only where two seeds or more are finished and finite."""
    contrasts: dict[str, dict[str, float]] = {
        f"Δ {c}": {f"post-{c}": 1.0, f"pre-{c}": -1.0} for c in ("joint", "grow", "freeze", "single")
    }
    contrasts["interaction"] = dict(INTERACTION)
    found = {}
    for name, contrast in contrasts.items():
        values = []
        for seed in study.complete_seeds(*contrast):
            finals = {arm: study.runs[arm, seed].phases[-1].done["final"]["ce"] for arm in contrast}
            values.append(sum(w * finals[a] if finals[a] is not None else np.nan for a, w in contrast.items()))
        if len(values) >= 2 and np.isfinite(values).all():
            found[name] = asdict(across_seeds(values))
    return found


def _ce_per_phase(study: StudyFiles) -> list[dict[str, Any]]:
    """Grow's phases at the first seed that has both placements: CE of each at the phase's end, and their difference."""
    both = [s for s in study.seeds if all((f"{p}-grow", s) in study.runs for p in ("pre", "post"))]
    if not both:
        return []
    pre, post = (study.runs[f"{p}-grow", both[0]].phases for p in ("pre", "post"))
    rows = []
    for number, (a, b) in enumerate(zip(pre, post, strict=False), 1):
        first, second = a.documents(), b.documents()
        if not (np.isfinite(first["ce"]).all() and np.isfinite(second["ce"]).all()):
            continue
        sums = {"pre": first["ce"], "post": second["ce"]}
        delta = paired_bootstrap(first["tokens"], sums, {"post": 1.0, "pre": -1.0})
        layers = a.active * study.config["student"]["layers_per_block"]
        ce = {"pre": a.done["final"]["ce"], "post": b.done["final"]["ce"]}
        rows.append({"phase": number, "layers": layers, **ce, "delta": delta.as_dict(), "seed": both[0]})
    return rows


def _curve(run: Run) -> dict[str, list[Any]]:
    steps: list[int] = []
    ce: list[float] = []
    transitions: list[int] = []
    offset = 0
    for phase in run.phases:
        if offset and phase.active > run.phases[0].active:
            transitions.append(offset)
        for record in phase.evaluations():
            steps.append(offset + record["step"])
            ce.append(record["ce"])
        offset += phase.steps
    return {"steps": steps, "ce": ce, "transitions": transitions}


def _diagnostics(run: Run) -> list[dict[str, Any]]:
    """Of each phase: its blocks' removal, angle and relative update, and the scale of the stream they send on."""
    phases = []
    for number, phase in enumerate(run.phases, 1):
        blocks = []
        for row in phase.diagnostics["blocks"]:
            scale = {
                kind: {name: values.get(name) for name in ("count", "mean", "std", "kurtosis", "max")}
                for kind, values in row["rms"].items()
            }
            blocks.append({k: row[k] for k in ("block", "removal", "angle", "relative_update")} | {"rms": scale})
        found = {name: phase.diagnostics[name] for name in ("tokens", "layers")}
        phases.append({"phase": number, "blocks": blocks, **found})
    return phases


def _ledger(study: StudyFiles, arm: str) -> dict[str, Any]:
    run = study.runs[arm, study.complete_seeds(arm)[0]]
    counted = [phase.done["counted"] for phase in run.phases]
    return {
        "arm": arm,
        "phases": len(run.phases),
        "layers": [phase.active * study.config["student"]["layers_per_block"] for phase in run.phases],
        "steps": sum(phase.steps for phase in run.phases),
        "total_tokens": sum(c["tokens"] for c in counted),
        "unique_tokens": run.phases[-1].done["unique_tokens"],
        "active_layer_tokens": sum(c["active_layer_tokens"] for c in counted),
        "train_flops": sum(c["flops"] for c in counted),
        "seconds": sum(c["seconds"] for c in counted),
    }


def _headline(values: dict[str, Any], seeds: dict[str, Any] | None) -> Estimate:
    """Across seeds where there are several, since they move a result more than documents do; else over documents."""
    if seeds is not None:
        return Estimate(seeds["mean"], seeds["low"], seeds["high"])
    return Estimate(**values["estimate"])


def _clause(name: str, delta: dict[str, Any], seeds: dict[str, Any] | None) -> str:
    if not delta["valid"]:
        return f"under {name} the comparison is invalid (a loss is not finite)"
    estimate = _headline(delta, seeds)
    if not estimate.excludes_zero:
        return f"under {name} the two cannot be told apart ({estimate.value:+.3f} ± {estimate.half_width:.3f})"
    ahead = "post-norm" if estimate.value < 0 else "pre-norm"
    return f"under {name} {ahead} is ahead by {abs(estimate.value):.3f} ± {estimate.half_width:.3f} nats per token"


def sentence(study: StudyFiles, deltas: dict[str, Any]) -> str:
    """The finding in plain words, with what it rests on."""
    across = _across_seeds(study)
    named = [name for name in ("grow", "joint", "freeze") if name in deltas]
    if not named:
        return "Nothing to compare yet: no curriculum has both placements finished."
    text = "; ".join(_clause(name, deltas[name], across.get(f"Δ {name}")) for name in named)
    interaction = _interaction(study)
    if interaction is not None and interaction["valid"]:
        estimate = _headline(interaction, across.get("interaction"))
        if not estimate.excludes_zero:
            verdict = "not distinguishable from none"
        elif (estimate.value < 0) == (paper.INTERACTION < 0):
            verdict = f"the same sign as the paper's {paper.INTERACTION:+.3f}"
        else:
            verdict = f"the opposite sign of the paper's {paper.INTERACTION:+.3f}"
        text += f". The interaction is {estimate.value:+.3f} ± {estimate.half_width:.3f}, {verdict}"
    counts = sorted({len(deltas[name]["seeds"]) for name in named})
    basis = "over held-out documents; one seed: how far another initialisation would move it is not measured"
    if counts != [1]:
        basis = f"across {' or '.join(map(str, counts))} seeds"
    return f"{text[0].upper()}{text[1:]} (95 % {basis})."
