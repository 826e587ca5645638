"""The plan against hand-computed shapes and the paper's own tables; nothing is allocated."""

from __future__ import annotations

import json
import resource

import pytest
import torch

from depthgrow.cli import main
from depthgrow.config import override
from depthgrow.ledger import Flops, StepWork, causal_pairs, matching_joint
from depthgrow.plan import architecture_of, make_plan, parameters
from depthgrow.recipes import load_recipe
from depthgrow.student import Student, StudentConfig


def test_paper_shapes():
    plan = make_plan(load_recipe("paper"))
    counts = plan["parameters"]
    assert counts["stack"] == 9 * 192_946_432 == 1_736_517_888
    assert round(counts["stack"] / 1e9, 3) == 1.737
    assert round(counts["without_head"] / 1e9, 3) == 2.359
    assert round(counts["total"] / 1e9, 3) == 2.981
    assert round((36 * 192_946_432 + 2 * 622_329_856 + 4096) / 1e9, 2) == 8.19  # the teacher's own size


def test_paper_budgets():
    study = override(load_recipe("paper"), {"arms": ["pre-joint", "pre-grow", "pre-joint-long", "pre-joint-longer"]})
    joint, grow, long, longer = make_plan(study)["budgets"]
    stated = ((joint, 3.11e9, 3.11e9), (grow, 9.34e9, 3.11e9), (long, 6.22e9, 6.22e9), (longer, 9.34e9, 9.34e9))
    for row, total, unique in stated:
        assert row["total_tokens"] == pytest.approx(total, rel=2e-3)
        assert row["unique_tokens"] == pytest.approx(unique, rel=2e-3)
    assert grow["active_layer_tokens"] / joint["active_layer_tokens"] == pytest.approx(2.0)  # 100k joint steps match it
    assert grow["active_layer_tokens"] / (3 * joint["active_layer_tokens"]) == pytest.approx(18 / 27)
    assert long["active_layer_tokens"] == grow["active_layer_tokens"]
    assert longer["total_tokens"] == grow["total_tokens"]
    assert [n["layers"] for n in make_plan(study)["nodes"]] == [9, 3, 6, 9, 9, 9]


