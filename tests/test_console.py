"""What is shown: plain lines without a terminal, and a time left that is right."""

from __future__ import annotations

import io

import pytest

from depthgrow import console as module
from depthgrow.console import Console, duration
from depthgrow.runtime import Work


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_durations():
    assert [duration(s) for s in (0, 75, 3700)] == ["0:00", "1:15", "1:01:40"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_time_left_is_right_within_a_quarter_after_a_tenth(clock, jobs):
    """Phases of unequal cost, one or two at a time, after a warm-up that must not count."""
    stream = io.StringIO()
    console = Console(stream, interactive=False)
    costs = {"a": 3.0, "b": 3.0, "c": 9.0, "d": 9.0}
    console.begin({label: Work(cost, 0, 100) for label, cost in costs.items()}, {}, {})
    clock[0] += 30  # imports
    total = sum(100 * c for c in costs.values()) * 0.01 / jobs
    begin = clock[0]
    order = [["a"], ["b"], ["c"], ["d"]] if jobs == 1 else [["a", "b"], ["c", "d"]]
    for labels in order:
        for step in range(10, 101, 10):
            clock[0] += 10 * costs[labels[0]] * 0.01
            for label in labels:
                left = console._time_left(label, step)
            true = total - (clock[0] - begin)
            if clock[0] - begin > 0.1 * total and true > 1:
                assert left == pytest.approx(true, rel=0.25)


def test_plain_lines_hold_the_facts_and_do_not_flood(clock):
    stream = io.StringIO()
    console = Console(stream, interactive=False)
    with console:
        console.note("loading")
        console.begin({"a": Work(1.0, 0, 100)}, {}, {})
        for step in range(1, 100):
            clock[0] += 1
            console.progress("a", step, 100, {"loss": 2.0, "tokens_per_second": 1234.0})
        console.progress("a", 100, 100, {"held_out_ce": 3.25})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading"
    assert 5 <= len(lines) <= 10
    assert "loss 2.000  1,234 tokens/s" in lines[2]
    assert "left" in lines[2]
    assert "held_out_ce 3.250" in lines[-1]


def test_bars_on_a_terminal():
    stream = io.StringIO()
    with Console(stream, interactive=True) as console:
        console.note("[not markup]")
        console.begin({"a": Work(1.0, 0, 10)}, {"pre-joint": {"42": ["a"]}, "pre-long": {"42": ["a", "b"]}}, {})
        console.progress("a", 5, 10, {"loss": 2.0})
        console.progress("a", 10, 10, {"held_out_ce": 2.0})
    text = stream.getvalue()
    assert "[not markup]" in text
    last = text[text.rindex("pre-joint") :]
    assert "pre-joint  ●" in last
    assert "pre-long   (●)○" in last


def test_tree_shows_what_is_done_started_left_and_shared():
    paths = {"pre-grow": {"42": ["a", "b"], "43": ["c", "d"]}, "pre-freeze": {"42": ["a", "e"]}}
    stream = io.StringIO()
    console = Console(stream, interactive=False)
    console.begin({}, paths, {"a": "done", "b": "started"})
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines == [
        "            seed 42  seed 43",
        "pre-grow    ●◐       ○○",
        "pre-freeze  (●)○",
        "● done  ◐ started  ○ left  ✗ diverged  (in parentheses: shared with an arm above)",
    ]
