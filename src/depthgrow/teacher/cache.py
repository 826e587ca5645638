"""Teacher targets on disk: written once per (teacher, documents), read by every arm, exact to the byte.

    CACHE/teacher/KEY/rows.npy        [total targets, width], memory-mapped: one row a target token (see `Rows`)
                      checksums.npy   [documents] CRC-32 of each document's rows; -1 where not written yet
                      info.json       what the key was made of; written last

Rows are addressed by document, never by step, so order, batch size, epochs and ranks do not matter. Each read checks
the rows against their checksum; the documents themselves are fixed by the content hash inside the key.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from depthgrow.architecture import Architecture
from depthgrow.config import fingerprint
from depthgrow.data.batches import MicroBatch, group_by_length, pack
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.files import UserError, free_space, locked, read_json, require_space, write_json
from depthgrow.head_loss import TeacherTargets, TopTargets, top_targets
from depthgrow.parallel import any_rank, first, max_ranks, on_first_held, rank, world
from depthgrow.runtime import Stop, Stopped
from depthgrow.teacher.live import LiveTeacher

TOP_CHUNK = 512  # tokens whose logits are formed at a time when the most probable are kept
SAVE_EVERY = 32  # rounds of the workers between two saves of the checksums while filling


def _crc(rows_ND: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(rows_ND).view(np.uint8).reshape(-1).data)


@dataclass(frozen=True)
class Rows:
    """What is kept of a teacher for one target token: its final hidden state in ``dtype`` (``top`` 0: exact), or its
    ``top`` most probable tokens with their log-probabilities (int32 and float32)."""

    teacher: LiveTeacher
    dtype: torch.dtype
    top: int = 0

    @property
    def width(self) -> int:
        arch = self.teacher.arch
        return min(self.top, arch.vocab_size) if self.top else arch.hidden_size

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        if self.top:
            return np.dtype([("id", np.int32), ("log_q", np.float32)])
        return np.dtype(np.uint16 if self.dtype == torch.bfloat16 else str(self.dtype).removeprefix("torch."))

    def encode(self, hidden_ND: Tensor) -> NDArray[Any]:
        if not self.top:
            return _to_numpy(hidden_ND)
        values = [top_targets(part, self.teacher.head_VD, self.top) for part in hidden_ND.split(TOP_CHUNK)]
        rows = np.empty((len(hidden_ND), self.width), self.numpy_dtype)
        if values:
            rows["id"] = torch.cat([v.id_Nk for v in values]).cpu().numpy()
            rows["log_q"] = torch.cat([v.log_q_Nk for v in values]).cpu().numpy()
        return rows

    def decode(self, rows: NDArray[Any]) -> TeacherTargets | TopTargets:
        device = self.teacher.head_VD.device
        if not self.top:
            return TeacherTargets(_to_torch(rows).to(device), self.teacher.head_VD)
        fields = (torch.from_numpy(np.ascontiguousarray(rows[name])).to(device) for name in ("id", "log_q"))
        return TopTargets(*fields)


@dataclass
class TargetCache:
    """The targets of one set of documents. Open it with `open_cache`, complete it with `fill`, read it with `targets`.

    first: number that a micro-batch's document ids have for document 0 of this set (a later shard starts at more than 0).
    """

    folder: Path
    documents: TokenizedDocuments
    coding: Rows
    rows: Any
    checksums: NDArray[np.int64]
    starts: NDArray[np.int64]
    micro_tokens: int
    first: int = 0

    @property
    def missing(self) -> list[int]:
        return [int(i) for i in np.flatnonzero(self.checksums < 0)]

    def fill(self, stop: Stop, progress: Callable[[int, int], None], *, workers: int = 1) -> None:
        """Run the teacher over the documents that are not there yet; goes on where an earlier call was stopped.

        Args:
            workers: threads that each run a group of documents; the rows do not depend on how many.
            Another process that fills the same cache is waited for, and what it has done is not done again.

        Raises:
            Stopped: a signal came; what was computed is kept.
        """
        with on_first_held(lambda: locked(self.folder.with_suffix(".lock"))):
            self.checksums = np.load(self.folder / "checksums.npy", allow_pickle=False)
            self._fill(stop, progress, workers)

    def _fill(self, stop: Stop, progress: Callable[[int, int], None], workers: int) -> None:
        teacher = self.coding.teacher

        def compute(group: list[int]) -> tuple[list[int], NDArray[Any]]:
            batch = pack(self.documents, group).to(teacher.model.device)
            return group, self.coding.encode(teacher.hidden(batch.ids_N, batch.lengths))

        groups = list(group_by_length(self.documents, self.missing, self.micro_tokens))
        groups += [[]] * (-len(groups) % world())
        groups = groups[rank() :: world()]
        done = len(self.checksums) - len(self.missing)
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            for first in range(0, len(groups), 2 * workers):
                for group, rows_ND in pool.map(compute, groups[first : first + 2 * workers]):
                    self._write(group, rows_ND)
                    done += len(group) * world()
                    progress(min(done, len(self.checksums)), len(self.checksums))
                stopping = any_rank(stop.requested)
                if stopping or first // (2 * workers) % SAVE_EVERY == SAVE_EVERY - 1:
                    self._save()
                if stopping:
                    raise Stopped("teacher targets")
        self._save()

    def _write(self, group: list[int], rows_ND: NDArray[Any]) -> None:
        place = 0
        for index in group:
            length = int(self.starts[index + 1] - self.starts[index])
            rows = rows_ND[place : place + length]
            self.rows[self.starts[index] : self.starts[index + 1]] = rows
            self.checksums[index] = _crc(rows)
            place += length

    def _save(self) -> None:
        self.rows.flush()
        self.checksums = max_ranks(torch.from_numpy(self.checksums)).numpy()  # -1 where no rank has been
        if not first():
            return
        scratch = self.folder / "checksums.partial.npy"
        np.save(scratch, self.checksums)
        scratch.replace(self.folder / "checksums.npy")

    def targets(self, batch: MicroBatch) -> TeacherTargets | TopTargets:
        """The targets of a micro-batch's documents, in its order.

        Raises:
            UserError: rows on disk are not what the teacher wrote.
        """
        parts = [self.rows[:0]]
        for document in batch.document_ids:
            index = document - self.first
            rows = self.rows[self.starts[index] : self.starts[index + 1]]
            if self.checksums[index] < 0:
                raise UserError(f"teacher cache {self.folder} is not filled at document {index}; run the command again")
            if _crc(rows) != self.checksums[index]:
                raise UserError(
                    f"teacher cache {self.folder / 'rows.npy'} is damaged at document {index} (checksum differs); "
                    f"delete {self.folder} and run again"
                )
            parts.append(rows)
        return self.coding.decode(np.concatenate(parts))  # a private copy: the map is memory of the page cache


def _to_numpy(x: Tensor) -> NDArray[Any]:
    x = x.detach().cpu().contiguous()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _to_torch(rows: NDArray[Any]) -> Tensor:
    return torch.from_numpy(rows).view(torch.bfloat16) if rows.dtype == np.uint16 else torch.from_numpy(rows)


def row_bytes(arch: Architecture, dtype: torch.dtype, top: int = 0) -> int:
    """Bytes a target token takes in the cache."""
    return 8 * min(top, arch.vocab_size) or arch.hidden_size * dtype.itemsize


def teacher_work(arch: Architecture, *, live: bool, kept: int) -> dict[str, Any]:
    """What a training step asks of the teacher, as fields of `depthgrow.ledger.StepWork`: a live one runs all its layers;
    one whose most probable tokens are cached (``kept``) is not asked for logits either."""
    return {"teacher_layers": arch.num_layers * live, "teacher_logits": live or not kept}


def pick_live(num_bytes: int, root: Path) -> tuple[bool, str]:
    """Whether a cache that still needs ``num_bytes`` is to be left out, and what to say about it."""
    free = free_space(root)
    sizes = f"{num_bytes / 2**30:.2f} GiB more of {free / 2**30:.0f} GiB free in {root}"
    if num_bytes <= free / 2:
        return False, f"teacher targets: hidden states, kept on disk ({sizes})"
    return True, f"teacher targets: live at every step, since a cache would need {sizes}; or --teacher.targets topk"


def open_cache(
    root: Path, coding: Rows, documents: TokenizedDocuments, micro_tokens: int, first: int = 0
) -> TargetCache:
    """The cache of (teacher, what is kept, documents) under ``root``: found, or made empty.

    Raises:
        UserError: no room on disk, or files that are not what their record says.
    """
    identity, folder = _identity(coding, documents, micro_tokens), cache_folder(root, coding, documents, micro_tokens)
    with locked(folder.with_suffix(".lock")):
        return _open(folder, identity, coding, documents, micro_tokens, first)


def is_begun(root: Path, coding: Rows, documents: TokenizedDocuments, micro_tokens: int) -> bool:
    """Whether the cache's room on disk is taken already."""
    return (cache_folder(root, coding, documents, micro_tokens) / "info.json").exists()


