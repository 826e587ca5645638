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
