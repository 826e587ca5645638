"""Recipes: functions that return a complete `Study`. Change one with ``--section.field value``, a .yaml or a .py file."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthgrow.config import override
from depthgrow.data.tokens import DataConfig
from depthgrow.files import UserError, as_path, read_yaml, unknown
from depthgrow.optim import OptimConfig
from depthgrow.phase import TrainConfig
from depthgrow.plugins import run_file
from depthgrow.student import StudentConfig
from depthgrow.study import Study, TeacherConfig, load_study


def debug() -> Study:
    """The whole study in half a minute, to see every part work: far too short to mean anything."""
    return Study(
        name="debug",
        verdict=False,
        student=StudentConfig(layers_per_block=1),
        teacher=TeacherConfig(source="laptop"),
        data=DataConfig(
            corpora=("docstrings:stdlib",), max_tokens=128, held_out_documents=24, start_token="<|endoftext|>"
        ),
        optim=OptimConfig(peak_lr=2e-3, min_lr=2e-5, warmup_steps=4),
        train=TrainConfig(
            steps_per_phase=24, batch_documents=4, micro_tokens=1024, eval_every=12, checkpoint_every=12, log_every=4
        ),
    )


def laptop() -> Study:
    """The 2 x 2 on the shipped teacher and Wikipedia lead sections with three seeds, in ten minutes on two cores.

    Three blocks of one layer: a quarter of the teacher's twelve, as the published nine are of 36. The initial gain is half the
    published one and the rate the published 1e-4 at width 4,096 carried to 128: in this setting every arm learns.
    """
    return Study(
        name="laptop",
        seeds=3,
        student=StudentConfig(layers_per_block=1, init_gain=0.64),
        teacher=TeacherConfig(source="laptop"),
        data=DataConfig(corpora=("wiki",), max_tokens=512, held_out_documents=256),
        optim=OptimConfig(peak_lr=3.2e-3, min_lr=3.2e-5, warmup_steps=60),
        train=TrainConfig(
            steps_per_phase=480,
            batch_documents=4,
            micro_tokens=4096,
            eval_every=240,
            checkpoint_every=240,
            log_every=10,
        ),
    )


def laptop_long() -> Study:
    """The laptop study at four times the length: each phase passes once over the whole text (9,520 documents)."""
    base = laptop()
    return replace(
        base,
        name="laptop-long",
        optim=replace(base.optim, warmup_steps=100),
        train=replace(base.train, steps_per_phase=2380, eval_every=400),
    )


def laptop_deep() -> Study:
    """Nine layers at the published initial gain, one seed. A caveat: 400 steps a phase are too few, post-joint hardly trains
    (held-out CE 6.2, where the unigram frequencies of the training text give 6.4), so its differences are about who
    starts to learn first."""
    return Study(
        name="laptop-deep",
        teacher=TeacherConfig(source="laptop"),
        data=DataConfig(corpora=("wiki",), max_tokens=512, held_out_documents=256),
        optim=OptimConfig(peak_lr=1e-3, min_lr=1e-5, warmup_steps=100),
        train=TrainConfig(
            steps_per_phase=400, batch_documents=4, micro_tokens=4096, eval_every=100, checkpoint_every=50, log_every=10
        ),
    )


def smollm2() -> Study:
    """The 2 x 2 distilled from SmolLM2-135M-Instruct: overnight on two cores as it stands, short with few steps."""
    return Study(
        name="smollm2",
        teacher=TeacherConfig(source="smollm2"),
        data=DataConfig(
            corpora=("wiki",),
            max_tokens=512,
            held_out_documents=128,
            start_token="<|endoftext|>",
            end_token="<|endoftext|>",
        ),
        optim=OptimConfig(peak_lr=7e-4, min_lr=7e-6, warmup_steps=30),
        train=TrainConfig(
            steps_per_phase=400, batch_documents=8, micro_tokens=2048, eval_every=200, checkpoint_every=25, log_every=5
        ),
    )


def paper() -> Study:
    """The published study: Qwen3-8B-Base, FineWeb-Edu, three blocks of three layers, 50,000 steps a phase."""
    return Study(
        name="paper",
        arms=("pre-joint", "post-joint", "pre-grow", "post-grow", "pre-freeze", "post-freeze"),
        teacher=TeacherConfig(source="Qwen/Qwen3-8B-Base", dtype="bfloat16", targets="live"),
        data=DataConfig(
            corpora=("hf:HuggingFaceFW/fineweb-edu:sample-10BT",),
            max_tokens=8192,
            held_out_documents=4833,
            end_token="<|endoftext|>",
        ),
        train=TrainConfig(dtype="bfloat16", micro_tokens=8192),
    )


RECIPES: dict[str, Callable[[], Study]] = {
    "debug": debug,
    "laptop": laptop,
    "laptop-long": laptop_long,
    "laptop-deep": laptop_deep,
    "smollm2": smollm2,
    "paper": paper,
}


def load_recipe(name: str) -> Study:
    """A recipe by name; from a file, a .py that defines ``study() -> Study``, or a .yaml such as

        recipe: laptop
        train.steps_per_phase: 500

    or from a study's folder, whose study it then is.

    Raises:
        UserError: no such recipe or file, or a field it sets does not exist.
    """
    return _load(name, ())


def _load(name: str, within: tuple[Path, ...]) -> Study:
    """``within``: the files that start from this one, outermost first."""
    path = as_path(name)
    if path.suffix in (".yaml", ".yml", ".py") and not path.exists():
        raise UserError(f"recipe file {name!r} does not exist")
    if path.suffix in (".yaml", ".yml"):
        if path.resolve() in within:
            raise UserError(f"recipe file {name} starts from itself; its key 'recipe' must name another")
        values = read_yaml(path)
        start = values.pop("recipe", None) if isinstance(values, dict) else None
        if not isinstance(start, str):
            raise UserError(
                f"recipe file {name} must be a mapping with a key 'recipe' that names the recipe it starts from"
            )
        return override(_load(start, (*within, path.resolve())), _flatten(values, name))
    if path.suffix == ".py":
        return _run_python(path)
    if name not in RECIPES and (path / "study.json").exists():
        return load_study(path)[0]
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()


def _run_python(path: Path) -> Study:
    try:
        module = run_file(path)
        study = module.study() if hasattr(module, "study") else None
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever the user's own code raises, where it was raised
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(path)), None
        )
        where = f"{path}:{line}" if line else str(path)
        raise UserError(f"recipe file {where}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(study, Study):
        raise UserError(f"recipe file {path} must define study() returning a depthgrow.study.Study")
    return study


def _flatten(values: dict[Any, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """``{"optim": {"peak_lr": x}}`` as ``{"optim.peak_lr": x}``.

    Raises:
        UserError: a field is set twice, flat and nested.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found = _flatten(value, where, f"{name}.") if isinstance(value, dict) else {name: value}
        twice = next((field for field in found if field in flat), None)
        if twice is not None:
            raise UserError(f"recipe file {where} sets {twice} twice; keep one of the two")
        flat |= found
    return flat
