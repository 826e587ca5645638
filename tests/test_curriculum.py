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


def test_controls_differ_from_grow_or_joint_in_one_thing():
    """Each control by its phases: what it varies, and the budget that it matches."""

    def phases(name):
        return canonical(CURRICULA[name](3, 5))

    def tokens(name):
        return sum(p.steps for p in phases(name))

    def active(name):
        return sum(p.steps * p.active for p in phases(name))

    assert phases("joint-long")[0] == phases("joint-replay")[0] == phases("joint")[0]  # they continue joint
    for blocks in (1, 2, 3, 4, 5):
        spent = [sum(p.steps * p.active for p in CURRICULA[c](blocks, 6)) for c in ("joint-long", "grow")]
        assert spent[0] == spent[1]
    assert active("joint-long") == active("grow") == 30
    assert tokens("joint-longer") == tokens("joint-replay") == tokens("grow") == 15
    assert active("grow") / active("joint-longer") == 18 / 27
    assert data_start(phases("joint-longer"), 2) == DataPosition(2, 0)
    assert data_start(phases("joint-replay"), 2) == DataPosition(0, 10)
    assert data_start(phases("grow-fresh"), 2) == DataPosition(2, 0)
    assert data_start(phases("grow-rewind"), 2) == DataPosition(0, 0)
    assert all(not p.reset_optimizer and p.restart_lr for p in phases("joint-long")[1:])
    for name, field in (("grow-keep", "reset_optimizer"), ("grow-one-lr", "restart_lr"), ("grow-fresh", "data")):
        for ours, base in zip(phases(name)[1:], phases("grow")[1:], strict=True):
            assert {k for k in vars(ours) if vars(ours)[k] != vars(base)[k]} == {field}
    assert [p.steps for p in CURRICULA["joint-long"](3, 5, 13)] == [5, 5, 3]
    assert [p.steps for p in CURRICULA["joint-long"](3, 5, 12)] == [5, 7]  # a rest too short for its own schedule
    assert [p.steps for p in CURRICULA["joint-long"](3, 5, 2)] == [2]
    assert {p.trainable for p in phases("freeze-head")[1:]} == {"newest-only"}
    assert phases("freeze-head")[0] == phases("grow")[0]
    assert [p.active for p in phases("jump")] == [1, 3]
    assert phases("jump")[0] == phases("grow")[0]


def test_depth_cannot_shrink():
    with pytest.raises(UserError, match="fewer"):
        canonical([Phase(active=2, steps=1), Phase(active=1, steps=1)])


@pytest.mark.parametrize("bad", [{"active": 0}, {"steps": 0}, {"trainable": "oldest"}, {"data": "again"}])
def test_bad_phase_names_the_field(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Phase(**{"active": 1, "steps": 1, **bad})
