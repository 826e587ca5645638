"""Several seeds in one folder: what is added, what is kept, what can be read while others run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from conftest import Silent, StopAt, StopIn
from depthgrow.cli import main
from depthgrow.files import UserError
from depthgrow.report.write import write_report
from depthgrow.runner import run_study
from depthgrow.runtime import Stopped

ARMS = ("pre-joint", "post-joint")


def run(study, root, stop=None, listener=None):
    run_study(study, root, stop=stop or StopAt(), listener=listener or Silent())


def finals(root):
    """{(arm, seed): held-out sums of its last phase}."""
    found = {}
    for arm, seeds in json.loads((root / "study.json").read_text())["arms"].items():
        for seed, keys in seeds.items():
            (path,) = (root / "nodes" / keys[-1] / "eval").glob("step-00000006.npz")
            with np.load(path) as arrays:
                found[arm, int(seed)] = arrays["ce"].copy()
    return found


def equal(a, b):
    assert a.keys() == b.keys()
    for name, values in a.items():
        np.testing.assert_array_equal(values, b[name])


def test_more_seeds_compute_only_what_is_missing_and_fewer_lose_nothing(mini, tmp_path):
    study = replace(mini, arms=ARMS)
    run(study, tmp_path / "grown")
    first = finals(tmp_path / "grown")
    more = Silent()
    run(replace(study, seeds=3), tmp_path / "grown", listener=more)
    assert any("6 phases, 6 of them distinct, 4 left to run" in note for note in more.notes)
    run(replace(study, seeds=3), tmp_path / "whole")
    equal(finals(tmp_path / "grown"), finals(tmp_path / "whole"))
    equal(first, {name: v for name, v in finals(tmp_path / "grown").items() if name[1] == 42})
    assert len({v.sum() for v in finals(tmp_path / "whole").values()}) == 6  # no two runs are the same
    run(replace(study, seeds=1), tmp_path / "grown")
    equal(finals(tmp_path / "grown"), finals(tmp_path / "whole"))
    assert json.loads((tmp_path / "grown" / "study.json").read_text())["config"]["seeds"] == 3


@pytest.mark.parametrize("seed", [43, 44])
def test_a_stop_in_a_later_seed_is_gone_on_from(mini, tmp_path, seed):
    study = replace(mini, arms=ARMS, seeds=3)
    listener = Silent()
    with pytest.raises(Stopped):
        run(study, tmp_path / "stopped", StopIn(listener, f"seed {seed}"), listener)
    record = json.loads((tmp_path / "stopped" / "study.json").read_text())["arms"]
    done = {
        s: [(tmp_path / "stopped" / "nodes" / record[a][str(s)][-1] / "done.json").exists() for a in ARMS]
        for s in (42, 43, 44)
    }
    assert all(done[42])
    assert not all(done[43] + done[44])
    assert ("One seed" if seed == 43 else "hardly trained") in write_report(tmp_path / "stopped").sentence
    assert "seed 44: 0 of 1 phases done" in (tmp_path / "stopped" / "report" / "report.md").read_text()
    run(study, tmp_path / "stopped")
    run(study, tmp_path / "whole")
    equal(finals(tmp_path / "stopped"), finals(tmp_path / "whole"))


def test_a_finished_seed_is_told_and_can_be_read_while_others_run(mini, tmp_path):
    read = []

    class Reader(Silent):
        def note(self, text):
            super().note(text)
            if text.startswith("seed "):
                read.append(json.loads(write_report(tmp_path).html.with_name("report.json").read_text())["deltas"])

    reader = Reader()
    run(replace(mini, arms=ARMS, seeds=3), tmp_path, listener=reader)
    told = [note for note in reader.notes if note.startswith("seed ")]
    assert [note.split(":")[0] for note in told] == [
        "seed 42 is finished (1 of 3 seeds)",
        "seed 43 is finished (2 of 3 seeds)",
    ]
    assert [deltas["joint"]["seeds"] for deltas in read] == [[42], [42, 43]]


def test_side_by_side_seeds_are_finished_in_turn(mini, tmp_path):
    silent = Silent()
    study = replace(mini, seeds=3, train=replace(mini.train, jobs=2))
    run(study, tmp_path, listener=silent)
    ends = [note for note in silent.notes if " done: " in note]
    seeds = [int(note.split(" done: ")[0].split()[-1]) for note in ends]
    assert len(seeds) == 24
    assert seeds.index(44) >= 6  # the last seed's first phase ends after most of the first seed's eight
    assert any(note.startswith("seed 42 is finished") for note in silent.notes)


def test_a_study_goes_on_from_its_folder_alone(mini, tmp_path, capsys):
    """The command that the report of one seed names."""
    run(replace(mini, arms=ARMS), tmp_path / "s")
    sentence = write_report(tmp_path / "s").sentence
    command = sentence.split("`")[1]
    assert command == f"depthgrow study {tmp_path / 's'} --seeds 3"
    assert main(command.split()[1:]) == 0
    assert {seed for _, seed in finals(tmp_path / "s")} == {42, 43, 44}
    assert "seeds" in capsys.readouterr().out


def test_another_first_seed_is_refused_and_nothing_is_lost(mini, tmp_path):
    study = replace(mini, arms=ARMS)
    run(study, tmp_path)
    before = finals(tmp_path)
    with pytest.raises(UserError, match="was made with seed=42, now it is 43"):
        run(replace(study, seed=43, seeds=2), tmp_path)
    equal(before, finals(tmp_path))