def test_plan_of_the_paper_allocates_nothing(capsys):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["plan", "paper", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory_bytes"]["student_weights"] == 4 * plan["parameters"]["total"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_closed_form_parameters_equal_a_real_student(mini):
    arch = architecture_of(mini.teacher.source)
    student = Student(mini.student, arch, "post", seed=0)
    student.append_blocks(3)
    counts = parameters(mini, arch)
    assert counts["total"] == sum(p.numel() for p in student.parameters())
    assert counts["trainable"] == sum(p.numel() for p in student.parameters() if p.requires_grad)


def test_flops_equal_what_torch_counts(mini):
    from torch.utils.flop_counter import FlopCounterMode

    arch = architecture_of(mini.teacher.source)
    student = Student(StudentConfig(layers_per_block=2), arch, "pre", seed=0)
    student.append_blocks(1)
    lengths = [16]
    with FlopCounterMode(display=False) as counter:
        student(torch.zeros(16, dtype=torch.long), lengths)
    # torch does not count the CPU's fused attention: the ledger's pairs are checked by hand
    flops = Flops.of(arch)
    assert counter.get_total_flops() == flops.forward(16, 0, 2)
    assert flops.forward(0, 1, 1) == 2 * 2 * arch.num_heads * arch.head_dim  # q.k and p*v, a multiply-add each
    assert causal_pairs([3, 1]) == 7


def test_joint_matching_grow_in_closed_form():
    """The paper's own: 50,000 steps on unique tokens, 100,000 on active-layer tokens, 150,000 on total tokens."""
    arch = architecture_of("Qwen/Qwen3-8B-Base")
    flops, n, pairs = Flops.of(arch), 62_000, 62_000 * 500
    spent = {
        "unique_tokens": 50_000 * n,
        "total_tokens": 150_000 * n,
        "active_layer_tokens": 50_000 * n * (3 + 6 + 9),
        "pairs": 150_000 * pairs,
        "flops": sum(50_000 * flops.student(n, pairs, StepWork(layers=d, trained=d)) for d in (3, 6, 9)),
    }
    rows = {row.quantity: row for row in matching_joint(spent, 150_000, 9, flops)}
    assert [rows[q].steps for q in ("unique_tokens", "active_layer_tokens", "total_tokens")] == [
        50_000,
        100_000,
        150_000,
    ]
    # the head costs every step the same, so equal FLOPs lie between equal layers and equal tokens
    head, stack = n * flops.head_per_token * 3, 3 * flops.forward(n, pairs, 9)
    assert rows["flops"].steps == round((150_000 * head + 100_000 * stack) / (head + stack))
    assert 100_000 < rows["flops"].steps < 150_000
    assert all(row.spent == pytest.approx(row.target, rel=1e-4) for row in rows.values())


def test_plan_prints_every_option(capsys):
    assert main(["plan", "laptop", "--train.steps_per_phase", "170"]) == 0
    out = capsys.readouterr().out
    assert "--train.steps_per_phase 170" in out
    assert "24 phases named by arms and seeds, 24 to compute" in " ".join(out.split())


def test_unknown_teacher_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    study = override(load_recipe("laptop"), {"teacher.source": str(tmp_path)})
    with pytest.raises(ValueError, match="cannot be read"):
        make_plan(study)


@pytest.mark.parametrize("freeze_embedding", [True, False])
@pytest.mark.parametrize("trainable", ["all", "newest", "newest-only"])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("targets", ["hidden", "topk", "live", "none"])
def test_a_steps_flops_are_those_of_its_products(mini, shared, placement, trainable, freeze_embedding, targets):
    """A real step of two blocks of two layers, every product counted by torch. Its CPU attention kernel is not counted: the
    ledger's pairs are left out here and checked by hand below."""
    from torch.utils.flop_counter import FlopCounterMode

    from depthgrow.curriculum import Phase
    from depthgrow.head_loss import ObjectiveConfig, TopTargets
    from depthgrow.phase import set_trainable, step_work
    from depthgrow.teacher.cache import teacher_work
    from depthgrow.teacher.live import LiveTeacher

    teacher = LiveTeacher.load(str(shared.teacher), torch.float32, torch.device("cpu"))
    config = StudentConfig(layers_per_block=2, freeze_embedding=freeze_embedding)
    student = Student(config, teacher.arch, placement, seed=0, **teacher.initial)
    phase = Phase(active=2, steps=1, trainable=trainable)
    student.append_blocks(2)
    set_trainable(student, phase)
    lengths, ids = [9, 14], torch.arange(23) % 50
    if targets == "topk":
        p = torch.full((23, 4), 0.25)
        given = TopTargets(torch.arange(4).expand(23, 4), p.log())
    else:
        given = None if targets == "none" else teacher.targets(_batch(ids, lengths))

    def product(total, a, b, out_shape=None, **scales):
        return 2 * a[0] * a[1] * b[1]

    in_place = {torch.ops.aten.addmm_: product}  # the head's gradient is summed so, which torch does not count
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        if targets == "live":
            given = teacher.targets(_batch(ids, lengths))
        loss = student.lm_head(student(ids, lengths), ids, given, ObjectiveConfig(), 23).loss
        loss.backward()
    kept = 4 if targets == "topk" else 0
    work = step_work(phase, placement, config, **teacher_work(teacher.arch, live=targets == "live", kept=kept))
    flops = Flops.of(teacher.arch)
    expected = flops.student(23, 0, work)
    if targets != "none":
        # a live teacher runs its rectangle, padding included: its real tokens are what the ledger counts
        expected += flops.teacher(23, 0, work) + (
            flops.forward(28 - 23, 0, teacher.arch.num_layers) if targets == "live" else 0
        )
    assert counter.get_total_flops() == expected


def _batch(ids, lengths):
    from depthgrow.data.batches import MicroBatch

    return MicroBatch(list(range(len(lengths))), lengths, ids, ids)


def test_attention_and_frozen_layers_by_hand():
    flops = Flops(layer_per_token=10, head_per_token=100, attention_per_pair=3, qkv_per_token=4)
    # forward 2 layers, backward twice a trained one; head: logits and two gradients; the lowest input's gradient is wanted
    assert flops.student(5, 7, StepWork(layers=2, trained=2)) == (2 + 4) * (5 * 10 + 7 * 3) + 3 * 5 * 100
    # a frozen layer that a gradient crosses: its maps once, its attention twice
    crossed = StepWork(layers=2, trained=1, passed=1)
    assert flops.student(5, 7, crossed) == (2 + 2) * 71 + 5 * 10 + 2 * 7 * 3 + 1500
    # frozen below, nothing wants the input's gradient: the three maps that read it are spared theirs
    lone = StepWork(layers=2, trained=1, input_gradient=False, head_trained=False)
    assert flops.student(5, 7, lone) == (2 + 2) * 71 - 5 * 4 + 2 * 500
    assert flops.teacher(5, 7, StepWork(layers=2, trained=2, teacher_layers=4)) == 4 * 71 + 500
    assert flops.teacher(5, 7, StepWork(layers=2, trained=2, teacher_logits=False)) == 0


def test_a_plan_counts_what_the_ledger_counts(mini, tmp_path):
    """The same study planned with its documents' true mean lengths and run: equal tokens and FLOPs, shared phases once."""
    import json
    from dataclasses import replace

    from conftest import Silent, StopAt
    from depthgrow.data.lengths import Lengths
    from depthgrow.ledger import causal_pairs
    from depthgrow.plan import phase_cost
    from depthgrow.prepare import prepare
    from depthgrow.runner import run_study

    for targets in ("hidden", "live"):
        study = replace(
            mini, arms=("pre-grow", "pre-freeze", "pre-single"), teacher=replace(mini.teacher, targets=targets)
        )
        run_study(study, tmp_path / targets, stop=StopAt(), listener=Silent())
        prepared = prepare(study, Silent())
        lengths = prepared.tokens.train.num_targets.tolist()
        assert len(lengths) == study.shard_documents  # a phase reads each of them once
        mean = Lengths(sum(lengths) / len(lengths), causal_pairs(lengths) / len(lengths), "counted")
        record = json.loads((tmp_path / targets / "study.json").read_text())["arms"]
        for arm in study.arms:
            for phase, key in zip(study.phases(arm), record[arm]["42"], strict=True):
                counted = json.loads((tmp_path / targets / "nodes" / key / "done.json").read_text())["counted"]
                cost = phase_cost(study, phase, "pre", prepared.teacher.arch, mean, targets == "live")
                assert counted["tokens"] == pytest.approx(cost["total_tokens"])
                assert counted["active_layer_tokens"] == pytest.approx(cost["active_layer_tokens"])
                assert counted["flops"] == pytest.approx(cost["train_flops"], rel=1e-6)
                assert counted["teacher_flops"] == pytest.approx(cost["teacher_flops"], rel=1e-6)
    plan = make_plan(study)
    assert plan["computed"]["train_flops"] < plan["named"]["train_flops"]
    assert plan["phases_named"] == 7 > len(plan["nodes"]) == 5


def test_a_plan_knows_the_text_and_not_the_name():
    base = load_recipe("paper")
    named = override(base, {"name": "mine"})
    assert make_plan(base)["budgets"] == make_plan(named)["budgets"]
    (joint,) = [b for b in make_plan(base)["budgets"] if b["arm"] == "pre-joint"]
    assert joint["total_tokens"] == pytest.approx(3.1128e9, rel=1e-3)
    plan = make_plan(base)
    # a text of unequal lengths has more pairs a token than one of equal lengths
    assert plan["mean_pairs_per_document"] / plan["mean_tokens_per_document"] > plan["mean_tokens_per_document"] / 2
    assert (
        plan["budgets"][0]["teacher_flops"] > plan["budgets"][0]["train_flops"]
    )  # 36 layers forward against 9 trained
