"""What a person sees while a study runs: two bars on a terminal, plain lines with the same facts elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn

PLAIN_EVERY = 15.0  # seconds between two progress lines where there is no terminal


def duration(seconds: float) -> str:
    """75 -> '1:15', 3700 -> '1:01:40'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Console:
    """Shows notes and progress; estimates the time left from the work announced by `begin`."""

    def __init__(self, stream: TextIO = sys.stderr, *, interactive: bool | None = None):
        self._rich = RichConsole(file=stream, highlight=False, soft_wrap=True)
        self._interactive = self._rich.is_terminal if interactive is None else interactive
        self._stream = stream
        self._total = self._finished = 0.0
        self._started = self._last_line = 0.0
        self._costs: dict[str, float] = {}
        self._place: tuple[str, int] = ("", 0)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"), console=self._rich
        )
        self._phase: TaskID | None = None
        self._study: TaskID | None = None

    def __enter__(self) -> Console:
        if self._interactive:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._interactive:
            self._bars.stop()

    def note(self, text: str) -> None:
        if self._interactive:
            self._bars.console.print(text, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, costs: dict[str, float], steps: dict[str, int]) -> None:
        """Announce the phases to come: cost of one step of each, in any one unit, and how many steps are left."""
        self._costs, self._total = costs, sum(costs[label] * steps[label] for label in costs)
        self._finished, self._started, self._place = 0.0, time.monotonic(), ("", 0)

    def progress(self, label: str, step: int, num_steps: int, values: dict[str, float]) -> None:
        facts = [f"{step}/{num_steps}"]
        for name in ("loss", "held_out_ce"):
            if name in values:
                facts.append(f"{name} {values[name]:.3f}")
        if "tokens_per_second" in values:
            facts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        left = self._time_left(label, step)
        if self._interactive:
            self._show_bars(label, step, num_steps, facts, left)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_EVERY or step == num_steps:
            self._last_line = now
            suffix = f"  about {duration(left)} left" if left is not None else ""
            print(f"{label}  {'  '.join(facts)}{suffix}", file=self._stream, flush=True)

    def _time_left(self, label: str, step: int) -> float | None:
        if label not in self._costs:
            return None
        previous, before = self._place
        self._finished += self._costs[label] * (step - before if label == previous else 0)
        self._place = (label, step)
        if self._finished <= 0:
            return None
        return (time.monotonic() - self._started) * (self._total - self._finished) / self._finished

    def _show_bars(self, label: str, step: int, num_steps: int, facts: list[str], left: float | None) -> None:
        if self._phase is None:
            self._phase = self._bars.add_task(label, total=num_steps, facts="")
        self._bars.update(self._phase, description=label, completed=step, total=num_steps, facts="  ".join(facts))
        if left is not None:
            if self._study is None:
                self._study = self._bars.add_task("study", total=self._total, facts="")
            self._bars.update(
                self._study, completed=self._finished, total=self._total, facts=f"about {duration(left)} left"
            )
