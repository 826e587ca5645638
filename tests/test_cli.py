"""The command line as a person meets it: real processes, exit codes, one-line errors, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import tensors_equal
from depthgrow import cli
from depthgrow.checkpoint import latest_checkpoint
from depthgrow.cli import main
from depthgrow.files import UserError
from depthgrow.phase import TrainConfig
from depthgrow.runtime import pick_device

REPOSITORY = Path(__file__).parent.parent


def command(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "depthgrow", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **kwargs,
    )


@pytest.fixture
def recipe(shared, tmp_path):
    """A study of seconds as a recipe file."""
    path = tmp_path / "mini.yaml"
    path.write_text(
        f"""recipe: debug
name: mini
verdict: true
teacher.source: {shared.teacher}
data: {{corpora: ["{shared.corpus}"], max_tokens: 64, held_out_documents: 6}}
train: {{steps_per_phase: 6, batch_documents: 4, micro_tokens: 150, eval_every: 3, checkpoint_every: 2, log_every: 2}}
"""
    )
    return path


def test_the_joint_arm_that_match_names_spends_what_it_promised(recipe, tmp_path, capsys):
    from depthgrow.report.load import load_study_files

    out = tmp_path / "study"
    assert main(["train", str(recipe), "--out", str(out), "--arm", "post-grow"]) == 0
    capsys.readouterr()
    assert main(["match", str(out), "post-grow", "--json"]) == 0
    rows = {row["quantity"]: row for row in json.loads(capsys.readouterr().out)}
    assert [rows[q]["steps"] for q in ("unique_tokens", "active_layer_tokens", "total_tokens")] == [6, 12, 18]
    keys = json.loads((out / "study.json").read_text())["arms"]["post-grow"]["42"]
    counted = [json.loads((out / "nodes" / key / "done.json").read_text())["counted"] for key in keys]
    assert rows["flops"]["target"] == sum(c["flops"] for c in counted)
    assert 12 < rows["flops"]["steps"] < 18
    arm = rows["active_layer_tokens"]["arm"]
    assert main(["train", str(recipe), "--out", str(out), "--arm", arm]) == 0
    runs = load_study_files(out).runs
    grow, joint = (
        sum(p.done["counted"]["active_layer_tokens"] for p in runs[a, 42].phases) for a in ("post-grow", arm)
    )
    assert joint == pytest.approx(grow, rel=0.1)  # its documents are fresh, so of other lengths
    assert main(["match", str(out), "post-grow"]) == 0
    assert arm in capsys.readouterr().out
    assert main(["match", str(out), "pre-grow"]) == 2
    assert "unknown arm 'pre-grow'" in capsys.readouterr().err


def test_mini_study_from_recipe_to_model(recipe, tmp_path):
    out = tmp_path / "study"
    result = command("study", recipe, "--out", out)
    assert result.returncode == 0, result.stderr
    sentence, place = result.stdout.strip().splitlines()
    assert sentence.startswith("One seed: under grow")
    assert place == f"report: {out}/report/report.html"
    assert "4 arms, 8 phases" in result.stderr
    for node in (out / "nodes").iterdir():
        names = {p.name for p in node.iterdir()}
        assert {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "eval", "done.json"} <= names
        assert {p.suffix for p in node.rglob("*") if p.is_file()} <= {".json", ".jsonl", ".safetensors", ".npz"}
    again = command("study", recipe, "--out", out)
    assert again.returncode == 0
    assert "0 left to run" in again.stderr
    assert again.stdout == result.stdout
    listing = command("ls", out, "--json")
    assert {n["state"] for n in json.loads(listing.stdout)["nodes"].values()} == {"done"}
    pipe = subprocess.run(
        f"{sys.executable} -m depthgrow ls {out} | head -c 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert (pipe.returncode, pipe.stderr) == (0, "")
    more = command("train", recipe, "--arm", "pre-freeze", "--out", out)
    assert more.returncode == 0
    assert "2 left to run" in more.stderr
    evaluation = command("eval", out, "post-grow", "--json")
    assert evaluation.returncode == 0, evaluation.stderr
    report = json.loads((out / "report" / "report.json").read_text())
    assert json.loads(evaluation.stdout)["ce"] == pytest.approx(
        report["arms"]["post-grow"]["ce"]["estimate"]["value"], abs=1e-9
    )
    export = command("export", out, "pre-joint", "--to", tmp_path / "model")
    assert export.returncode == 0, export.stderr
    folder = command("eval", out, "--model", tmp_path / "model", "--json")
    assert json.loads(folder.stdout)["ce"] == pytest.approx(
        report["arms"]["pre-joint"]["ce"]["estimate"]["value"], abs=1e-5
    )
    card = (tmp_path / "model" / "README.md").read_text()
    assert "pre-norm student" in card
    assert "licence local files" in card


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("jobs", [1, 2])
def test_signal_saves_everything_and_the_next_call_goes_on(recipe, tmp_path, number, jobs):
    options = ["--train.steps_per_phase", "40", "--arms", "pre-joint,post-joint", "--train.jobs", jobs]
    whole = tmp_path / "whole"
    assert command("study", recipe, "--out", whole, *options).returncode == 0
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "depthgrow", "study", recipe, "--out", out, *map(str, options)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("nodes/*/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert "everything is saved" in err
    assert command("study", recipe, "--out", out, *options).returncode == 0
    for node in (whole / "nodes").iterdir():
        first, second = (latest_checkpoint(p / "checkpoints") for p in (node, out / "nodes" / node.name))
        assert tensors_equal(first.weights(), second.weights())
        assert tensors_equal(first.optimizer(), second.optimizer())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["studdy"], "invalid choice"),
        ([], "COMMAND"),
        (["study", "labtop"], "did you mean 'laptop'"),
        (["study", "laptop", "--optim.peek_lr", "1"], "did you mean 'optim.peak_lr'"),
        (["study", "laptop", "--optim.peak_lr"], "needs a value"),
        (["study", "laptop", "--arms", "pre-gorw"], "did you mean 'pre-grow'"),
        (["study", "laptop", "stray"], "unexpected argument 'stray'"),
        (["train", "laptop", "--arm", "mid-grow"], "unknown arm 'mid-grow'"),
        (["plan", "laptop", "--teacher.source", "./nowhere"], "does not exist"),
        (["report", "/nonexistent"], "holds no study"),
        (["ls", "/nonexistent"], "holds no study"),
        (["export", "/nonexistent", "pre-grow", "--to", "/tmp/x"], "holds no study"),
        (["eval", "/nonexistent"], "one of the two"),
        (["ls", "/nonexistent", "--frobnicate", "1"], "unexpected argument"),
        (["pretrain", "laptop"], "did you mean 'laptop-teacher'"),
        (["study", "laptop", "--train.device", "tpu"], "device 'tpu'"),
        (["study", "laptop", "--data.corpora", "/no/such.txt"], "no such file"),
        (["study", "laptop", "--out", "/etc/hostname"], "/etc/hostname"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("depthgrow:")]
    assert len(lines) == 1
    assert captured.err.splitlines()[-1] == lines[0]
    assert message in lines[0]
    assert "Traceback" not in captured.err


def test_arm_of_a_study_that_lacks_it(recipe, tmp_path, capsys):
    out = tmp_path / "study"
    assert main(["train", str(recipe), "--arm", "pre-single", "--out", str(out), "--train.jobs", "1"]) == 0
    assert main(["export", str(out), "pre-singel", "--to", str(tmp_path / "m")]) == 2
    assert "did you mean 'pre-single'" in capsys.readouterr().err
    assert main(["export", str(out), "pre-single", "--seed", "7", "--to", str(tmp_path / "m")]) == 2
    assert "has no seed 7" in capsys.readouterr().err
    assert main(["study", str(recipe), "--out", str(out), "--objective.tau", "2"]) == 2
    assert "was made with objective.tau=1.0" in capsys.readouterr().err


def test_a_missing_checkpoint_is_named_and_nothing_is_lost(recipe, tmp_path, capsys):
    import shutil

    out = tmp_path / "study"
    base = [str(recipe), "--out", str(out), "--train.jobs", "1"]
    assert main(["train", *base, "--arm", "pre-single"]) == 0
    (node,) = (out / "nodes").iterdir()
    shutil.move(node / "checkpoints", tmp_path / "aside")
    for arguments in (
        ["train", *base, "--arm", "pre-grow"],
        ["export", str(out), "pre-single", "--to", str(tmp_path / "m")],
    ):
        capsys.readouterr()
        assert main(arguments) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("depthgrow:")]
        assert str(node) in line
        assert "no whole checkpoint" in line
        assert "delete the folder" in line
    assert main(["report", str(out)]) == 0
    (node / "checkpoints").rmdir() if (node / "checkpoints").exists() else None
    shutil.move(tmp_path / "aside", node / "checkpoints")
    assert main(["train", *base, "--arm", "pre-grow"]) == 0  # the phase that was there is used again
    assert len(list((out / "nodes").iterdir())) == 3


def test_no_disk_is_exit_code_2_and_nothing_is_lost(recipe, tmp_path, capsys, monkeypatch):
    import shutil
    from collections import namedtuple

    out = tmp_path / "study"
    arguments = ["train", str(recipe), "--arm", "pre-single", "--out", str(out), "--train.jobs", "1"]
    full = namedtuple("usage", "total used free")(10, 10, 0)
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if "checkpoints" in str(path) else real(path))
    assert main(arguments) == 2
    assert "a checkpoint needs" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", real)
    assert main(arguments) == 0


def test_help_and_version_and_doctor(capsys):
    for arguments in (["--help"], ["study", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    assert "exit codes" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "laptop teacher" in capsys.readouterr().out


def test_readme_commands_exist():
    """Every `make X` and `depthgrow X` of the README is one that there is."""
    text = (REPOSITORY / "README.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z][a-z0-9-]+)", text))
    assert {"study", "test"} <= named <= targets
    for line in re.findall(r"^ *depthgrow (.+?)(?:  +#.*)?$", text, re.MULTILINE):
        words = line.split()
        with pytest.raises(SystemExit) as stopped:
            main([words[0], "--help"])
        assert stopped.value.code == 0, line
        if words[0] in ("study", "plan", "train") and not words[1].endswith((".py", ".yaml")):
            assert main(["plan", *[w for w in words[1:] if w not in ("--json",)][:1]]) == 0, line


def test_ci_runs_the_readmes_test_command():
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)


def as_rank(monkeypatch):
    """What torchrun sets."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_leaves_the_telling_to_rank_0_lets_it_end_first(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    as_rank(monkeypatch)
    for rank, silent in (("1", True), ("0", False)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["study", "no-such-recipe"]) == 2
        assert bool(slept) is silent
        assert ("no-such-recipe" in capsys.readouterr().err) is not silent
        slept.clear()


def test_compiling_is_asked_for_in_one_of_three_words(capsys):
    assert main(["plan", "debug", "--train.compile", "maybe"]) == 2
    assert "unknown train.compile 'maybe' (known: auto, false, true)" in capsys.readouterr().err
    assert [TrainConfig(compile=value).compile for value in (True, False, "True", "auto")] == [
        "true",
        "false",
        "true",
        "auto",
    ]


def test_a_rank_beyond_the_gpus_speaks_for_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    as_rank(monkeypatch)
    for local, own in (("2", False), ("1", None)):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(UserError, match=f"cuda:{local}") as caught:
            pick_device("cuda")
        assert caught.value.told_elsewhere is own
