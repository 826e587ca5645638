"""What decides a node's key, field by field, and that commands that read a study use what it was made with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from conftest import Silent, StopAt
from depthgrow.cli import main
from depthgrow.config import fields_of, override
from depthgrow.files import UserError
from depthgrow.recipes import debug
from depthgrow.runner import run_study
from depthgrow.study import FREE_FIELDS, RESOLVED_FIELDS, Facts, Study, load_study, plan_tree
from depthgrow.teacher.live import LiveTeacher

FACTS = Facts("teacher", ("s0", "s1", "s2"), "held", "cpu", "classes")
CPU = torch.device("cpu")

# Every field of a study, each with another value, and whether a finished pre-grow is another one then.
CHANGES = {
    "name": ("other", False),
    "arms": (["pre-grow", "post-grow"], False),
    "seeds": (2, False),
    "seed": (7, True),
    "verdict": (True, False),
    "student.num_blocks": (2, None),  # fewer phases, the first two as they were
    "student.layers_per_block": (2, True),
    "student.init_gain": (0.5, True),
    "student.boundary_scale": (2.0, False),  # no intervention uses it
    "student.freeze_embedding": (False, True),
    "teacher.source": ("smollm2", False),  # what it is decides: Facts.teacher
    "teacher.dtype": ("bfloat16", True),
    "teacher.targets": ("live", False),  # the same targets, from elsewhere
    "teacher.top": (3, False),
    "teacher.cache_dir": ("/tmp/x", False),
    "data.corpora": (["wiki"], False),  # the tokens decide: Facts.shards
    "data.max_tokens": (64, False),
    "data.min_tokens": (8, False),
    "data.held_out_documents": (12, False),
    "data.shard_documents": (48, True),  # where the stream wraps
    "data.start_token": ("", False),
    "data.end_token": ("", False),
    "data.near_duplicates": (0.8, False),
    "objective.alpha": (0.5, True),
    "objective.gamma": (0.5, True),
    "objective.tau": (2.0, True),
    "optim.peak_lr": (1e-2, True),
    "optim.min_lr": (1e-6, True),
    "optim.warmup_steps": (3, True),
    "optim.warmup_share": (0.1, True),
    "optim.beta1": (0.8, True),
    "optim.beta2": (0.9, True),
    "optim.eps": (1e-6, True),
    "optim.weight_decay": (0.1, True),
    "optim.clip_norm": (1.0, True),
    "train.steps_per_phase": (20, True),
    "train.batch_documents": (3, True),
    "train.micro_tokens": (512, True),
    "train.eval_every": (6, False),
    "train.checkpoint_every": (6, False),
    "train.log_every": (2, False),
    "train.dtype": ("bfloat16", True),
    "train.device": ("cpu", False),
    "train.tensorboard": (True, False),
    "train.threads": (2, True),
    "train.jobs": (2, False),
    "train.recompute": (True, False),
    "train.compile": ("false", False),
}


def keys(study, facts=FACTS, arm="pre-grow"):
    return plan_tree(replace(study, arms=(arm,), seeds=1), facts).paths[arm, study.seed]


def test_every_field_of_a_study_is_looked_at_here():
    assert CHANGES.keys() == dict(fields_of(debug())).keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_the_key_where_it_changes_the_node_and_only_there(name):
    value, changed = CHANGES[name]
    base, other = debug(), override(debug(), {name: value})
    assert dict(fields_of(base))[name] != dict(fields_of(other))[name]
    old, new = keys(base), keys(other)
    if changed is None:
        assert new == old[: len(new)] != old
    else:
        assert all((a != b) is changed for a, b in zip(old, new, strict=True))


def test_no_field_is_left_out_by_mistake():
    """What is left out of the key must be among the fields above that are said not to matter, or stand in it resolved."""
    known = dict(fields_of(debug()))
    assert set(FREE_FIELDS) | set(RESOLVED_FIELDS) <= known.keys()
    for name in FREE_FIELDS:
        assert CHANGES[name][1] is False, name


@pytest.mark.parametrize("fact", ["teacher", "held_out", "device", "classes"])
def test_facts_are_in_the_key(fact):
    assert not set(keys(debug())) & set(keys(debug(), replace(FACTS, **{fact: "other"})))


def test_shards_are_in_the_key_of_the_phases_that_have_read_them():
    later = replace(FACTS, shards=("s0", "other", "s2"))
    assert keys(debug()) == keys(debug(), later)  # grow reads the first alone
    old, new = keys(debug(), arm="pre-grow-fresh"), keys(debug(), later, "pre-grow-fresh")
    assert old[0] == new[0]
    assert old[1:] != new[1:]
    assert keys(debug()) != keys(debug(), replace(FACTS, shards=("other", "s1", "s2")))


def test_placement_curriculum_draw_schedule_and_intervention_are_in_the_key():
    base = debug()
    first = {arm: keys(base, arm=arm)[0] for arm in ("pre-grow", "post-grow", "pre-grow+reinit", "pre-grow-one-lr")}
    assert len(set(first.values())) == 4  # one-lr: another schedule from the first step on
    plain, rescaled = keys(base), keys(base, arm="pre-grow+rescale")
    assert plain[0] == rescaled[0]  # one block has no boundary
    assert not set(plain[1:]) & set(rescaled)
    wider = override(base, {"student.boundary_scale": 2.0})
    assert keys(wider) == plain
    assert keys(wider, arm="pre-grow+rescale")[1:] != rescaled[1:]
    assert keys(wider, arm="pre-grow+forward-norm") == keys(base, arm="pre-grow+forward-norm")
    cut = override(base, {"teacher.targets": "topk"})
    assert not set(keys(cut)) & set(plain)
    assert not set(keys(cut)) & set(keys(override(cut, {"teacher.top": 3})))


def test_a_later_field_at_its_old_value_keeps_finished_keys(monkeypatch):
    from dataclasses import make_dataclass

    from depthgrow import study as module
    from depthgrow.optim import OptimConfig

    old = keys(debug())
    later = make_dataclass("Later", [("new_field", float, 0.0)], bases=(OptimConfig,), frozen=True, kw_only=True)
    values = {f: getattr(debug().optim, f) for f in OptimConfig.__dataclass_fields__}
    assert keys(replace(debug(), optim=later(**values))) != old  # unless it is named
    monkeypatch.setattr(module, "LATER_FIELDS", {"optim.new_field": 0.0})
    assert keys(replace(debug(), optim=later(**values))) == old
    assert keys(replace(debug(), optim=later(**values, new_field=1.0))) != old


def test_a_teacher_has_one_fingerprint_whatever_files_it_comes_in(shared, tmp_path):
    whole = LiveTeacher.load(str(shared.teacher), torch.float32, CPU)
    whole.model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    whole.tokenizer.save_pretrained(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert LiveTeacher.load(tmp_path / "sharded", torch.float32, CPU).fingerprint == whole.fingerprint
    with torch.no_grad():
        whole.model.model.norm.weight[0] += 1e-3
    whole.model.save_pretrained(tmp_path / "other")
    whole.tokenizer.save_pretrained(tmp_path / "other")
    assert LiveTeacher.load(tmp_path / "other", torch.float32, CPU).fingerprint != whole.fingerprint


# --- commands that read a study -------------------------------------------------------------------------------------------


@pytest.fixture
def made(mini, shared, tmp_path, monkeypatch):
    """A finished arm over a corpus of its own, with paths given from the folder where it was made."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shutil.copy(shared.corpus, "texts.jsonl")
    shutil.copytree(shared.teacher, "teacher")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    study = override(mini, {"data.corpora": ["texts.jsonl"], "teacher.source": "teacher", "arms": ["pre-single"]})
    run_study(study, tmp_path / "study", stop=StopAt(), listener=Silent())
    monkeypatch.chdir(tmp_path / "there")
    return tmp_path


