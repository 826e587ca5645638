"""What a person sees of a study: its tree and bars on a terminal, plain lines with the same facts elsewhere."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

from depthgrow.runtime import Paths, Work

PLAIN_EVERY = 15.0  # seconds between two progress lines where there is no terminal
MARKS = {"done": "●", "started": "◐", "missing": "○", "diverged": "✗"}
LEGEND = "● done  ◐ started  ○ left  ✗ diverged  (in parentheses: shared with an arm above)"


def duration(seconds: float) -> str:
    """75 -> '1:15', 3700 -> '1:01:40'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def tree_table(paths: Paths, states: dict[str, str]) -> Table:
    """One line an arm, one column a seed, one mark a phase. ``states`` knows the nodes that are not missing."""
    seeds = list(dict.fromkeys(seed for per_seed in paths.values() for seed in per_seed))
    table = Table(Column("", no_wrap=True), *(f"seed {seed}" for seed in seeds), box=None, padding=(0, 2, 0, 0))
    seen: set[str] = set()
    for arm, per_seed in paths.items():
        cells = []
        for seed in seeds:
            marks = [(node, MARKS[states.get(node, "missing")]) for node in per_seed.get(seed, [])]
            cells.append("".join(f"({mark})" if node in seen else mark for node, mark in marks))
            seen.update(node for node, _ in marks)
        table.add_row(arm, *cells)
    return table


def tree_text(paths: Paths, states: dict[str, str]) -> str:
    """The same as lines of text."""
    console = RichConsole(width=200, file=io.StringIO(), color_system=None, markup=False)
    with console.capture() as captured:
        console.print(tree_table(paths, states), LEGEND, sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class _Lasting:
    """A stream that may close while it is written to (``| head``, a lost terminal): training goes on without it."""

    def __init__(self, stream: TextIO):
        self._stream, self._open = stream, True

    def write(self, text: str) -> int:
        if self._open:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:  # a terminal without these characters
                return self._stream.write(text.encode("ascii", "replace").decode())
            except (OSError, ValueError):
                self._open = False
        return len(text)

    def flush(self) -> None:
        if self._open:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Console:
    """Shows notes and progress; estimates the time left from the work announced by `begin`."""

    def __init__(self, stream: TextIO | None = None, *, interactive: bool | None = None):
        stream = cast(TextIO, _Lasting(stream or sys.stderr))
        self._rich = RichConsole(file=stream, highlight=False, soft_wrap=True, markup=False)
        self._interactive = stream.isatty() if interactive is None else interactive  # whatever FORCE_COLOR says
        self._stream = stream
        self._started = 0.0
        self._last_line: dict[str, float] = {}
        self._work: dict[str, Work] = {}
        self._steps: dict[str, int] = {}
        self._reported: set[str] = set()
        self._bars_of: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._rich,
        )
        self._paths: Paths = {}
        self._states: dict[str, str] = {}
        self._live = Live(get_renderable=self._view, console=self._rich, vertical_overflow="ellipsis")

    def __enter__(self) -> Console:
        if self._interactive:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._interactive:
            self._live.stop()

    def _view(self) -> RenderableType:
        return Group(self._bars, tree_table(self._paths, self._states), LEGEND) if self._paths else self._bars

    def note(self, text: str) -> None:
        if self._interactive:
            self._rich.print(text, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, work: dict[str, Work], paths: Paths, states: dict[str, str]) -> None:
        """Announce the phases to come, and the tree they belong to."""
        self._paths, self._states = paths, dict(states)
        if not self._interactive and paths:
            print(tree_text(paths, states), file=self._stream, flush=True)
        self._work, self._steps = dict(work), {label: w.start for label, w in work.items()}
        self._started, self._reported = 0.0, set()

    def progress(self, label: str, step: int, num_steps: int, values: dict[str, Any]) -> None:
        facts = [f"{step}/{num_steps}"]
        for name in ("loss", "held_out_ce"):
            if name in values:
                facts.append(f"{name} {values[name]:.3f}")
        if "tokens_per_second" in values:
            facts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        left = self._time_left(label, step)
        if label in self._work:
            self._states[label] = "done" if step == num_steps else "started"
        if self._interactive:
            self._show_bars(label, step, num_steps, facts, left)
            return
        now = time.monotonic()
        if now - self._last_line.get(label, 0.0) >= PLAIN_EVERY or "held_out_ce" in values:
            self._last_line[label] = now
            suffix = "" if left is None else f"  ({self._study(left)})"
            print(f"{label}  {'  '.join(facts)}{suffix}", file=self._stream, flush=True)

    def _study(self, left: float) -> str:
        """Where the whole study is, all seeds of it."""
        phases = {node for per_seed in self._paths.values() for keys in per_seed.values() for node in keys}
        done = sum(self._states.get(node) == "done" for node in phases)
        return f"study: {done} of {len(phases)} phases, about {duration(left)} left"

    def _time_left(self, label: str, step: int) -> float | None:
        """Seconds, from the work done since `begin`; None until there is some."""
        if label not in self._work:
            return None
        if label not in self._reported:
            self._reported.add(label)
            self._started = self._started or time.monotonic()
            if all(self._steps[name] < w.steps for name, w in self._work.items()):
                # none has finished: this one began before the clock did, and so did its steps up to here
                self._work[label] = replace(self._work[label], start=step)
        self._steps[label] = step
        done = sum(w.cost * (self._steps[name] - w.start) for name, w in self._work.items())
        left = sum(w.cost * (w.steps - self._steps[name]) for name, w in self._work.items())
        return (time.monotonic() - self._started) * left / done if done else None

    def _show_bars(self, label: str, step: int, num_steps: int, facts: list[str], left: float | None) -> None:
        if label not in self._bars_of:
            self._bars_of[label] = self._bars.add_task(label, total=num_steps, facts="")
        self._bars.update(self._bars_of[label], completed=step, facts="  ".join(facts))
        if step == num_steps:
            self._bars.update(self._bars_of[label], visible="held_out_ce" not in " ".join(facts))
        if left is not None:
            if "study" not in self._bars_of:
                self._bars_of["study"] = self._bars.add_task("study", total=1.0, facts="")
            elapsed = time.monotonic() - self._started
            facts_of_all = self._study(left).removeprefix("study: ")
            self._bars.update(self._bars_of["study"], completed=elapsed / (elapsed + left), facts=facts_of_all)
