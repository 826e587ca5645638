"""What can be done with a trained arm or a model: load, evaluate, diagnose, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import torch

from depthgrow.console import Console
from depthgrow.data.tokens import DataConfig, boundary_ids, prepare_tokens
from depthgrow.diagnostics import diagnose
from depthgrow.evaluate import Evaluation, evaluate_model
from depthgrow.export.hf import Boundaries, save_hf
from depthgrow.files import UserError, as_path, cache_root, read_done, read_json, shown, unknown
from depthgrow.phase import TrainConfig, load_weights
from depthgrow.prepare import Prepared, prepare_held_out
from depthgrow.runner import final_checkpoint
from depthgrow.runtime import StopSignal, pick_device, torch_dtype
from depthgrow.student import Student, StudentConfig
from depthgrow.study import Study, Workspace, load_study, parse_arm
from depthgrow.teacher.live import LiveTeacher
from depthgrow.teacher.sources import resolve_teacher
from depthgrow.trainer import evaluate_student, hidden_states

CARD = Path(__file__).parent / "export" / "card.md.j2"


def finished_arm(root: Path, arm: str, seed: int | None) -> tuple[Study, str, int]:
    """The study of a folder, the key of the arm's last node, and its seed (the first there is, unless given).

    Raises:
        UserError: no such arm or seed in the folder, or it is not finished.
    """
    study, arms = load_study(root)
    if arm not in arms:
        raise unknown("arm", arm, arms)
    seeds = arms[arm]
    chosen = str(seed) if seed is not None else next(iter(seeds))
    if chosen not in seeds:
        raise UserError(f"arm {arm} has no seed {chosen} in {root} (it has {', '.join(seeds)})")
    workspace = Workspace(root)
    lost = next((key for key in seeds[chosen] if workspace.state(key) == "diverged"), None)
    if lost is not None:
        step = read_done(workspace.node(lost))["diverged"]["step"]
        raise UserError(f"arm {arm} seed {chosen} of {root} diverged (step {step} of {lost}): it has no final student")
    if not all(workspace.is_done(key) for key in seeds[chosen]):
        raise UserError(
            f"arm {arm} seed {chosen} of {root} is not finished; run the study again, then export or evaluate it"
        )
    return study, seeds[chosen][-1], int(chosen)


def load_student(root: Path, study: Study, arm: str, key: str, seed: int, teacher: LiveTeacher) -> Student:
    """The arm's final student on the CPU."""
    folder = Workspace(root).node(key)
    checkpoint = final_checkpoint(folder)
    identity = read_json(folder / "config.json")["identity"]
    if identity["teacher"] != teacher.fingerprint:
        raise UserError(
            f"{root} was trained with another teacher {study.teacher.source!r} than is found now; "
            "its frozen embedding would be wrong"
        )
    named = parse_arm(arm)
    placed = (named.placement, named.intervention)
    student = Student(study.student, teacher.arch, *placed, seed=seed, **teacher.initial)
    student.append_blocks(identity["run"]["phases"][-1]["active"])
    load_weights(student, checkpoint.weights(), checkpoint.path)
    return student