def evaluated(root, capsys, *options):
    capsys.readouterr()
    code = main(["eval", str(root / "study"), "pre-single", "--json", *options])
    found = capsys.readouterr()
    return code, json.loads(found.out) if code == 0 else found.err


def final_ce(root):
    (node,) = (root / "study" / "nodes").iterdir()
    return json.loads((node / "done.json").read_text())["final"]["ce"]


def test_eval_is_the_reports_number_from_any_folder_and_over_a_corpus_that_has_grown(made, capsys):
    code, found = evaluated(made, capsys)
    assert code == 0
    assert found["ce"] == pytest.approx(final_ce(made), abs=1e-9)
    assert found["seed"] == 42
    with (made / "here" / "texts.jsonl").open("a") as stream:
        for number in range(400):
            stream.write(json.dumps({"text": f"new text {number} " + "stone river house green old " * 4}) + "\n")
    code, found = evaluated(made, capsys)
    assert (code, found["ce"]) == (0, pytest.approx(final_ce(made), abs=1e-9))
    shutil.rmtree(made / "cache" / "depthgrow" / "tokens")  # now only the corpus is left to read from
    code, error = evaluated(made, capsys)
    assert code == 2
    assert "was made with another held-out set" in error


def test_eval_fills_no_training_targets(made, capsys, monkeypatch):
    shutil.rmtree(made / "cache" / "depthgrow" / "teacher")
    assert evaluated(made, capsys)[0] == 0
    caches = [
        json.loads(p.read_text())["shape"][0] for p in (made / "cache" / "depthgrow" / "teacher").glob("*/info.json")
    ]
    info = json.loads((made / "study" / "data.json").read_text())
    assert caches == [info["held_out"]["target_tokens"]]


