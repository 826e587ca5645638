"""Several ranks under torchrun: the same command, the same numbers, the same files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conftest import StopAt
from depthgrow import parallel, trainer
from depthgrow.checkpoint import latest_checkpoint
from depthgrow.config import fields_of
from depthgrow.curriculum import DataPosition
from depthgrow.files import UserError, read_json
from depthgrow.metrics import read_metrics
from depthgrow.parallel import share
from depthgrow.prepare import prepare
from depthgrow.runner import run_study
from depthgrow.runtime import Stopped
from depthgrow.student import DecoderLayer

ARMS = tuple(f"{p}-{c}" for p in ("pre", "post") for c in ("joint", "grow", "freeze"))


def recipe(study, folder):
    path = folder / "mini.yaml"
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields_of(study)}
    path.write_text(json.dumps({"recipe": "debug"} | fields))
    return str(path)


def launch(ranks, *arguments, environment=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, "-m", "depthgrow", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(ranks, *arguments):
    process = launch(ranks, *arguments)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-3000:]
    return output


def assert_same(one, other, rtol):
    """Every logged number, every weight and moment of every node."""
    nodes = sorted(p.name for p in (one / "nodes").iterdir())
    assert nodes == sorted(p.name for p in (other / "nodes").iterdir())
    for node in nodes:
        logs = [read_metrics(root / "nodes" / node / "metrics.jsonl") for root in (one, other)]
        for a, b in zip(*logs, strict=True):
            assert a.keys() == b.keys()
            for name in a.keys() - {"tokens_per_second", "data_wait", "kind"}:
                # a few steps of Adam from rounding apart: norms of single parts show it first
                bound = 5 * rtol if name.startswith("grad_norm") else rtol
                assert b[name] == pytest.approx(a[name], rel=bound, abs=1e-9), (node, a["step"], name)
        saved = [latest_checkpoint(root / "nodes" / node / "checkpoints") for root in (one, other)]
        for part in ("weights", "optimizer"):
            first, second = (getattr(checkpoint, part)() for checkpoint in saved)
            assert first.keys() == second.keys()
            for name, value in first.items():
                gap = (second[name] - value).norm() / value.norm().clamp_min(1e-12)
                assert gap <= 10 * rtol, (node, name, float(gap))


@pytest.fixture(scope="module")
def alone(shared, tmp_path_factory):
    """The study on one rank without torchrun, and the recipe it came from."""
    return {}


@pytest.fixture
def reference(mini, alone, tmp_path_factory, silent, never):
    if not alone:
        study = replace(mini, arms=ARMS)
        root = tmp_path_factory.mktemp("alone")
        run_study(study, root / "study", stop=never, listener=silent)
        alone.update(study=study, root=root / "study", recipe=recipe(study, root))
    return alone


@pytest.mark.parametrize(("ranks", "targets"), [(1, "hidden"), (2, "hidden"), (4, "hidden"), (2, "live")])
def test_ranks_equal_one_process(reference, tmp_path, ranks, targets):
    run(ranks, "study", reference["recipe"], "--out", str(tmp_path / "s"), "--teacher.targets", targets)
    assert_same(reference["root"], tmp_path / "s", 1e-6)
    assert (tmp_path / "s" / "report" / "report.html").exists()


@pytest.mark.parametrize("onward", [2, 1])
def test_stopped_on_two_ranks_goes_on_with_as_many_or_fewer(mini, tmp_path, silent, never, onward):
    study = replace(mini, arms=("post-freeze",), train=replace(mini.train, steps_per_phase=30, checkpoint_every=30))
    run_study(study, tmp_path / "whole", stop=never, listener=silent)
    arguments = ("train", recipe(study, tmp_path), "--arm", "post-freeze", "--out", str(tmp_path / "s"))
    process = launch(2, *arguments)
    deadline = time.monotonic() + 200
    while not any(read_metrics(path) for path in (tmp_path / "s").glob("nodes/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert "everything is saved" in output
    assert len(list((tmp_path / "s").glob("nodes/*/done.json"))) < 3
    if onward == 1:
        run_study(study, tmp_path / "s", stop=never, listener=silent)
    else:
        run(2, *arguments)
    assert_same(tmp_path / "whole", tmp_path / "s", 2e-6)


@pytest.mark.parametrize(("ranks", "micro_tokens"), [(3, 40), (5, 150)])
def test_ranks_with_fewer_documents_than_others_make_empty_passes(mini, tmp_path, silent, never, ranks, micro_tokens):
    """Three ranks for four documents of a micro-batch each: two passes, of which two ranks' second is empty."""
    study = replace(mini, arms=("post-freeze",), train=replace(mini.train, micro_tokens=micro_tokens))
    passes = prepare(study, silent).materials(study, study.seed).batches
    empty = [m for r in range(ranks) for m in passes.global_batch(DataPosition(0, 0), r, ranks) if not m.lengths]
    assert empty
    run_study(study, tmp_path / "alone", stop=never, listener=silent)
    run(ranks, "train", recipe(study, tmp_path), "--arm", "post-freeze", "--out", str(tmp_path / "s"))
    assert_same(tmp_path / "alone", tmp_path / "s", 1e-6)