def export_arm(root: Path, arm: str, to: Path, seed: int | None, dtype: str, teacher_rows: bool) -> int:
    """``depthgrow export``; returns the exit code."""
    study, key, seed = finished_arm(root, arm, seed)
    teacher = LiveTeacher.load(
        resolve_teacher(study.teacher.source), torch_dtype(study.teacher.dtype), torch.device("cpu")
    )
    student = load_student(root, study, arm, key, seed, teacher)
    start, end = boundary_ids(study.data, teacher.tokenizer)
    padding = teacher.padding if teacher_rows else None
    done = read_done(Workspace(root).node(key))
    trust = "" if student.placement == "pre" else ", trust_remote_code=True"
    card = jinja2.Template(CARD.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True).render(
        {"study": study, "arm": arm, "key": key, "seed": seed, "name": to.name, "trust": trust},
        placement=student.placement,
        curriculum=parse_arm(arm).curriculum,
        layers=len(student.layers),
        parameters=sum(p.numel() for p in student.parameters()),
        final=", ".join(f"{k} {shown(v)}" for k, v in done["final"].items()),
        corpora=read_json(root / "data.json")["corpora"],
        start=teacher.tokenizer.convert_ids_to_tokens(start),
        end=teacher.tokenizer.convert_ids_to_tokens(end),
    )
    boundaries = Boundaries(start=tuple(start), end=tuple(end))
    save_hf(student, teacher.tokenizer, to, dtype=torch_dtype(dtype), boundaries=boundaries, padding=padding, card=card)
    print(f"{to}: {arm} seed {seed}; load with AutoModelForCausalLM.from_pretrained({str(to)!r}{trust})")
    return 0


def evaluate_arm(root: Path, arm: str | None, model: str | None, seed: int | None, as_json: bool) -> int:
    """``depthgrow eval``: an arm's final checkpoint, or any model folder with the study's tokenizer; returns the exit code."""
    if (arm is None) == (model is None):
        raise UserError("give an arm of the study or --model FOLDER, one of the two")
    found = None if arm is None else finished_arm(root, arm, seed)
    study = load_study(root)[0]
    with StopSignal().listening() as stop, Console() as console:
        prepared = prepare_held_out(root, study, console, stop)
        prepared.fill(study, stop, console)
    if found is not None and arm is not None:
        student = load_student(root, study, arm, found[1], found[2], prepared.teacher).to(prepared.device)
        result = evaluate_student(student, prepared.materials(study, found[2]), study.train, prepared.device)
        name = f"{arm} seed {found[2]}"
    else:
        assert model is not None
        result, name = _evaluate_folder(model, study, prepared), model
    summary = result.summary()
    if as_json:
        facts = {"documents": len(result.tokens), "tokens": int(result.tokens.sum()), "seed": found and found[2]}
        print(json.dumps(summary | facts, indent=1))
    else:
        print(f"{name} on {len(result.tokens)} held-out documents, {int(result.tokens.sum()):,} target tokens")
        for name, value in summary.items():
            print(f"  {name:16} {value:.4f}")
    return 0


