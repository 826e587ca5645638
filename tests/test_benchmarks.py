"""Every benchmark runs, at toy size: what they measure is for docs/performance.md, not for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOY = {
    "step.py": ["--recipe", "debug", "--steps", "8", "--repeats", "1", "--peers", "plain"],
    "limit.py": ["--recipe", "debug", "--steps", "8", "--repeats", "1"],
    "ranks.py": ["--recipe", "debug", "--steps", "8", "--repeats", "1"],
    "study.py": ["--recipe", "debug", "--steps", "8", "--repeats", "1"],
    "head.py": ["--tokens", "64", "--hidden", "16", "--vocab", "50,60", "--repeats", "1"],
    "scaling.py": ["--repeats", "1", "--tokens", "16"],
    "layer.py": ["--recipe", "debug", "--steps", "2", "--rounds", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOY)
def test_a_benchmark_prints_a_table_and_writes_its_figures(name, tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / name), *TOY[name], "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) > 3
    rows = json.loads(out.read_text())["rows"]
    assert rows
    if name == "step.py":  # the other loop does the same work
        losses = [row["last_loss"] for row in rows.values()]
        assert max(losses) - min(losses) < 1e-4
    if name == "layer.py":
        losses = [way["first_loss"] for way in rows["ways"].values()]
        assert max(losses) - min(losses) < 1e-4


@pytest.mark.slow
def test_the_gpu_script_runs_at_toy_size(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["sh", str(ROOT / "benchmarks" / "gpu.sh"), "--tiny", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {p.name for p in tmp_path.iterdir()} == {"paper-shape.json", "head.json"}