def test_recomputed_layers_and_top_targets_on_two_ranks(mini, tmp_path, silent, never):
    kept = replace(mini.teacher, targets="topk", top=20)
    study = replace(mini, arms=("pre-grow+forward-norm",), teacher=kept)
    run_study(study, tmp_path / "alone", stop=never, listener=silent)
    arguments = ("train", recipe(study, tmp_path), "--arm", "pre-grow+forward-norm", "--out", str(tmp_path / "s"))
    run(2, *arguments, "--train.recompute", "true")
    assert_same(tmp_path / "alone", tmp_path / "s", 1e-6)


def test_bfloat16_products_on_two_ranks(mini, tmp_path, silent, never):
    study = replace(mini, arms=("pre-joint",), train=replace(mini.train, dtype="bfloat16"))
    run_study(study, tmp_path / "alone", stop=never, listener=silent)
    run(2, "train", recipe(study, tmp_path), "--arm", "pre-joint", "--out", str(tmp_path / "s"))
    (node,) = (tmp_path / "alone" / "nodes").iterdir()
    logs = [read_metrics(root / "nodes" / node.name / "metrics.jsonl") for root in (tmp_path / "alone", tmp_path / "s")]
    for a, b in zip(*logs, strict=True):
        assert b["ce"] == pytest.approx(a["ce"], rel=2e-3)
        if a["kind"] == "train":
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=3e-2)


