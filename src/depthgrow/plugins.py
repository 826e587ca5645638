"""Python files of the user's that are part of a run: a recipe, and what it registers. Worker processes run them again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ran: list[Path] = []


def run_file(path: Path) -> ModuleType:
    """Execute a file as a module, and remember it for `ran`."""
    spec = importlib.util.spec_from_file_location(f"depthgrow_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if path.resolve() not in ran:
        ran.append(path.resolve())
    return module
