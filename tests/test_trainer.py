"""The loop: invariances, growth, freezing, and what a stop must not change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from conftest import Silent, StopAt, tensors_equal
from depthgrow.checkpoint import latest_checkpoint
from depthgrow.curriculum import CURRICULA, DataPosition, Phase, canonical
from depthgrow.head_loss import ObjectiveConfig, head_loss
from depthgrow.metrics import read_metrics
from depthgrow.optim import NamedAdamW, learning_rate
from depthgrow.phase import build_student, load_weights, saved_weights, set_trainable
from depthgrow.prepare import prepare
from depthgrow.study import plan_tree
from depthgrow.trainer import run_phase

CPU = torch.device("cpu")


@pytest.fixture
def prepared(mini, silent, never):
    whole = replace(mini, arms=("pre-joint-longer",))  # the arm that reads most shards
    result = prepare(whole, silent)
    result.fill(whole, never, silent)
    return result


def tree_of(mini, prepared, *arms):
    return plan_tree(replace(mini, arms=arms), prepared.facts)


def run_path(mini, prepared, arm, root, stop=None):
    """Train all phases of an arm; returns the folders."""
    tree = tree_of(mini, prepared, arm)
    folders, parent = [], None
    for key in tree.paths[arm, mini.seed]:
        folder = root / key
        folder.mkdir(parents=True, exist_ok=True)
        run_phase(
            tree.nodes[key].run,
            prepared.materials(mini, mini.seed),
            folder,
            parent,
            stop=stop or StopAt(),
            listener=Silent(),
        )
        parent = latest_checkpoint(folder / "checkpoints")
        folders.append(folder)
    return folders


def gradients(mini, prepared, placement, micro_tokens, documents=None):
    """Gradients of one global batch under one division into micro-batches."""
    study = replace(mini, train=replace(mini.train, micro_tokens=micro_tokens))
    tree = plan_tree(replace(study, arms=(f"{placement}-joint",)), prepared.facts)
    run = next(iter(tree.nodes.values())).run
    materials = prepared.materials(study, study.seed)
    student = build_student(run, materials, CPU)
    batch = materials.batches.global_batch(DataPosition(0, 0))
    total = sum(m.num_targets for m in batch)
    value = 0.0
    for micro in batch:
        h = student(micro.ids_N, micro.lengths)
        loss = head_loss(
            h, student.lm_head.weight, micro.label_N, materials.train_targets(micro), run.objective, total
        ).loss
        loss.backward()
        value += loss.item()
    return len(batch), value, {n: p.grad for n, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_micro_batches_and_padding_change_neither_loss_nor_gradient(mini, prepared, placement):
    one = gradients(mini, prepared, placement, 10_000)  # all documents in one rectangle: the most padding
    some = gradients(mini, prepared, placement, 120)
    each = gradients(mini, prepared, placement, 1)  # one document each: no padding at all
    assert (one[0], each[0]) == (1, 4)
    assert 1 < some[0] <= 4
    for other in (some, each):
        assert other[1] == pytest.approx(one[1], rel=1e-6)
        for name, gradient in one[2].items():
            torch.testing.assert_close(other[2][name], gradient, rtol=1e-4, atol=2e-7, msg=name)


def test_loss_equals_a_plain_right_padded_loop(mini, prepared):
    """One global batch, as people write it: padded batch, full logits, masked sums over all target tokens."""
    _, value, grads = gradients(mini, prepared, "pre", 120)
    materials = prepared.materials(mini, mini.seed)
    tree = tree_of(mini, prepared, "pre-joint")
    student = build_student(next(iter(tree.nodes.values())).run, materials, CPU)
    documents = [
        torch.from_numpy(materials.batches.documents[i].copy()).long()
        for i in materials.batches.document_ids(DataPosition(0, 0))
    ]
    ce = kl = 0.0
    count = 0
    for ids in documents:
        z = student(ids[:-1], [len(ids) - 1]) @ student.lm_head.weight.T
        zt = prepared.teacher.model(ids[None, :-1]).logits[0, :, :300]
        ce = ce + torch.nn.functional.cross_entropy(z, ids[1:], reduction="sum")
        kl = kl + torch.nn.functional.kl_div(z.log_softmax(1), zt.softmax(1), reduction="sum")
        count += len(ids) - 1
    loss = (0.7 * kl + 0.3 * ce) / count
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_cached_and_live_teacher_give_the_same_loss(mini, prepared, silent):
    live = prepare(replace(mini, teacher=replace(mini.teacher, targets="live")), silent)
    assert live.shards is None
    a = gradients(mini, prepared, "post", 120)
    b = gradients(mini, live, "post", 120)
    assert a[1] == pytest.approx(b[1], rel=1e-6)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("curriculum", CURRICULA)
def test_every_new_tensor_moves_and_only_what_should(mini, prepared, tmp_path, placement, curriculum):
    mini = replace(mini, optim=replace(mini.optim, weight_decay=0.1))
    arm = f"{placement}-{curriculum}"
    tree = tree_of(mini, prepared, arm)
    folders = run_path(mini, prepared, arm, tmp_path)
    materials = prepared.materials(mini, mini.seed)
    phases = canonical(CURRICULA[curriculum](3, mini.train.steps_per_phase))
    for index, (folder, phase) in enumerate(zip(folders, phases, strict=True)):
        run = tree.nodes[folder.name].run
        before = build_student(run, materials, CPU)
        if index:
            previous = latest_checkpoint(folders[index - 1] / "checkpoints")
            load_weights(before, previous.weights(), previous.path)
        after = latest_checkpoint(folder / "checkpoints")
        optimizer = {n.split(".", 1)[1] for n in after.optimizer()}
        trainable = {n for n, p in before.named_parameters() if p.requires_grad}
        assert optimizer == trainable
        for name, tensor in saved_weights(before).items():
            moved = not torch.equal(tensor, after.weights()[name])
            assert moved == (name in trainable), name
        assert "embed_tokens.weight" not in after.weights()
        if phase.trainable == "newest":
            assert any(n.startswith("layers.0.") for n in set(after.weights()) - trainable)


def test_freeze_goes_by_identity(mini, prepared):
    run = next(iter(tree_of(mini, prepared, "pre-joint").nodes.values())).run
    student = build_student(run, prepared.materials(mini, 42), CPU)
    set_trainable(student, Phase(active=3, steps=1, trainable="newest"))
    trainable = {n for n, p in student.named_parameters() if p.requires_grad}
    newest = {n for n, _ in student.block_parameters(2)}
    assert trainable == newest | {"norm.weight", "lm_head.weight"}
    set_trainable(student, Phase(active=3, steps=1, trainable="newest-only"))
    assert {n for n, p in student.named_parameters() if p.requires_grad} == newest


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_freeze_head_moves_the_newest_block_and_nothing_else(mini, prepared, tmp_path, placement):
    study = replace(mini, optim=replace(mini.optim, weight_decay=0.1))
    first, second, _ = (
        latest_checkpoint(f / "checkpoints").weights()
        for f in run_path(study, prepared, f"{placement}-freeze-head", tmp_path)
    )
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert not moved
    assert {name.split(".")[1] for name in second.keys() - first.keys()} == {"1"}


def test_reinit_draws_anew_and_reads_the_same_documents(mini, prepared, tmp_path):
    plain, other = (run_path(mini, prepared, arm, tmp_path)[0] for arm in ("pre-single", "pre-single+reinit"))
    runs = [next(iter(tree_of(mini, prepared, arm).nodes.values())).run for arm in ("pre-single", "pre-single+reinit")]
    a, b = (build_student(run, prepared.materials(mini, run.seed), CPU).layers[0].mlp.up_proj.weight for run in runs)
    assert not torch.equal(a, b)
    tokens = [[r["tokens"] for r in stable(f) if r["kind"] == "train"] for f in (plain, other)]
    assert tokens[0] == tokens[1]


def test_tensorboard_shows_what_the_metrics_file_says(mini, prepared, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    study = replace(mini, train=replace(mini.train, tensorboard=True))
    folder = run_path(study, prepared, "pre-single", tmp_path)[0]
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    records = read_metrics(folder / "metrics.jsonl")
    for kind, name in (("train", "loss"), ("train", "grad_norm block 0"), ("eval", "ce")):
        shown = {(e.step, round(e.value, 4)) for e in events.Scalars(f"{kind}/{name}")}
        assert shown == {(r["step"], round(r[name], 4)) for r in records if r["kind"] == kind}


def test_learning_rate_of_every_logged_step_is_its_closed_form(mini, prepared, tmp_path):
    for folder in run_path(mini, prepared, "post-grow", tmp_path):
        records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
        assert [r["step"] for r in records] == list(range(1, 7))
        for record in records:
            assert record["lr"] == learning_rate(mini.optim, record["step"] - 1, 6)


def test_phases_go_on_through_the_shard(mini, prepared, tmp_path):
    """The tokens counted per step are those of the documents at the phase's place in the stream."""
    batches = prepared.materials(mini, mini.seed).batches
    seen = []
    for folder in run_path(mini, prepared, "pre-grow", tmp_path):
        seen += [r["tokens"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    expected = [int(sum(batches.documents.num_targets[batches.document_ids(DataPosition(0, t))])) for t in range(18)]
    assert seen == expected
    assert sum(seen[:6]) == sum(seen[6:12])  # one phase is one pass: the shard wrapped


STABLE = ("kind", "step", "loss", "ce", "kl", "lr", "grad_norm", "tokens", "soft_ce", "ppl", "teacher_entropy")


def stable(folder):
    return [{k: r[k] for k in STABLE if k in r} for r in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("stops", [(2,), (4,), (3, 8), (1, 3, 6)])
@pytest.mark.parametrize("arm", ["post-grow", "pre-freeze"])
def test_interrupted_equals_uninterrupted_bit_for_bit(mini, prepared, tmp_path, stops, arm):
    """Stops mid-epoch, before and at a phase's last steps, once and several times."""
    from depthgrow.runtime import Stopped

    whole = run_path(mini, prepared, arm, tmp_path / "whole")
    stop = StopAt(*(p for s in stops for p in (2 * s - 1, 2 * s)))  # the loop asks twice a step
    count = 0
    while True:
        try:
            parts = run_path_resuming(mini, prepared, arm, tmp_path / "parts", stop)
            break
        except Stopped:
            count += 1
    assert count >= 1
    for a, b in zip(whole, parts, strict=True):
        first, second = (latest_checkpoint(f / "checkpoints") for f in (a, b))
        assert tensors_equal(first.weights(), second.weights())
        assert tensors_equal(first.optimizer(), second.optimizer())
        assert stable(a) == stable(b)
        assert {p.name: p.read_bytes() for p in (a / "eval").iterdir()}.keys() == {
            p.name for p in (b / "eval").iterdir()
        }


def run_path_resuming(mini, prepared, arm, root, stop):
    tree = tree_of(mini, prepared, arm)
    folders, parent = [], None
    for key in tree.paths[arm, mini.seed]:
        folder = root / key
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "done.json").exists():
            materials = prepared.materials(mini, mini.seed)
            run_phase(tree.nodes[key].run, materials, folder, parent, stop=stop, listener=Silent())
        parent = latest_checkpoint(folder / "checkpoints")
        folders.append(folder)
    return folders


def test_a_killed_run_drops_what_it_wrote_after_its_checkpoint(mini, prepared, tmp_path):
    whole = run_path(mini, prepared, "pre-joint", tmp_path / "a")[0]
    tree = tree_of(mini, prepared, "pre-joint")
    node = next(iter(tree.nodes.values()))
    folder = tmp_path / "b" / node.key
    folder.mkdir(parents=True)

    class Killed(Exception):
        pass

    class Kill(Silent):
        def progress(self, label, step, num_steps, values):
            if step == 5 or "held_out_ce" in values:
                raise Killed

    materials = prepared.materials(mini, mini.seed)
    with pytest.raises(Killed):
        run_phase(node.run, materials, folder, None, stop=StopAt(), listener=Kill())
    assert max(r["step"] for r in read_metrics(folder / "metrics.jsonl")) > 2
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "st')  # a torn last line
    run_phase(node.run, materials, folder, None, stop=StopAt(), listener=Silent())
    assert stable(folder) == stable(whole)


def test_distilling_a_model_into_itself_has_zero_kl(mini, prepared, tmp_path):
    """Student := teacher: KL below 1e-6 at every held-out document, so targets and labels line up."""
    from depthgrow.student import Student, StudentConfig
    from depthgrow.trainer import evaluate_student

    arch = prepared.teacher.arch
    student = Student(StudentConfig(num_blocks=1, layers_per_block=3), arch, "pre", seed=0, **prepared.teacher.initial)
    student.append_blocks(1)
    state = {k.removeprefix("model."): v for k, v in prepared.teacher.model.state_dict().items()}
    state = {k: v[:300] if k in ("embed_tokens.weight", "lm_head.weight") else v for k, v in state.items()}
    student.load_state_dict(state, strict=False)
    result = evaluate_student(student, prepared.materials(mini, 42), mini.train, CPU)
    assert (result.kl / result.tokens).max() < 1e-6
    teacher = prepared.evaluate_teacher(mini)
    assert result.summary()["ce"] == pytest.approx(teacher.summary()["ce"], abs=1e-6)


def test_evaluation_is_the_mean_over_tokens_not_over_documents(mini, prepared):
    run = next(iter(tree_of(mini, prepared, "post-joint").nodes.values())).run
    from depthgrow.trainer import evaluate_student

    materials = prepared.materials(mini, 42)
    student = build_student(run, materials, CPU)
    result = evaluate_student(student, materials, mini.train, CPU)
    total = count = 0.0
    for i in range(len(materials.held_out)):
        ids = torch.from_numpy(materials.held_out[i].copy()).long()
        with torch.no_grad():
            z = student(ids[:-1], [len(ids) - 1]) @ student.lm_head.weight.T
        loss = torch.nn.functional.cross_entropy(z.double(), ids[1:], reduction="sum").item()
        assert result.ce[i] == pytest.approx(loss, rel=1e-5)
        assert result.tokens[i] == len(ids) - 1
        total, count = total + loss, count + len(ids) - 1
    summary = result.summary()
    assert summary["ce"] == pytest.approx(total / count, rel=1e-6)
    assert summary["ppl"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert summary["soft_ce"] == pytest.approx(summary["kl"] + summary["teacher_entropy"])
    small = replace(mini.train, micro_tokens=1)
    again = evaluate_student(student, materials, small, CPU).summary()
    assert again["ce"] == pytest.approx(summary["ce"], rel=1e-6)


def test_bfloat16_products_train_with_float32_weights(mini, prepared, tmp_path):
    study = replace(mini, train=replace(mini.train, dtype="bfloat16"))
    folder = run_path(study, prepared, "post-joint", tmp_path)[0]
    exact = run_path(mini, prepared, "post-joint", tmp_path)[0]
    assert all(v.dtype == torch.float32 for v in latest_checkpoint(folder / "checkpoints").weights().values())
    first, second = stable(folder), stable(exact)
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=2e-2)
    assert first[0]["loss"] != second[0]["loss"]


def test_optimizer_and_schedule_can_go_on_over_a_phase_boundary(mini, prepared, tmp_path):
    """Two phases without resets equal one phase of their length."""
    study = replace(mini, arms=("pre-joint",))
    node = next(iter(plan_tree(study, prepared.facts).nodes.values()))
    materials = prepared.materials(mini, mini.seed)
    one = replace(node.run, phases=[Phase(active=3, steps=6)], schedule=(0, 6))
    a = tmp_path / "a"
    a.mkdir()
    run_phase(one, materials, a, None, stop=StopAt(), listener=Silent())
    halves = [Phase(active=3, steps=4), Phase(active=3, steps=2, reset_optimizer=False, restart_lr=False)]
    parent = None
    for index in range(2):
        folder = tmp_path / f"b{index}"
        folder.mkdir()
        run = replace(node.run, phases=halves[: index + 1], schedule=(4 * index, 6))
        run_phase(run, materials, folder, parent, stop=StopAt(), listener=Silent())
        parent = latest_checkpoint(folder / "checkpoints")
    final = latest_checkpoint(a / "checkpoints")
    assert tensors_equal(final.weights(), parent.weights())

    def moments(checkpoint):
        return {k: v for k, v in checkpoint.optimizer().items() if k.startswith("exp")}

    assert tensors_equal(moments(final), moments(parent))


def test_clipping_acts_on_the_global_batch(mini, prepared):
    """The norm that is clipped is that of the whole batch's gradient, after division by all its targets."""
    _, _, grads = gradients(mini, prepared, "pre", 120)
    expected = torch.sqrt(sum(g.square().sum() for g in grads.values()))
    run = next(iter(tree_of(mini, prepared, "pre-joint").nodes.values())).run
    student = build_student(run, prepared.materials(mini, 42), CPU)
    optimizer = NamedAdamW(student.named_parameters(), mini.optim, student.part_of)
    for name, parameter in optimizer.parameters.items():
        parameter.grad = grads[name].clone()
    norms = optimizer.step(0.0, torch.zeros(()))
    assert norms["grad_norm"].item() == pytest.approx(expected.item(), rel=1e-5)
    parts = {"block 0": "layers.0.", "block 2": "layers.2.", "head": "lm_head.", "boundary norm": "norm."}
    for part, prefix in parts.items():
        own = torch.sqrt(sum(g.square().sum() for n, g in grads.items() if n.startswith(prefix)))
        assert norms[f"grad_norm {part}"].item() == pytest.approx(own.item(), rel=1e-5)
    assert set(norms) == {"grad_norm", "grad_norm block 1"} | {f"grad_norm {part}" for part in parts}


def test_objective_of_logged_loss(mini, prepared, tmp_path):
    study = replace(mini, objective=ObjectiveConfig(alpha=0.5, gamma=0.25))
    folder = run_path(study, prepared, "pre-single", tmp_path)[0]
    for record in stable(folder):
        if record["kind"] == "train":
            assert record["loss"] == pytest.approx(0.5 * record["kl"] + 0.25 * record["ce"], rel=1e-6)


def test_moments_start_anew_at_every_transition(mini, prepared, tmp_path):
    for folder in run_path(mini, prepared, "pre-grow", tmp_path):
        state = latest_checkpoint(folder / "checkpoints").optimizer()
        assert {float(v) for k, v in state.items() if k.startswith("step.")} == {6.0}


@pytest.mark.parametrize("arm", ["pre-freeze", "pre-freeze-head", "post-freeze", "post-freeze-head"])
def test_a_frozen_prefix_runs_without_a_graph_where_nothing_below_it_trains(mini, prepared, arm):
    tree = tree_of(mini, prepared, arm)
    run = tree.nodes[tree.paths[arm, mini.seed][-1]].run
    materials = prepared.materials(mini, mini.seed)
    student = build_student(run, materials, CPU)
    seen = []
    for layer in student.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    batch = materials.batches.global_batch(DataPosition(0, 0))[0]
    student(batch.ids_N, batch.lengths)
    passed = arm == "post-freeze"  # its entry norm, below all blocks, goes on training
    assert seen == [passed, passed, True]


def test_data_wait_is_logged_and_a_step_reads_what_it_should(mini, prepared, tmp_path):
    """Reading ahead changes no number: the same phase with targets read in turn."""
    run_path(mini, prepared, "post-single", tmp_path / "ahead")
    tree = tree_of(mini, prepared, "post-single")
    key = tree.paths["post-single", mini.seed][0]
    in_turn = replace(prepared.materials(mini, mini.seed), read_ahead=False)
    (tmp_path / "turn").mkdir()
    run_phase(tree.nodes[key].run, in_turn, tmp_path / "turn", None, stop=StopAt(), listener=Silent())
    logs = [read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "ahead" / key, tmp_path / "turn")]
    for ahead, turn in zip(*logs, strict=True):
        assert ahead.get("loss") == turn.get("loss")
        if "tokens_per_second" in ahead:
            assert 0 < ahead["data_wait"] < 1
            assert turn["data_wait"] == 0