def as_student(teacher: LiveTeacher, layers_per_block: int) -> Student:
    """A Hugging Face model as a pre-norm student of the same depth with the same weights: what is read of it is exact.

    Raises:
        UserError: its depth is not a multiple of ``layers_per_block``.
    """
    arch = teacher.arch
    if layers_per_block < 1 or arch.num_layers % layers_per_block:
        raise UserError(f"--layers-per-block {layers_per_block} does not divide the model's {arch.num_layers} layers")
    config = StudentConfig(num_blocks=arch.num_layers // layers_per_block, layers_per_block=layers_per_block)
    student = Student(config, arch, "pre", seed=0, **teacher.initial)
    student.append_blocks(config.num_blocks)
    state = teacher.model.state_dict()
    load_weights(student, {k.removeprefix("model."): v for k, v in state.items() if ".layers." in k}, Path("model"))
    return student.requires_grad_(False).to(teacher.model.device)


def diagnose_target(
    target: str,
    arm: str | None,
    seed: int | None,
    corpora: str | None,
    documents: int | None,
    layers_per_block: int | None,
    as_json: bool,
) -> int:
    """``depthgrow diagnose``: the arms of a study from its files (one of them, or all that are finished), or any model
    folder or name; returns the exit code."""
    root = as_path(target)
    if (root / "study.json").exists():
        if corpora is not None or documents is not None or layers_per_block is not None:
            raise UserError(
                "--corpora, --documents and --layers-per-block are for a model; a study's arms were diagnosed on its own "
                "held-out documents at the end of every phase"
            )
        names = [arm] if arm is not None else _finished_arms(root)
        seeds = [finished_arm(root, name, seed)[1:] for name in names]
        found = {
            name: read_json(Workspace(root).node(key) / "diagnostics.json") | {"seed": own}
            for name, (key, own) in zip(names, seeds, strict=True)
        }
    elif arm is not None:
        raise UserError(f"{target} holds no study (no study.json), so it has no arm {arm!r}; give a model alone")
    else:
        given = (corpora or "docstrings:stdlib", 32 if documents is None else documents)
        found = {target: _diagnose_model(target, *given, 1 if layers_per_block is None else layers_per_block)}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n\n".join(_describe(name, values) for name, values in found.items()))
    return 0


def _finished_arms(root: Path) -> list[str]:
    arms = load_study(root)[1]
    done = [arm for arm, seeds in arms.items() if Workspace(root).is_done(next(iter(seeds.values()))[-1])]
    if not done:
        raise UserError(f"no arm of {root} is finished; run the study again")
    return done


def _diagnose_model(source: str, corpora: str, documents: int, layers_per_block: int) -> dict[str, Any]:
    device = pick_device("auto")
    teacher = LiveTeacher.load(resolve_teacher(source), torch.float32, device)
    student = as_student(teacher, layers_per_block)
    data = DataConfig(
        corpora=tuple(corpora.split(",")),
        max_tokens=min(2048, teacher.arch.max_positions),
        held_out_documents=documents,
    )
    held_out = prepare_tokens(data, teacher.tokenizer, cache_root(), train_documents=1).held_out
    train = TrainConfig()
    hidden = hidden_states(student, train, device)
    return diagnose(student, hidden, held_out, teacher.classes, micro_tokens=train.micro_tokens, device=device)


def _cells(values: list[float | None], width: int) -> str:
    return " ".join(f"{shown(value, '.3f'):>{width}}" for value in values)


def _describe(name: str, found: dict[str, Any]) -> str:
    """Three short tables: blocks, layers, tokens that stand out."""
    seed = f" seed {found['seed']}" if "seed" in found else ""
    lines = [
        f"{name}{seed}: ce {shown(found['ce'])} on a fixed batch: {found['documents']} documents, "
        f"{found['tokens']:,} target tokens",
        "block  removal   angle  update |  RMS mean      std  kurtosis  boundary  delimiter  regular  outliers",
    ]
    names = ("removal", "angle", "relative_update")
    for row in found["blocks"]:
        scale = row["rms"]
        cells = [scale["all"].get(k) for k in ("mean", "std", "kurtosis")]
        cells += [scale[kind].get("mean") for kind in ("document_boundary", "delimiter", "regular")]
        lines.append(
            f"{row['block']:5}  {_cells([row[k] for k in names], 7)} |  {_cells(cells, 8)}  {scale['outlier']['count']:8}"
        )
    lines.append("layer  removal   angle  update |  attention on the first token, by head")
    for row in found["layers"]:
        heads = " ".join(shown(share, ".2f") for share in row["sink"])
        lines.append(f"{row['layer']:5}  {_cells([row[k] for k in names], 7)} |  {heads}")
    for row in found["blocks"]:
        for token in row["outliers"][:3]:
            lines.append(
                f"outlier after block {row['block']}: {token['text']!r} at position {token['position']} of document "
                f"{token['document']}, RMS {shown(token['rms'], '.1f')}, channel {token['channel']}"
            )
    return "\n".join(lines)


def _evaluate_folder(model: str, study: Study, prepared: Prepared) -> Evaluation:
    other = LiveTeacher.load(model, torch.float32, prepared.device)
    if other.tokenizer.get_vocab() != prepared.teacher.tokenizer.get_vocab():
        raise UserError(
            f"model {model!r} has another tokenizer than the study's teacher: its losses cannot be compared"
        )
    micro_tokens = study.train.micro_tokens
    return evaluate_model(other, prepared.tokens.held_out, prepared.held_out_targets, micro_tokens=micro_tokens)
