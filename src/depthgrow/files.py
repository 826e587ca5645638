"""Errors for the user, and files that are either whole or absent.

No torch in here: the report imports it.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake the user can mend. The message is one line: what was received, why it cannot be, what to do.

    told_elsewhere: among several ranks, whether another shows the same; None where all of them came to it alike.
    """

    told_elsewhere: bool | None = None


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist: suggests the nearest one and lists the rest."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")


def cache_root() -> Path:
    """Where work that several studies share lies: token sets, teacher targets, converted teachers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthgrow"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; durable once this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(final: Path, *, replace: bool = True) -> Iterator[Path]:
    """A scratch folder that becomes ``final`` where the block ends well, so that ``final`` is whole or absent.

    Args:
        replace: a folder that is there already makes way; otherwise only an empty one does.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = final.with_name(f".partial-{uuid.uuid4().hex}")
    scratch.mkdir()
    try:
        yield scratch
        if replace and final.exists():
            shutil.rmtree(final)
        scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """JSON with sorted keys; a number that is not finite becomes null, which JSON can say."""
    write_atomic(path, json.dumps(_finite(value), indent=1, sort_keys=True) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def read_json(path: Path) -> Any:
    """Parse a JSON file this package wrote; a damaged one is named."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; delete {path.parent} and run the study again") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete {path.parent} and run the study again") from None


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shown(value: float | None, form: str = ".4f") -> str:
    """A number as a person reads it; a dash where there is none or it is not finite."""
    return format(value, form) if value is not None and math.isfinite(value) else "–"


@contextmanager
def locked(path: Path, in_use: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; wait for it, or raise ``UserError(in_use)`` at once when that is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if in_use else 0))
        except OSError:
            raise UserError(in_use or str(path)) from None
        yield


def start_step(node: Path) -> int:
    """The step that an unfinished node's folder goes on from; 0 where it has no checkpoint."""
    return max((int(p.name.removeprefix("step-")) for p in node.glob("checkpoints/step-*")), default=0)


def read_study(root: Path) -> Any:
    """The record ``study.json`` of a study folder.

    Raises:
        UserError: the folder holds no study.
    """
    if not (root / "study.json").exists():
        raise UserError(f"{root} holds no study (no study.json); run: depthgrow study RECIPE --out {root}")
    record = read_json(root / "study.json")
    if not (isinstance(record, dict) and isinstance(record.get("arms"), dict) and "config" in record):
        raise UserError(f"{root / 'study.json'} is damaged (no arms, no config); run the study again in another --out")
    return record


def free_space(folder: Path) -> int:
    """Free bytes where ``folder`` is, or would be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse before writing what would not fit (5 % and 64 MiB are left free)."""
    folder.mkdir(parents=True, exist_ok=True)
    free = free_space(folder)
    if num_bytes * 1.05 + 2**26 > free:
        raise UserError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB but {folder} has {free / 2**30:.2f} GiB free; "
            "free some space or choose another folder (--out, or --teacher.cache_dir for the cache)"
        )
