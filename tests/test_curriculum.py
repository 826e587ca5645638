"""Phases, where they read, and their canonical form."""

from __future__ import annotations

import pytest

from depthgrow.curriculum import CURRICULA, DataPosition, Phase, canonical, data_start, freeze, grow, single
from depthgrow.files import UserError


def test_named_curricula():
    assert [p.active for p in grow(3, 5)] == [1, 2, 3]
    assert [p.trainable for p in freeze(3, 5)] == ["newest"] * 3
    assert canonical(freeze(3, 5))[0] == canonical(grow(3, 5))[0] == canonical(single(3, 5))[0]
    assert canonical(freeze(3, 5))[1] != canonical(grow(3, 5))[1]
    assert all(sum(p.steps for p in make(3, 5)) in (5, 15) for make in CURRICULA.values())


def test_data_goes_on_rewinds_or_is_fresh():
    phases = [
        Phase(active=1, steps=5),
        Phase(active=2, steps=7),
        Phase(active=2, steps=3, data="rewind"),
        Phase(active=3, steps=4, data="fresh"),
        Phase(active=3, steps=1),
    ]
    starts = [data_start(phases, i) for i in range(5)]
    assert starts == [
        DataPosition(0, 0),
        DataPosition(0, 5),
        DataPosition(0, 0),
        DataPosition(1, 0),
        DataPosition(1, 4),
    ]


def test_depth_cannot_shrink():
    with pytest.raises(UserError, match="fewer"):
        canonical([Phase(active=2, steps=1), Phase(active=1, steps=1)])


@pytest.mark.parametrize("bad", [{"active": 0}, {"steps": 0}, {"trainable": "oldest"}, {"data": "again"}])
def test_bad_phase_names_the_field(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Phase(**{"active": 1, "steps": 1, **bad})