def test_a_rank_leaves_whole_while_threads_still_hold_tensors(tmp_path):
    """Threads of torch that want the interpreter while it shuts down abort the process (as gloo's do on a busy machine)."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import threading, torch\n"
        "from depthgrow.cli import run\n"
        "def work():\n"
        "    while True:\n"
        "        torch.ones(10_000).sum().item()\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=work, daemon=True).start()\n"
        "run()\n"
    )
    command = [sys.executable, str(script), "study", "no-such-recipe"]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment = os.environ | launched
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("no-such-recipe") == 1


def test_a_mistake_is_told_once(mini, tmp_path):
    process = launch(2, "study", recipe(mini, tmp_path), "--arms", "pre-nonsense", "--out", str(tmp_path / "s"))
    output, _ = process.communicate(timeout=200)
    assert output.count("unknown arm 'pre-nonsense'") == 1
    process = launch(2, "ls", str(tmp_path))
    output, _ = process.communicate(timeout=200)
    assert output.count("ls runs in one process; call it without torchrun") == 1


def test_shares_are_even_and_lose_nothing():
    sizes = [500, 3, 90, 410, 77, 78, 300, 12]
    dealt = share(sizes, 3)
    assert sorted(place for own in dealt for place in own) == list(range(8))
    loads = [sum(sizes[i] for i in own) for own in dealt]
    assert max(loads) - min(loads) < 100
    assert share([5, 5], 4) == [[0], [1], [], []]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_see_each_document_once_and_as_many_micro_batches(mini, silent, never, ranks):
    prepared = prepare(mini, silent)
    batches = prepared.materials(mini, mini.seed).batches
    for step in range(6):
        position = DataPosition(0, step)
        parts = [batches.global_batch(position, r, ranks) for r in range(ranks)]
        assert len({len(part) for part in parts}) == 1
        seen = [document for part in parts for micro in part for document in micro.document_ids]
        assert sorted(seen) == sorted(batches.document_ids(position))
        assert sum(m.num_targets for part in parts for m in part) == sum(batches.lengths(position))


LONG = parallel.COMPILE_SECONDS / 6


@pytest.mark.parametrize(
    ("plain", "compiled", "pays"), [(2 * LONG, LONG, True), (LONG, 2 * LONG, False), (0.9 * LONG, 0.1, False)]
)
def test_layers_are_compiled_where_a_long_phase_measures_faster(
    mini, tmp_path, silent, never, monkeypatch, plain, compiled, pays
):
    compiling, running = [], []

    def compile_stub(forward, dynamic):
        compiling.append(forward)
        return lambda *a: running.append(1) or forward(*a)

    def seconds(loop, passes):
        assert real(loop, 1) > 0  # the passes themselves are made: they must leave no trace
        return compiled if "forward" in loop.student.layers[0].__dict__ else plain

    real = trainer._Loop._seconds_a_step
    study = replace(mini, arms=("pre-joint",))
    never_compiled = replace(study, train=replace(study.train, compile=False))
    run_study(never_compiled, tmp_path / "plain", stop=never, listener=silent)
    monkeypatch.setattr(torch, "compile", compile_stub)
    monkeypatch.setattr(parallel, "COMPILE_STEPS", 6)
    monkeypatch.setattr(trainer._Loop, "_seconds_a_step", seconds)
    run_study(study, tmp_path / "auto", stop=never, listener=silent)
    (node,) = (tmp_path / "auto" / "nodes").iterdir()
    assert len(compiling) == (3 if plain >= LONG else 0)
    assert read_json(node / "environment.json")["compiled"] is pays
    assert (len(running) > 3 * 6) is pays  # every step runs them, not the measurement alone
    told = f"layers compiled ({compiled:.2f} s a step against {plain:.2f} s)"
    assert any(told in note for note in silent.notes) is pays
    assert_same(tmp_path / "plain", tmp_path / "auto", 0.0)


def test_a_phase_of_few_steps_is_not_measured(mini, tmp_path, silent, never, monkeypatch):
    monkeypatch.setattr(trainer._Loop, "_seconds_a_step", lambda loop, passes: pytest.fail("measured"))
    run_study(replace(mini, arms=("pre-joint",)), tmp_path / "s", stop=never, listener=silent)


def test_a_resumed_phase_keeps_to_compiled_layers_unless_the_compiler_is_gone(
    mini, tmp_path, silent, never, monkeypatch
):
    def no_compiler(forward, dynamic):
        raise RuntimeError("no C++ compiler")

    study, asked, compiling = replace(mini, arms=("pre-joint",)), [], []
    monkeypatch.setattr(parallel, "COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(parallel, "COMPILE_STEPS", 0)
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: compiling.append(1) or forward)
    monkeypatch.setattr(trainer._Loop, "_seconds_a_step", lambda loop, passes: asked.append(passes) or 1 / len(asked))
    for name in ("s", "t"):
        with pytest.raises(Stopped):
            run_study(study, tmp_path / name, stop=StopAt(3), listener=silent)
    assert (asked, len(compiling)) == ([1, 3, 3] * 2, 6)
    run_study(study, tmp_path / "s", stop=never, listener=silent)
    assert (asked[6:], len(compiling)) == ([1], 9)  # tried, not measured
    monkeypatch.setattr(torch, "compile", no_compiler)
    for name in ("t", "u"):  # begun with a compiler; begun without
        silent.notes.clear()
        run_study(study, tmp_path / name, stop=never, listener=silent)
        assert any("not compiled (torch.compile failed: no C++ compiler)" in note for note in silent.notes)
        (node,) = (tmp_path / name / "nodes").iterdir()
        assert read_json(node / "environment.json")["compiled"] is False
    with pytest.raises(UserError, match=r"no C.* run again with --train.compile false"):  # asked for, it is an error
        run_study(replace(study, train=replace(study.train, compile=True)), tmp_path / "v", stop=never, listener=silent)


def test_a_users_mistake_during_the_trial_is_not_laid_on_the_compiler():
    def damaged(passes):
        raise UserError("a file of the cache is damaged")

    student = SimpleNamespace(layers=[])
    with pytest.raises(UserError, match=r"^a file of the cache is damaged$"):
        parallel.settle_layers(student, "true", None, 1000, damaged, recompute=False, tell=print)


@pytest.mark.slow
def test_compiled_layers_on_two_ranks(mini, tmp_path, silent, never):
    study = replace(mini, arms=("post-grow",))
    run_study(study, tmp_path / "alone", stop=never, listener=silent)
    arguments = ("train", recipe(study, tmp_path), "--arm", "post-grow", "--out", str(tmp_path / "s"))
    run(2, *arguments, "--train.compile", "true")
    assert_same(tmp_path / "alone", tmp_path / "s", 1e-6)
    for node in (tmp_path / "s" / "nodes").iterdir():
        assert read_json(node / "environment.json")["compiled"] is True


def test_a_failing_compiler_ends_all_ranks_in_words(mini, tmp_path):
    """Layers that failed inside FSDP's hooks stay gathered, and an optimizer made of them would train nothing."""
    arguments = ("train", recipe(mini, tmp_path), "--arm", "pre-joint", "--out", str(tmp_path / "s"))
    nowhere = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    process = launch(2, *arguments, "--train.compile", "true", environment=nowhere)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "torch.compile failed" in output
    assert "run again with --train.compile false" in output


@pytest.mark.parametrize("arm", ["pre-freeze", "post-freeze"])
def test_recomputing_layers_changes_no_number(mini, tmp_path, silent, never, arm, monkeypatch):
    calls = []
    forward = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", lambda *a: calls.append(1) or forward(*a))
    plain = replace(mini, arms=(arm,))
    run_study(plain, tmp_path / "plain", stop=never, listener=silent)
    once = len(calls)
    other = replace(plain, train=replace(plain.train, recompute=True))
    run_study(other, tmp_path / "other", stop=never, listener=silent)
    assert len(calls) - once > 1.2 * once
    assert_same(tmp_path / "plain", tmp_path / "other", 1e-6)


@pytest.mark.slow
def test_compiling_layers_changes_no_number(mini, tmp_path, silent, never):
    """Both placements, frozen layers and evaluation in one process: a graph each, and none given up for their number."""
    plain = replace(mini, arms=("pre-freeze", "post-freeze", "pre-grow"))
    run_study(plain, tmp_path / "plain", stop=never, listener=silent)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    other = replace(plain, train=replace(plain.train, compile=True))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        run_study(other, tmp_path / "other", stop=never, listener=silent)
    assert 0 < counters["frames"]["ok"] < 60  # not one a layer or a length
    assert_same(tmp_path / "plain", tmp_path / "other", 1e-6)
