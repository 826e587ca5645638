"""The tree: sharing, re-use, stopping, and refusing a folder of another config."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from conftest import Silent, StopAt, StopIn, tensors_equal
from depthgrow.checkpoint import latest_checkpoint
from depthgrow.config import fields_of, from_dict, override, parse_assignments, to_dict
from depthgrow.files import UserError
from depthgrow.metrics import read_metrics
from depthgrow.recipes import RECIPES, load_recipe
from depthgrow.runner import run_study
from depthgrow.runtime import Stopped
from depthgrow.status import study_status
from depthgrow.study import Arm, Facts, Study, load_study, parse_arm, plan_tree

FACTS = Facts("teacher", ("shard",), "held", "cpu")


def run(study, root, stop=None):
    listener = Silent()
    run_study(study, root, stop=stop or StopAt(), listener=listener)
    return listener


def contents(root):
    """Weights, moments, evaluations and metrics (without timings) of every node."""
    result = {}
    for folder in sorted((root / "nodes").iterdir()):
        checkpoint = latest_checkpoint(folder / "checkpoints")
        timed = ("tokens_per_second", "data_wait")
        records = [{k: v for k, v in r.items() if k not in timed} for r in read_metrics(folder / "metrics.jsonl")]
        evals = {p.name: dict(np.load(p)) for p in sorted((folder / "eval").iterdir())}
        result[folder.name] = (checkpoint.weights(), checkpoint.optimizer(), records, evals)
    return result


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert tensors_equal(a[key][0], b[key][0])
        assert tensors_equal(a[key][1], b[key][1])
        assert a[key][2] == b[key][2]
        assert a[key][3].keys() == b[key][3].keys()
        for name, arrays in a[key][3].items():
            assert all(np.array_equal(arrays[k], b[key][3][name][k]) for k in arrays)


def test_grow_freeze_and_single_share_their_first_phase(mini):
    study = replace(mini, arms=("pre-grow", "pre-freeze", "pre-single", "post-grow", "pre-joint"))
    tree = plan_tree(study, FACTS)
    paths = {arm: path for (arm, _), path in tree.paths.items()}
    assert paths["pre-grow"][0] == paths["pre-freeze"][0] == paths["pre-single"][0]
    assert paths["pre-grow"][1] != paths["pre-freeze"][1]
    assert paths["pre-grow"][0] != paths["post-grow"][0]
    assert len(tree.nodes) == 3 + 2 + 3 + 1
    assert sum(len(n.users) for n in tree.nodes.values()) == 3 + 3 + 1 + 3 + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("student.init_gain", 1.0),
        ("objective.tau", 2.0),
        ("optim.peak_lr", 1.0),
        ("train.batch_documents", 5),
        ("train.steps_per_phase", 7),
        ("train.dtype", "bfloat16"),
        ("seed", 43),
        ("student.layers_per_block", 2),
    ],
)
def test_whatever_decides_the_weights_is_in_the_key(mini, field, value):
    keys = plan_tree(mini, FACTS).nodes.keys()
    assert not keys & plan_tree(override(mini, {field: value}), FACTS).nodes.keys()


def test_other_teacher_or_text_other_keys_but_log_interval_not(mini):
    keys = plan_tree(mini, FACTS).nodes.keys()
    for facts in (Facts("other", ("shard",), "held", "cpu"), Facts("teacher", ("other",), "held", "cpu")):
        assert not keys & plan_tree(mini, facts).nodes.keys()
    assert keys == plan_tree(override(mini, {"train.log_every": 5, "train.jobs": 4}), FACTS).nodes.keys()


def test_second_run_does_nothing_and_an_added_arm_only_what_is_new(mini, tmp_path):
    study = replace(mini, arms=("pre-grow",))
    run(study, tmp_path)
    before = contents(tmp_path)
    again = run(study, tmp_path)
    assert not [n for n in again.notes if "trainable" in n]
    more = run(replace(mini, arms=("pre-freeze", "pre-single")), tmp_path)
    assert len([n for n in more.notes if "trainable" in n]) == 2
    after = contents(tmp_path)
    assert_same(before, {k: after[k] for k in before})
    assert study_status(tmp_path)["arms"] == dict.fromkeys(
        ["pre-grow seed 42", "pre-freeze seed 42", "pre-single seed 42"], "done"
    )


def test_side_by_side_equals_one_after_the_other(mini, tmp_path):
    run(mini, tmp_path / "one")
    run(override(mini, {"train.jobs": 2}), tmp_path / "two")
    assert_same(contents(tmp_path / "one"), contents(tmp_path / "two"))


def test_stopped_anywhere_goes_on_to_the_same_numbers(mini, tmp_path):
    study = replace(mini, arms=("post-grow", "pre-joint"))
    run(study, tmp_path / "whole")
    stop = StopAt(3, 4, 13, 14, 31, 32)
    stops = 0
    while True:
        try:
            run(study, tmp_path / "parts", stop)
            break
        except Stopped:
            stops += 1
    assert stops >= 2
    assert_same(contents(tmp_path / "whole"), contents(tmp_path / "parts"))


def test_seeds_are_paired_and_apart(mini, tmp_path):
    study = replace(mini, arms=("pre-single", "post-single"), seeds=2)
    run(study, tmp_path)
    tree = plan_tree(study, FACTS)
    assert len(tree.nodes) == 4
    tokens = {}
    for folder in (tmp_path / "nodes").iterdir():
        identity = json.loads((folder / "config.json").read_text())["identity"]
        steps = [r["tokens"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
        tokens.setdefault(identity["run"]["seed"], []).append(steps)
    assert tokens[42][0] == tokens[42][1] != tokens[43][0] == tokens[43][1]


def test_folder_of_another_config_is_refused_and_untouched(mini, tmp_path):
    study = replace(mini, arms=("pre-single",))
    run(study, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"made with optim\.peak_lr=0\.002, now it is 0\.1"):
        run(override(study, {"optim.peak_lr": 0.1}), tmp_path)
    assert_same(before, contents(tmp_path))


def test_two_processes_do_not_write_one_folder(mini, tmp_path):
    from depthgrow.study import Workspace

    with (
        Workspace(tmp_path).locked(),
        pytest.raises(UserError, match="in use by another"),
        Workspace(tmp_path).locked(),
    ):
        pass


def test_finished_parent_without_its_checkpoint_is_named(mini, tmp_path):
    run(replace(mini, arms=("pre-single",)), tmp_path)
    folder = next((tmp_path / "nodes").iterdir())
    path = folder / "checkpoints" / "step-00000006" / "weights.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="delete the folder"):
        run(replace(mini, arms=("pre-grow",)), tmp_path)


def test_ledger_counts_match_the_closed_form(mini, tmp_path):
    study = replace(mini, arms=("pre-joint", "pre-grow"))
    run(study, tmp_path)
    tree_arms = json.loads((tmp_path / "study.json").read_text())["arms"]
    done = {
        arm: [json.loads((tmp_path / "nodes" / k / "done.json").read_text()) for k in seeds["42"]]
        for arm, seeds in tree_arms.items()
    }
    one_pass = done["pre-joint"][0]["counted"]["tokens"]
    layers = study.student.layers_per_block
    assert [d["counted"]["tokens"] for d in done["pre-grow"]] == [one_pass] * 3
    assert [d["unique_tokens"] for d in done["pre-grow"]] == [one_pass] * 3
    active = [sum(d["counted"]["active_layer_tokens"] for d in done[a]) for a in ("pre-joint", "pre-grow")]
    assert active == [3 * layers * one_pass, (1 + 2 + 3) * layers * one_pass]


def test_parse_arm():
    assert parse_arm("post-grow") == Arm("post", "grow", None, None, False)
    assert parse_arm("pre-grow-fresh+forward-norm") == Arm("pre", "grow-fresh", None, "forward-norm", False)
    assert parse_arm("pre-grow+rescale+reinit") == Arm("pre", "grow", None, "rescale", True)
    assert parse_arm("post-joint-long@700") == Arm("post", "joint-long", 700, None, False)
    for name in ("post-grow@700", "post-joint-long@0", "post-joint-long@many"):
        with pytest.raises(UserError, match="only joint-long takes a number of steps"):
            parse_arm(name)
    for name in ("pre-grow+rescale+forward-norm", "pre-grow+reinit+reinit", "pre-grow+reinit+rescale"):
        with pytest.raises(UserError, match="at most one intervention"):
            parse_arm(name)
    with pytest.raises(UserError, match=r"outlast a phase of post-joint-long@30 \(30 steps\)"):
        override(load_recipe("laptop"), {"arms": ["post-joint-long@30"]})
    with pytest.raises(UserError, match="did you mean 'forward-norm'"):
        parse_arm("pre-grow+forwardnorm")
    with pytest.raises(UserError, match="did you mean 'post-grow'"):
        parse_arm("post-gorw")


def test_config_round_trip_and_overrides():
    for make in RECIPES.values():
        study = make()
        assert from_dict(Study, json.loads(json.dumps(to_dict(study)))) == study
    study = override(
        load_recipe("laptop"),
        parse_assignments(
            ["--optim.peak_lr", "2e-3", "--arms=pre-grow,post-grow", "--seeds", "3", "--optim.warmup_steps", "none"]
        ),
    )
    assert (study.optim.peak_lr, study.arms, study.seeds) == (0.002, ("pre-grow", "post-grow"), 3)
    assert study.optim.warmup_steps is None
    assert dict(fields_of(study))["objective.alpha"] == 0.7


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ({"optim.peek_lr": "1"}, "did you mean 'optim.peak_lr'"),
        ({"optim.peak_lr": "fast"}, r"--optim.peak_lr 'fast'"),
        ({"seeds": "0"}, "seeds=0"),
        ({"arms": "pre-gro"}, "did you mean 'pre-grow'"),
        ({"arms": ""}, "arms is empty"),
        ({"teacher.targets": "frozen"}, "auto, hidden, live, topk"),
        ({"teacher.targets": "topk", "objective.tau": "2"}, "needs exact targets"),
        ({"teacher.dtype": "float64"}, "dtype 'float64' is not one of"),
        ({"train.steps_per_phase": "50"}, "warmup_steps=60 must be less than"),
        ({"data.shard_documents": "0"}, "shard_documents=0"),
        ({"data.shard_documents": "3"}, "less than train.batch_documents"),
        ({"train.jobs": "-1"}, "jobs=-1"),
        ({"optim.beta1": "2"}, "beta1=2.0"),
        ({"objective.alpha": "nan"}, "alpha=nan"),
        ({"train.steps_per_phase": "0"}, "steps_per_phase=0"),
    ],
)
def test_bad_overrides_are_one_line(assignments, message):
    with pytest.raises(UserError, match=message) as caught:
        override(load_recipe("laptop"), assignments)
    assert "\n" not in str(caught.value)


def test_recipe_files(tmp_path):
    (tmp_path / "mine.yaml").write_text("recipe: laptop\ntrain:\n  steps_per_phase: 107\noptim.peak_lr: 0.5\n")
    study = load_recipe(str(tmp_path / "mine.yaml"))
    assert (study.train.steps_per_phase, study.optim.peak_lr) == (107, 0.5)
    (tmp_path / "mine.py").write_text("from depthgrow.recipes import debug\ndef study():\n    return debug()\n")
    assert load_recipe(str(tmp_path / "mine.py")).name == "debug"
    (tmp_path / "bad.yaml").write_text("recipe: laptop\ntrain: {stepz: 1}\n")
    with pytest.raises(UserError, match=r"train\.stepz"):
        load_recipe(str(tmp_path / "bad.yaml"))
    (tmp_path / "empty.py").write_text("")
    for name, message in (("empty.py", "must define study"), ("none.yaml", "does not exist")):
        with pytest.raises(UserError, match=message):
            load_recipe(str(tmp_path / name))
    with pytest.raises(UserError, match="did you mean 'laptop'"):
        load_recipe("labtop")


def test_other_teacher_or_text_in_one_folder_is_refused(mini, shared, tmp_path):
    """The same config strings over changed files: old and new arms must not meet in one report."""
    import shutil

    corpus = tmp_path / "texts.jsonl"
    shutil.copy(shared.corpus, corpus)
    teacher = tmp_path / "teacher"
    shutil.copytree(shared.teacher, teacher)
    study = override(mini, {"data.corpora": [str(corpus)], "teacher.source": str(teacher), "arms": ["pre-single"]})
    run(study, tmp_path / "out")
    more = replace(study, arms=("post-single",))
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match="made with another teacher"):
        run(more, tmp_path / "out")
    (teacher / "config.json").write_text(json.dumps(config))
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[::-1][:500]))
    with pytest.raises(UserError, match=r"made with another (shards|held-out)"):
        run(more, tmp_path / "out")
    shutil.copy(shared.corpus, corpus)
    run(more, tmp_path / "out")
    assert set(load_study(tmp_path / "out")[0].arms) == {"post-single", "pre-single"}


def test_a_record_with_unknown_fields_is_not_half_read(mini):
    with pytest.raises(UserError, match=r"unknown field 'optim\.momentum'"):
        from_dict(Study, to_dict(mini) | {"optim": to_dict(mini.optim) | {"momentum": 0.9}})


def test_an_error_in_one_worker_is_not_hidden_by_the_others_stopping(mini, tmp_path):
    study = override(mini, {"train.jobs": 2, "arms": ["pre-single", "post-single"], "train.steps_per_phase": 60})
    listener = Silent()
    with pytest.raises(Stopped):
        run_study(override(study, {"train.jobs": 1}), tmp_path, stop=StopIn(listener, "single"), listener=listener)
    torn = list((tmp_path / "nodes").glob("*/checkpoints/step-*/weights.safetensors"))
    assert torn
    for path in torn:
        path.write_bytes(b"torn")
    with pytest.raises(UserError, match="no older one is whole"):
        run(study, tmp_path)


def test_a_diverged_arm_is_recorded_and_the_study_goes_on(mini, tmp_path):
    from depthgrow.report.write import write_report

    study = override(mini, {"optim.peak_lr": 1e30, "optim.clip_norm": 1e30, "arms": ["pre-single", "post-single"]})
    run(study, tmp_path)
    assert "invalid" in write_report(tmp_path).sentence or "Nothing to compare" in write_report(tmp_path).sentence


def test_top_targets_are_other_nodes_and_evaluated_exactly(mini, tmp_path):
    """All of the vocabulary kept is the exact study; one token kept is another one, with another key."""
    base = replace(mini, arms=("post-single",))
    losses = {}
    for name, changes in {"hidden": {}, "all": {"teacher.top": 10_000}, "one": {"teacher.top": 1}}.items():
        study = override(base, {"teacher.targets": "topk" if changes else "hidden"} | changes)
        run_study(study, tmp_path / name, stop=StopAt(), listener=Silent())
        (node,) = (tmp_path / name / "nodes").iterdir()
        losses[name] = node.name, [r for r in read_metrics(node / "metrics.jsonl") if r["kind"] in ("train", "eval")]
    assert len({key for key, _ in losses.values()}) == 3
    for exact, same, cut in zip(*(records for _, records in losses.values()), strict=True):
        assert same["kl"] == pytest.approx(exact["kl"], rel=1e-5)
        if exact["kind"] == "train":
            assert 0 < cut["kl"] < exact["kl"]
        else:
            assert {"soft_ce", "teacher_entropy"} <= cut.keys()
