"""metrics.jsonl: one record a line, appended in step order, cut back to the checkpoint when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from depthgrow.files import UserError, finite_or_none, write_atomic


class MetricsLog:
    """Append-only JSON lines with a ``kind`` ('train' or 'eval') and a ``step`` (steps finished in this phase).

    With ``tensorboard`` every number also goes to event files beside it, as kind/name.
    """

    def __init__(self, path: Path, *, tensorboard: bool = False):
        self.path = path
        self._events: Any = None
        self._tensorboard = tensorboard

    def append(self, records: list[dict[str, Any]]) -> None:
        if records:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.writelines(_line(record) for record in records)
        for record in records if self._events is not None else ():
            for name, value in record.items():
                if name not in ("kind", "step") and value is not None:
                    self._events.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        if self._events is not None:
            self._events.flush()  # a run may be stopped at any step

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def cut_after(self, step: int) -> None:
        """Drop what was written after the checkpoint of ``step``: it will be computed again."""
        if self._tensorboard:
            self._events = event_writer()(str(self.path.parent / "tensorboard"), purge_step=step + 1)
        if self.path.exists():
            kept = [record for record in read_metrics(self.path) if record["step"] <= step]
            write_atomic(self.path, "".join(_line(record) for record in kept))


def _line(record: dict[str, Any]) -> str:
    """A number that is not finite becomes null; one that was not measured has no key."""
    return json.dumps(finite_or_none(record), allow_nan=False) + "\n"


def event_writer() -> Any:
    """TensorBoard's writer class.

    Raises:
        UserError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "train.tensorboard needs TensorBoard: pip install 'depthgrow[tensorboard]', or leave it false"
        ) from None
    return SummaryWriter


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records; a last line torn by a kill is ignored."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
