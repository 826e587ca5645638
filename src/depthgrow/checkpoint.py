"""Train states on disk: whole or absent, checksummed, safetensors and JSON only.

    CHECKPOINTS/step-00000250/weights.safetensors    every parameter but a frozen embedding (the teacher's own)
                              optimizer.safetensors  moments and step counts by parameter name
                              state.json             {"step": .., "tokens": .., "sha256": {file: ..}}

state.json is written last inside a hidden folder, and the folder is renamed into place.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthgrow.files import UserError, read_json, require_space, sha256_file, whole_folder, write_json

FILES = ("weights.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk; ``state`` is what state.json holds besides checksums."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.path / FILES[0])

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.path / FILES[1])


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file.

    Raises:
        OSError: it cannot be written whole; the library's own error, which hides the system's, as the system's.
    """
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


def save_checkpoint(
    root: Path, weights: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], *, keep: int = 2
) -> Checkpoint:
    """Write a checkpoint of ``state['step']`` and drop all but the ``keep`` newest."""
    final = root / f"step-{state['step']:08d}"
    require_space(root, sum(t.nbytes for t in (*weights.values(), *optimizer.values())), "a checkpoint")
    with whole_folder(final) as scratch:
        for name, tensors in zip(FILES, (weights, optimizer), strict=True):
            save_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, scratch / name)
        write_json(scratch / "state.json", state | {"sha256": {name: sha256_file(scratch / name) for name in FILES}})
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return Checkpoint(final, state)


def verify(path: Path) -> Checkpoint:
    """Read a checkpoint's state and check its files against their checksums.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    state = read_json(path / "state.json")
    for name, expected in state.pop("sha256").items():
        if not (path / name).exists():
            raise UserError(f"checkpoint file {path / name} is missing")
        if sha256_file(path / name) != expected:
            raise UserError(f"checkpoint file {path / name} is damaged (checksum differs)")
    return Checkpoint(path, state)


def latest_checkpoint(root: Path, warn: Any = None) -> Checkpoint | None:
    """The newest complete checkpoint, or None where there is none at all; damaged ones are reported and passed over.

    Raises:
        UserError: there are checkpoints but every one is damaged.
    """
    candidates = sorted(root.glob("step-*"), reverse=True)
    errors = []
    for path in candidates:
        try:
            return verify(path)
        except (UserError, SafetensorError, OSError, KeyError) as error:
            errors.append(str(error))
            if warn is not None:
                warn(f"skipped {error}")
    if errors:
        raise UserError(f"{errors[0]}, and no older one is whole; delete {root.parent} to train this phase again")
    return None
