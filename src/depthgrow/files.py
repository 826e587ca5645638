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
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, YAMLError


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


def launched() -> bool:
    """Whether torchrun (or a launcher that sets the same variables) started this process as one of its ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def as_path(text: str | Path) -> Path:
    """A path as the user wrote it, ``~`` being the home folder.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: no home folder is known for it; write the path out") from None


def cache_root() -> Path:
    """Where work that several studies share lies: token sets, teacher targets, converted teachers.

    ``$XDG_CACHE_HOME/depthgrow``, else ``~/.cache/depthgrow``, else (an account without a home) a temporary folder.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return as_path(named).absolute() / "depthgrow"
    try:
        return Path.home() / ".cache" / "depthgrow"
    except RuntimeError:  # no HOME, and no entry for this user in the password database
        return Path(tempfile.gettempdir()) / f"depthgrow-{os.getuid()}"


PARTIAL = ".partial-"  # starts the name of every file and folder that is still being written


def sweep(folder: Path) -> None:
    """Remove what killed processes left half written in ``folder``: a living one holds a lock on what it writes."""
    for path in folder.glob(f"{PARTIAL}*") if folder.is_dir() else ():
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # gone meanwhile, or not ours to touch
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        except OSError:
            pass  # being written, or on a file system without locks
        finally:
            os.close(handle)


def _lock_if_possible(handle: int) -> None:
    with suppress(OSError):  # a file system without locks: `sweep` then leaves everything alone
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, outlast a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; durable once this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{PARTIAL}{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            _lock_if_possible(stream.fileno())
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        _sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write that fails does not say where
        raise
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def whole_folder(final: Path, *, replace: bool = True) -> Iterator[Path]:
    """A scratch folder that becomes ``final`` where the block ends well, so that ``final`` is whole or absent, and durable.

    Args:
        replace: a folder that is there already makes way; otherwise only an empty one does.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final.parent)
    scratch = final.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    scratch.mkdir()
    held = os.open(scratch, os.O_RDONLY)
    try:
        _lock_if_possible(held)
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            _sync(path)
        if replace and final.exists():
            shutil.rmtree(final)
        scratch.rename(final)
        _sync(final.parent)
    finally:
        os.close(held)
        shutil.rmtree(scratch, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """JSON with sorted keys; a number that is not finite becomes null (a key that is not there: no such number)."""
    write_atomic(path, json.dumps(finite_or_none(value), indent=1, sort_keys=True, allow_nan=False) + "\n")


def finite_or_none(value: Any) -> Any:
    """``value`` with None for every number in it that is not finite: what JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    return [finite_or_none(item) for item in value] if isinstance(value, list | tuple) else value


def read_yaml(path: Path) -> Any:
    """YAML 1.2: ``042`` is 42, ``1:30`` and ``yes`` are texts.

    Raises:
        UserError: it cannot be read; a key that stands twice is named with its line.
    """
    try:
        return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8-sig"))
    except (YAMLError, UnicodeDecodeError, IsADirectoryError) as error:
        text = " ".join(str(error).partition("To suppress this check")[0].split())
        raise UserError(f"{path}: {text}") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file this package wrote; a damaged one is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
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
    """Hold an exclusive lock on ``path``; wait for it, or raise ``UserError(in_use)`` at once when that is given.

    On a file system without locks the block runs unguarded, after a warning on stderr.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if in_use else 0))
        except BlockingIOError:
            raise UserError(in_use or str(path)) from None
        except OSError as error:
            print(
                f"depthgrow: {path.parent}: this file system has no locks ({error.strerror}); "
                "make sure that no other depthgrow process writes there",
                file=sys.stderr,
            )
        yield


def start_step(node: Path) -> int:
    """The step that an unfinished node's folder goes on from; 0 where it has no checkpoint."""
    return max((int(p.name.removeprefix("step-")) for p in node.glob("checkpoints/step-*")), default=0)


def node_state(node: Path) -> str:
    """'done', 'diverged' (a loss or gradient was not finite: it is not run again), 'started' or 'missing'."""
    if (node / "done.json").exists():
        return str(read_done(node).get("state", "done"))
    return "started" if start_step(node) else "missing"


def read_done(node: Path) -> dict[str, Any]:
    """The record of a node that has ended.

    Raises:
        UserError: it lacks what every such record has.
    """
    done = read_json(node / "done.json")
    wanted = ("steps", "counted") + (() if isinstance(done, dict) and done.get("state") == "diverged" else ("final",))
    absent = [name for name in wanted if not isinstance(done, dict) or name not in done]
    if absent:
        raise UserError(f"{node / 'done.json'} is damaged (no {absent[0]!r}); delete {node} and run the study again")
    return done


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
    # JSON sorts names as text, where 10 comes before 9
    record["arms"] = {arm: {s: seeds[s] for s in sorted(seeds, key=int)} for arm, seeds in record["arms"].items()}
    return record


def free_space(folder: Path) -> int:
    """Free bytes where ``folder`` is, or would be made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse before writing what would not fit (5 % and 64 MiB are left free)."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    free = free_space(folder)
    if num_bytes * 1.05 + 2**26 > free:
        raise UserError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB but {folder} has {free / 2**30:.2f} GiB free; "
            "free some space or choose another folder (--out, or --teacher.cache_dir for the cache)"
        )
