"""A loss or gradient that is not finite: the phase ends there, what was trained before it is kept, everything else goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from conftest import Silent, StopAt
from depthgrow import trainer
from depthgrow.checkpoint import latest_checkpoint
from depthgrow.cli import main
from depthgrow.curriculum import DataPosition
from depthgrow.metrics import read_metrics
from depthgrow.report.write import write_report
from depthgrow.runner import run_study

BAD_STEP = 5


@pytest.fixture
def poisoned(monkeypatch):
    """From pre-grow's second phase on, the fifth step's loss is not a number, for the seeds asked for."""

    def poison(*seeds, value=float("nan"), phase=2):
        original = trainer._Loop._gradients

        def gradients(self, batches, tokens):
            sums = original(self, batches, tokens)
            label = self.run.label
            if f"pre-grow phase {phase}/3" in label and self.run.seed in seeds and self.done == BAD_STEP - 1:
                parameter = next(p for p in self.student.parameters() if p.grad is not None)
                parameter.grad.view(-1)[0] = value
            return sums

        monkeypatch.setattr(trainer._Loop, "_gradients", gradients)

    return poison


def run(study, root, listener=None):
    return run_study(study, root, stop=StopAt(), listener=listener or Silent())


def node(root, arm, seed, phase):
    keys = json.loads((root / "study.json").read_text())["arms"][arm][str(seed)]
    return root / "nodes" / keys[phase - 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_its_phase_and_nothing_else(mini, tmp_path, poisoned, value):
    study = replace(mini, arms=("pre-grow", "post-grow"))
    run(study, tmp_path / "healthy")
    poisoned(42, value=value)
    listener = Silent()
    assert run(study, tmp_path / "s", listener) == ["pre-grow phase 2/3"]
    bad = node(tmp_path / "s", "pre-grow", 42, 2)
    done = json.loads((bad / "done.json").read_text())
    assert done["state"] == "diverged"
    assert done["diverged"]["step"] == BAD_STEP
    assert str(value) in done["diverged"]["values"]["grad_norm"]
    # the documents of that batch, so that it can be looked at
    assert len(done["diverged"]["documents"]) == mini.train.batch_documents
    # weights, moments and counts are those after the step before it
    checkpoint = latest_checkpoint(bad / "checkpoints")
    assert checkpoint.step == BAD_STEP - 1 == done["steps"]
    assert all(t.isfinite().all() for t in (*checkpoint.weights().values(), *checkpoint.optimizer().values()))
    whole = node(tmp_path / "healthy", "pre-grow", 42, 2)
    assert bad.name == whole.name
    steps = [r["tokens"] for r in read_metrics(whole / "metrics.jsonl") if r["kind"] == "train"]
    assert done["counted"]["tokens"] == sum(steps[: BAD_STEP - 1])
    # no line of the log is anything but JSON
    for line in (bad / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    # what would go on from it is not run, the other arm is
    assert not node(tmp_path / "s", "pre-grow", 42, 3).exists()
    assert (node(tmp_path / "s", "post-grow", 42, 3) / "done.json").exists()
    assert any("diverged at step 5" in note for note in listener.notes)


def test_weights_after_divergence_are_those_of_a_run_stopped_before_it(mini, tmp_path, poisoned):
    """The update of the bad step, and of those computed before the loss was read, is left out on the device."""
    study = replace(mini, arms=("pre-grow",), train=replace(mini.train, log_every=6, checkpoint_every=4))
    run(study, tmp_path / "healthy")
    kept = node(tmp_path / "healthy", "pre-grow", 42, 2) / "checkpoints" / "step-00000004"
    poisoned(42)
    run(study, tmp_path / "s")
    found = node(tmp_path / "s", "pre-grow", 42, 2) / "checkpoints" / "step-00000004"
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (kept / name).read_bytes() == (found / name).read_bytes()


def test_it_is_listed_reported_refused_and_not_run_again(mini, tmp_path, poisoned, capsys):
    study = replace(mini, arms=("pre-grow", "post-grow"), seeds=3)
    poisoned(43)
    run(study, tmp_path)
    again = Silent()
    assert run(study, tmp_path, again) == ["pre-grow phase 2/3 seed 43"]
    assert any("0 left to run" in note for note in again.notes)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"]["pre-grow seed 43"] == "1 of 3 phases, then diverged"
    assert sorted(n["state"] for n in found["nodes"].values()) == ["diverged"] + ["done"] * 16 + ["missing"]
    assert main(["ls", str(tmp_path)]) == 0
    assert "●✗○" in capsys.readouterr().out
    written = write_report(tmp_path)
    assert "Diverged, and left out: pre-grow seed 43: phase 2 of 3, at step 5" in written.sentence
    summary = json.loads(written.html.with_name("report.json").read_text())
    assert summary["deltas"]["grow"]["seeds"] == [42, 44]
    assert summary["missing"] == []
    assert "Diverged" in written.html.read_text()
    for command in (["export", "--to", str(tmp_path / "m")], ["eval"], ["diagnose"]):
        arguments = [command[0], str(tmp_path), "pre-grow", "--seed", "43", *command[1:]]
        assert main(arguments) == 2
        assert "pre-grow seed 43" in (error := capsys.readouterr().err)
        assert "diverged" in error
    assert main(["eval", str(tmp_path), "pre-grow", "--seed", "44"]) == 0


def test_one_seed_alone_that_diverges_leaves_a_comparison_in_words(mini, tmp_path, poisoned):
    poisoned(42)
    run(replace(mini, arms=("pre-grow", "post-grow")), tmp_path)
    assert "under grow the comparison is invalid (pre-grow diverged)" in write_report(tmp_path).sentence


def test_side_by_side_workers_end_it_too_and_the_exit_code_says_so(mini, tmp_path):
    """A rate at which the first update overflows: every arm diverges, in worker processes, from the command line."""
    recipe = tmp_path / "r.json.yaml"
    from depthgrow.config import fields_of

    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields_of(mini)}
    fields |= {"optim.peak_lr": 1e30, "optim.min_lr": 0.0, "optim.clip_norm": None, "optim.warmup_steps": 0}
    fields |= {"train.jobs": 2, "arms": ["pre-joint", "post-joint"]}
    recipe.write_text(json.dumps({"recipe": "debug"} | fields))
    result = subprocess.run(
        [sys.executable, "-m", "depthgrow", "study", str(recipe), "--out", str(tmp_path / "s")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 4, result.stderr
    assert result.stderr.count("diverged at step") == 2
    assert "diverged" in result.stdout


def test_the_batch_that_is_named_is_the_one_that_was_read(mini, tmp_path, poisoned):
    from depthgrow.prepare import prepare

    poisoned(42)
    study = replace(mini, arms=("pre-grow",))
    run(study, tmp_path)
    named = json.loads((node(tmp_path, "pre-grow", 42, 2) / "done.json").read_text())["diverged"]["documents"]
    batches = prepare(study, Silent()).materials(study, 42).batches
    assert named == batches.document_ids(DataPosition(0, study.train.steps_per_phase + BAD_STEP - 1))


def test_the_optimizer_leaves_everything_as_it_is_from_a_bad_loss_on():
    from depthgrow.optim import NamedAdamW, OptimConfig

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = NamedAdamW(net.named_parameters(), OptimConfig(weight_decay=0.1, clip_norm=None))

    def step(loss):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step(1e-2, torch.tensor(loss))

    step(1.0)
    before = {k: v.clone() for k, v in net.state_dict().items()} | {k: v.clone() for k, v in optimizer.state().items()}
    for loss in (float("nan"), 1.0, float("inf")):
        step(loss)
    after = net.state_dict() | optimizer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
