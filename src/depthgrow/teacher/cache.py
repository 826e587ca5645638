"""Teacher targets on disk: written once per (teacher, documents), read by every arm, exact to the byte.

    CACHE/teacher/KEY/hidden.npy      [total targets, D], the dtype the teacher computed in, memory-mapped
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

from depthgrow.config import fingerprint
from depthgrow.data.batches import MicroBatch, group_by_length, pack
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.files import UserError, locked, read_json, require_space, write_json
from depthgrow.head_loss import TeacherTargets
from depthgrow.parallel import any_rank, first, max_ranks, on_first_held, rank, world
from depthgrow.runtime import Stop, Stopped
from depthgrow.teacher.live import LiveTeacher

SAVE_EVERY = 32  # rounds of the workers between two saves of the checksums while filling


def _crc(rows_ND: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(rows_ND).view(np.uint8).reshape(-1).data)


@dataclass
class TargetCache:
    """The targets of one set of documents. Open it with `open_cache`, complete it with `fill`, read it with `targets`.

    first: number that a micro-batch's document ids have for document 0 of this set (a later shard starts at more than 0).
    """

    folder: Path
    documents: TokenizedDocuments
    head_VD: Tensor
    hidden: Any
    checksums: NDArray[np.int64]
    starts: NDArray[np.int64]
    micro_tokens: int
    first: int = 0

    @property
    def missing(self) -> list[int]:
        return [int(i) for i in np.flatnonzero(self.checksums < 0)]

    def fill(
        self,
        teacher: LiveTeacher,
        stop: Stop,
        progress: Callable[[int, int], None],
        *,
        workers: int = 1,
    ) -> None:
        """Run the teacher over the documents that are not there yet; goes on where an earlier call was stopped.

        Args:
            workers: threads that each run a group of documents; the rows do not depend on how many.
            Another process that fills the same cache is waited for, and what it has done is not done again.

        Raises:
            Stopped: a signal came; what was computed is kept.
        """
        with on_first_held(lambda: locked(self.folder.with_suffix(".lock"))):
            self.checksums = np.load(self.folder / "checksums.npy", allow_pickle=False)
            self._fill(teacher, stop, progress, workers)

    def _fill(self, teacher: LiveTeacher, stop: Stop, progress: Callable[[int, int], None], workers: int) -> None:
        def compute(group: list[int]) -> tuple[list[int], NDArray[Any]]:
            batch = pack(self.documents, group).to(teacher.model.device)
            return group, _to_numpy(teacher.hidden(batch.ids_N, batch.lengths))

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
            self.hidden[self.starts[index] : self.starts[index + 1]] = rows
            self.checksums[index] = _crc(rows)
            place += length

    def _save(self) -> None:
        self.hidden.flush()
        self.checksums = max_ranks(torch.from_numpy(self.checksums)).numpy()  # -1 where no rank has been
        if not first():
            return
        scratch = self.folder / "checksums.partial.npy"
        np.save(scratch, self.checksums)
        scratch.replace(self.folder / "checksums.npy")

    def targets(self, batch: MicroBatch) -> TeacherTargets:
        """The targets of a micro-batch's documents, in its order.

        Raises:
            UserError: rows on disk are not what the teacher wrote.
        """
        parts = [_to_torch(self.hidden[:0])]
        for document in batch.document_ids:
            index = document - self.first
            rows = self.hidden[self.starts[index] : self.starts[index + 1]]
            if _crc(rows) != self.checksums[index]:
                raise UserError(
                    f"teacher cache {self.folder / 'hidden.npy'} is damaged at document {index} (checksum differs); "
                    f"delete {self.folder} and run again"
                )
            parts.append(_to_torch(rows))
        return TeacherTargets(torch.cat(parts).to(self.head_VD.device), self.head_VD)


def _to_numpy(x: Tensor) -> NDArray[Any]:
    x = x.detach().cpu().contiguous()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _to_torch(rows: NDArray[Any]) -> Tensor:
    rows = np.array(rows)  # a private copy: the map is read-only memory of the page cache
    return torch.from_numpy(rows).view(torch.bfloat16) if rows.dtype == np.uint16 else torch.from_numpy(rows)


def cache_size(documents: TokenizedDocuments, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes that the targets of these documents take."""
    return int(documents.num_targets.sum()) * hidden_size * dtype.itemsize


def open_cache(
    root: Path,
    teacher: LiveTeacher,
    documents: TokenizedDocuments,
    dtype: torch.dtype,
    micro_tokens: int,
    first: int = 0,
) -> TargetCache:
    """The cache of (teacher, documents, dtype) under ``root``: found, or made empty.

    Raises:
        UserError: no room on disk, or files that are not what their record says.
    """
    identity = {
        "format": 1,
        "teacher": teacher.fingerprint,
        "documents": documents.content_hash,
        "dtype": str(dtype),
        "computed": [str(teacher.model.device.type), micro_tokens],  # other rectangles, other rounding
        "shape": [int(documents.num_targets.sum()), teacher.arch.hidden_size],
    }
    folder = root / "teacher" / fingerprint(identity)
    with locked(folder.with_suffix(".lock")):
        return _open(folder, identity, teacher, documents, dtype, micro_tokens, first)


def _open(
    folder: Path,
    identity: dict[str, Any],
    teacher: LiveTeacher,
    documents: TokenizedDocuments,
    dtype: torch.dtype,
    micro_tokens: int,
    first: int,
) -> TargetCache:
    hidden_path, checksum_path = folder / "hidden.npy", folder / "checksums.npy"
    if not (folder / "info.json").exists():
        require_space(folder, cache_size(documents, teacher.arch.hidden_size, dtype), "the teacher cache")
        kind = np.dtype(np.uint16) if dtype == torch.bfloat16 else np.dtype(str(dtype).removeprefix("torch."))
        np.lib.format.open_memmap(hidden_path, mode="w+", dtype=kind, shape=tuple(identity["shape"])).flush()
        if hasattr(os, "posix_fallocate"):  # a sparse file would fail later, at a write through the map
            with hidden_path.open("r+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, hidden_path.stat().st_size)
        np.save(checksum_path, np.full(len(documents), -1, dtype=np.int64))
        write_json(folder / "info.json", identity)
    if read_json(folder / "info.json") != identity:
        raise UserError(f"teacher cache {folder} belongs to another teacher or corpus; delete it and run again")
    try:
        checksums = np.load(checksum_path, allow_pickle=False)
        hidden = np.load(hidden_path, mmap_mode="r+" if (checksums < 0).any() else "r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"teacher cache {folder} cannot be read ({error}); delete it and run again") from None
    starts = np.concatenate([[0], np.cumsum(documents.num_targets)])
    if list(hidden.shape) != identity["shape"] or len(checksums) != len(documents):
        raise UserError(f"teacher cache {folder} is truncated; delete it and run again")
    return TargetCache(folder, documents, teacher.head_VD, hidden, checksums, starts, micro_tokens, first)
