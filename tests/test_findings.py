"""The README's tables and the spread a one-seed report quotes are those of the committed figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def findings():
    spec = importlib.util.spec_from_file_location("findings", ROOT / "benchmarks" / "findings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(findings):
    return json.loads(findings.FIGURES.read_text(encoding="utf-8"))


def test_readme_holds_the_figures_of_the_run(findings, figures):
    readme = findings.README.read_text(encoding="utf-8")
    assert findings.written(readme, figures) == readme
    assert findings.TWINS.read_text(encoding="utf-8") == findings.twins(figures)


def test_the_committed_figures_are_of_the_recipe_as_it_is(figures):
    from depthgrow.config import to_dict
    from depthgrow.recipes import laptop
    from depthgrow.study import FREE_FIELDS

    def flat(values, prefix=""):
        for name, value in values.items():
            yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    theirs, ours = (
        {k: v for k, v in flat(config) if k not in FREE_FIELDS} for config in (figures["config"], to_dict(laptop()))
    )
    assert {name: ours[name] for name in theirs} == theirs
    assert len(figures["seeds"]) >= 3


def test_the_figures_add_up(figures):
    """Differences by seed, their mean, and that every arm has learned."""
    ce = {arm: values["ce"]["values"] for arm, values in figures["arms"].items()}
    for curriculum in ("joint", "grow"):
        by_seed = [b - a for a, b in zip(ce[f"pre-{curriculum}"], ce[f"post-{curriculum}"], strict=True)]
        found = figures["deltas"][curriculum]["across"]
        assert found["values"] == pytest.approx(by_seed)
        assert found["mean"] == pytest.approx(sum(by_seed) / len(by_seed))
    assert max(max(values) for values in ce.values()) < figures["baselines"]["unigram"]["ce"] - 0.5
