"""metrics.jsonl: one record a line, appended in step order, cut back to the checkpoint when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from depthgrow.files import write_atomic

# name: (unit, how it is reduced over the tokens or documents of a step)
METRICS = {
    "loss": ("nats/token", "alpha*tau^2*kl + gamma*ce, mean over target tokens of the global batch"),
    "ce": ("nats/token", "mean over target tokens"),
    "kl": ("nats/token", "KL(teacher || student), mean over target tokens"),
    "teacher_entropy": ("nats/token", "mean over target tokens"),
    "soft_ce": ("nats/token", "kl + teacher_entropy"),
    "ppl": ("1", "exp(ce)"),
    "lr": ("1", "value at the step"),
    "grad_norm": ("1", "global L2 norm before clipping"),
    "tokens": ("tokens", "target tokens of the step"),
    "tokens_per_second": ("tokens/s", "over the steps since the last line that has it"),
}


class MetricsLog:
    """Append-only JSON lines with a ``kind`` ('train' or 'eval') and a ``step`` (steps finished in this phase)."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, records: list[dict[str, Any]]) -> None:
        if records:
            with self.path.open("a") as stream:
                stream.writelines(json.dumps(record) + "\n" for record in records)

    def cut_after(self, step: int) -> None:
        """Drop what was written after the checkpoint of ``step``: it will be computed again."""
        if self.path.exists():
            kept = [record for record in read_metrics(self.path) if record["step"] <= step]
            write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records; a last line torn by a kill is ignored."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
