"""A study's files as plain Python and numpy."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthgrow.files import UserError, read_done, read_json, read_study
from depthgrow.metrics import read_metrics


@dataclass(frozen=True)
class Phase:
    """One finished phase of an arm."""

    key: str
    active: int
    steps: int
    done: dict[str, Any]
    metrics: list[dict[str, Any]]
    environment: dict[str, Any]
    diagnostics: dict[str, Any]
    folder: Path

    def documents(self) -> dict[str, NDArray[Any]]:
        """Per-document sums of the evaluation at the phase's end."""
        path = self.folder / "eval" / f"step-{self.steps:08d}.npz"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"evaluation file {path} cannot be read ({error}); delete {self.folder} and run the study again"
            ) from None

    @property
    def lost_lines(self) -> int:
        """Steps of which metrics.jsonl has no line: after a power failure, or by somebody's hand."""
        return self.steps - len({record["step"] for record in self.metrics if record["kind"] == "train"})

    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record["kind"] == "eval"]


@dataclass(frozen=True)
class Run:
    """One arm at one seed; ``phases`` are the finished ones, ``planned`` how many it has in all; ``diverged`` says where and
    how the phase after them ended, if a loss or gradient in it was not finite."""

    arm: str
    seed: int
    phases: list[Phase]
    planned: int
    diverged: str | None = None

    @property
    def complete(self) -> bool:
        return len(self.phases) == self.planned


def _arm_order(arm: str) -> tuple[int, str, int]:
    placement, _, curriculum = arm.partition("-")
    known = ("joint", "grow", "freeze", "single")
    return (known.index(curriculum) if curriculum in known else len(known), curriculum, placement != "pre")


@dataclass(frozen=True)
class StudyFiles:
    """Everything the report reads."""

    root: Path
    config: dict[str, Any]
    runs: dict[tuple[str, int], Run]
    teacher: dict[str, Any]
    data: dict[str, Any]
    baselines: dict[str, Any]

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.runs})

    @property
    def arms(self) -> list[str]:
        """Arms by curriculum, pre before post."""
        return sorted({arm for arm, _ in self.runs}, key=_arm_order)

    def complete_seeds(self, *arms: str) -> list[int]:
        """Seeds at which every one of ``arms`` is finished."""
        return [s for s in self.seeds if all((a, s) in self.runs and self.runs[a, s].complete for a in arms)]


def load_study_files(root: Path) -> StudyFiles:
    """Read a study folder, finished or not.

    Raises:
        UserError: there is no study in it.
    """
    record = read_study(root)
    phases: dict[str, Phase | str | None] = {}
    runs = {}
    for arm, seeds in record["arms"].items():
        for seed, keys in seeds.items():
            for key in keys:
                if key not in phases:
                    phases[key] = _load_phase(root / "nodes" / key)
            finished: list[Phase] = []
            for key in keys:
                phase = phases[key]
                if not isinstance(phase, Phase):
                    break
                finished.append(phase)
            end = phase if isinstance(phase, str) else None
            runs[arm, int(seed)] = Run(arm, int(seed), finished, len(keys), end)
    names = ("teacher.json", "data.json", "baselines.json")
    optional = [read_json(root / name) if (root / name).exists() else {} for name in names]
    return StudyFiles(root, record["config"], runs, *optional)


def _load_phase(folder: Path) -> Phase | str | None:
    """None where it is not finished, words where it has diverged."""
    if not (folder / "done.json").exists():
        return None
    done = read_done(folder)
    if done.get("state") == "diverged":
        found = done["diverged"]
        named = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["values"].items())
        return f"at step {found['step']} ({named})"
    last = read_json(folder / "config.json")["identity"]["run"]["phases"][-1]
    return Phase(
        key=folder.name,
        active=last["active"],
        steps=done["steps"],
        done=done,
        metrics=read_metrics(folder / "metrics.jsonl"),
        environment=read_json(folder / "environment.json"),
        diagnostics=read_json(folder / "diagnostics.json"),
        folder=folder,
    )