def cache_folder(root: Path, coding: Rows, documents: TokenizedDocuments, micro_tokens: int) -> Path:
    return root / "teacher" / fingerprint(_identity(coding, documents, micro_tokens))


def _identity(coding: Rows, documents: TokenizedDocuments, micro_tokens: int) -> dict[str, Any]:
    teacher = coding.teacher
    return {
        "format": 1,
        "teacher": teacher.fingerprint,
        "documents": documents.content_hash,
        "dtype": str(coding.dtype),
        "computed": [str(teacher.model.device.type), micro_tokens],  # other rectangles, other rounding
        "shape": [int(documents.num_targets.sum()), coding.width],
        "top": coding.top,
    }


def _open(
    folder: Path, identity: dict[str, Any], coding: Rows, documents: TokenizedDocuments, micro_tokens: int, first: int
) -> TargetCache:
    rows_path, checksum_path = folder / "rows.npy", folder / "checksums.npy"
    if not (folder / "info.json").exists():
        shape, dtype = tuple(identity["shape"]), coding.numpy_dtype
        require_space(folder, shape[0] * shape[1] * dtype.itemsize, "the teacher cache")
        np.lib.format.open_memmap(rows_path, mode="w+", dtype=dtype, shape=shape).flush()
        if hasattr(os, "posix_fallocate"):  # a sparse file would fail later, at a write through the map
            with rows_path.open("r+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, rows_path.stat().st_size)
        np.save(checksum_path, np.full(len(documents), -1, dtype=np.int64))
        write_json(folder / "info.json", identity)
    if read_json(folder / "info.json") != identity:
        raise UserError(f"teacher cache {folder} belongs to another teacher or corpus; delete it and run again")
    try:
        checksums = np.load(checksum_path, allow_pickle=False)
        rows = np.load(rows_path, mmap_mode="r+" if (checksums < 0).any() else "r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"teacher cache {folder} cannot be read ({error}); delete it and run again") from None
    starts = np.concatenate([[0], np.cumsum(documents.num_targets)])
    if list(rows.shape) != identity["shape"] or len(checksums) != len(documents):
        raise UserError(f"teacher cache {folder} is truncated; delete it and run again")
    return TargetCache(folder, documents, coding, rows, checksums, starts, micro_tokens, first)