def test_another_teacher_under_the_same_name_is_refused(made, capsys):
    config = json.loads((made / "here" / "teacher" / "config.json").read_text())
    (made / "here" / "teacher" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    code, error = evaluated(made, capsys)
    assert code == 2
    assert "another teacher" in error


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_damaged_last_checkpoint_is_not_replaced_by_an_older_one(made, capsys, command):
    (node,) = (made / "study" / "nodes").iterdir()
    assert len(list((node / "checkpoints").iterdir())) == 2
    (node / "checkpoints" / "step-00000006" / "weights.safetensors").write_bytes(b"torn")
    options = ["--to", str(made / "out")] if command == "export" else []
    assert main([command, str(made / "study"), "pre-single", *options]) == 2
    assert "no whole checkpoint of its last step 6" in capsys.readouterr().err
    assert not (made / "out").exists()


def test_the_first_seed_is_the_smallest_number(mini, tmp_path, capsys):
    study = replace(mini, arms=("pre-single",), seed=9, seeds=2)
    run_study(study, tmp_path, stop=StopAt(), listener=Silent())
    assert list(load_study(tmp_path)[1]["pre-single"]) == ["9", "10"]
    assert main(["eval", str(tmp_path), "pre-single", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 9
    assert main(["diagnose", str(tmp_path), "pre-single", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pre-single"]["seed"] == 9
    assert main(["match", str(tmp_path), "pre-single", "--json"]) == 0
    assert {row["seed"] for row in json.loads(capsys.readouterr().out)} == {9}
    assert main(["export", str(tmp_path), "pre-single", "--to", str(tmp_path / "m")]) == 0
    assert "pre-single seed 9" in capsys.readouterr().out
    assert "seed 9" in (tmp_path / "m" / "README.md").read_text()


def test_diagnose_refuses_options_that_a_study_does_not_use(made, capsys):
    for option in (["--corpora", "wiki"], ["--documents", "5"], ["--layers-per-block", "1"]):
        assert main(["diagnose", str(made / "study"), *option]) == 2
        assert "are for a model" in capsys.readouterr().err


def test_a_node_record_without_its_keys_is_named(made, capsys):
    (node,) = (made / "study" / "nodes").iterdir()
    (node / "done.json").write_text("{}")
    for command in (["ls"], ["report"], ["eval"]):
        assert main([*command, str(made / "study"), *(["pre-single"] if command == ["eval"] else [])]) == 2
        assert "is damaged (no 'steps')" in capsys.readouterr().err


def test_an_arm_named_twice_is_refused():
    with pytest.raises(UserError, match="names 'pre-grow' twice"):
        Study(name="x", arms=("pre-grow", "pre-grow"))
