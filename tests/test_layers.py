"""Imports go down only, and reading a report needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import depthgrow

ROOT = Path(depthgrow.__file__).parent

# From the ground up; a module may import modules of lower layers, and of its own layer only where listed together
# under one name (a package).
LAYERS = [
    {"files"},
    {"config", "runtime", "architecture", "parallel", "plugins"},
    {"curriculum", "metrics", "checkpoint", "ledger"},
    {"data"},
    {"head_loss", "optim", "interventions"},
    {"student"},
    {"teacher", "evaluate", "export", "diagnostics"},
    {"phase"},
    {"trainer", "report"},
    {"study", "pretrain", "console"},
    {"prepare", "plan", "status", "recipes"},
    {"runner"},
    {"arms"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def top(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("depthgrow"):
            if node.module == "depthgrow":
                yield from (alias.name for alias in node.names if not alias.name.startswith("__"))
            else:
                yield node.module.split(".")[1]


def test_imports_only_point_down():
    wrong = []
    for path in ROOT.rglob("*.py"):
        if path.parent == ROOT and path.name == "__init__.py":
            continue
        own = top(path)
        assert own in LEVEL, f"{path.name} has no layer: add it to this test"
        for name in imports(path):
            if name != own and LEVEL[name] >= LEVEL[own]:
                wrong.append(f"{own} imports {name}")
    assert not wrong


def test_report_does_not_import_torch():
    code = "import sys, depthgrow.report.write; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_library_stays_readable():
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


def test_files_are_read_and_written_in_a_stated_encoding():
    """What ruff's PLW1514 does not see: ``read_text`` and ``write_text`` of a value whose type it cannot tell."""
    wrong = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in ("read_text", "write_text") and not any(k.arg == "encoding" for k in node.keywords):
                wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong
