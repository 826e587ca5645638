"""Diagnostics against hand-computed values; the model is left as it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conftest import HF_CONFIGS
from depthgrow.architecture import Architecture
from depthgrow.data.classes import TokenClasses
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.diagnostics import angular_distance, describe, diagnose, fixed_batch
from depthgrow.student import PLACEMENTS, Student, StudentConfig

CPU = torch.device("cpu")


@pytest.fixture
def documents():
    rng = np.random.default_rng(0)
    return TokenizedDocuments.from_lists([rng.integers(1, 300, n).tolist() for n in (9, 30, 17, 4, 22)])


def make(placement):
    student = Student(
        StudentConfig(layers_per_block=2), Architecture.from_hf(HF_CONFIGS["qwen3"]), placement, seed=0, special_ids=[7]
    )
    student.append_blocks(3)
    return student


def run(student, documents, micro=64):
    classes = TokenClasses([7], [8, 9], lambda token: f"<{token}>")

    def hidden(batch, **options):
        return student(batch.ids_N, batch.lengths, **options)

    return diagnose(student, hidden, documents, classes, micro_tokens=micro, device=CPU)


def test_angles_by_hand():
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [3.0, 4.0]])
    b = torch.tensor([[0.0, 2.0], [-1.0, 0.0], [0.0, 5.0], [3.0, 4.0]])
    assert angular_distance(a, b).tolist() == pytest.approx([0.5, 1.0, 0.25, 0.0], abs=1e-12)


def test_identity_has_angle_exactly_zero_never_nan():
    x = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
    naive = torch.arccos(torch.nn.functional.cosine_similarity(x, x)) / math.pi
    assert (naive.isnan() | (naive > 0)).any()  # what this must not be
    assert torch.equal(angular_distance(x, x), torch.zeros(5000, dtype=torch.float64))


def test_describe_by_hand():
    found = describe(np.array([1.0, 1.0, 1.0, 5.0]))
    assert (found["count"], found["mean"], found["max"]) == (4, 2.0, 5.0)
    assert found["std"] == pytest.approx(math.sqrt(3))
    assert found["kurtosis"] == pytest.approx((3 * 1 + 81) / 4 / 9)
    assert sum(found["histogram"]["counts"]) == 4
    rng = np.random.default_rng(0)
    assert describe(np.abs(10 + rng.normal(size=200_000)))["kurtosis"] == pytest.approx(3.0, abs=0.1)
    assert describe(np.array([]))["count"] == 0
    assert describe(np.full(3, 2.0))["kurtosis"] == 0.0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_removal_scale_and_update_equal_a_model_built_without_the_block(documents, placement):
    """The reference walks the layers by hand, one document at a time, and leaves the block out for real."""
    student = make(placement)
    found = run(student, documents)

    @torch.no_grad()
    def walk(without=None):
        losses, streams = [], {b: [] for b in range(3)}
        for i in range(len(documents)):
            ids = torch.from_numpy(documents[i].copy()).long()
            layout = student.layout([len(ids) - 1])
            h = student.embed_tokens(ids[:-1])
            if placement == "post":
                h = student.norm(h)
            for b in range(3):
                before = h
                if b != without:
                    for layer in student.layers[2 * b : 2 * b + 2]:
                        h = layer(h, layout)
                streams[b].append((before, h))
            if placement == "pre":
                h = student.norm(h)
            losses.append(torch.nn.functional.cross_entropy(h @ student.lm_head.weight.T, ids[1:], reduction="none"))
        return torch.cat(losses).double().mean().item(), streams

    full, streams = walk()
    assert found["ce"] == pytest.approx(full, abs=1e-5)
    first = torch.cat([torch.arange(len(documents[i]) - 1) == 0 for i in range(5)])
    first |= torch.cat([torch.from_numpy(documents[i][:-1].copy()) == 7 for i in range(5)])
    delimiter = torch.cat(
        [torch.isin(torch.from_numpy(documents[i][:-1].copy()), torch.tensor([8, 9])) for i in range(5)]
    )
    delimiter &= ~first
    assert delimiter.any()
    for b, row in enumerate(found["blocks"]):
        assert row["removal"] == pytest.approx(walk(without=b)[0] - full, abs=1e-5)
        h_in, h_out = (torch.cat([pair[k] for pair in streams[b]]).double() for k in (0, 1))
        update = ((h_out - h_in).norm(dim=1) / h_in.norm(dim=1)).mean().item()
        assert row["relative_update"] == pytest.approx(update, rel=1e-5)
        cos = torch.nn.functional.cosine_similarity(h_in, h_out, dim=1)
        assert row["angle"] == pytest.approx((torch.arccos(cos.clamp(-1, 1)) / math.pi).mean().item(), rel=1e-5)
        scale = h_out.square().mean(1).sqrt()
        assert row["rms"]["all"]["mean"] == pytest.approx(scale.mean().item(), rel=1e-5)
        other = scale > 5 * scale.median()
        members = {
            "document_boundary": first,
            "delimiter": delimiter,
            "regular": ~first & ~delimiter & ~other,
            "outlier": ~first & ~delimiter & other,
        }
        for kind, member in members.items():
            assert row["rms"][kind]["count"] == int(member.sum())
            if member.any():
                assert row["rms"][kind]["mean"] == pytest.approx(scale[member].mean().item(), rel=1e-5)
        assert row["outliers"] == []


def test_padding_and_grouping_change_nothing(documents):
    student = make("pre")
    one, each = run(student, documents, 10_000), run(student, documents, 1)
    for a, b in zip(one["blocks"], each["blocks"], strict=True):
        assert a["angle"] == pytest.approx(b["angle"], rel=1e-5)
        assert a["removal"] == pytest.approx(b["removal"], abs=1e-5)
        assert a["rms"]["all"]["std"] == pytest.approx(b["rms"]["all"]["std"], rel=1e-4)


def test_the_model_is_left_as_it_was(documents):
    student = make("post")
    student.train()
    ids = torch.arange(9)
    with torch.no_grad():
        before = student(ids, [9])
    state, flags = torch.get_rng_state(), [p.requires_grad for p in student.parameters()]
    run(student, documents)
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.requires_grad for p in student.parameters()] == flags
    assert all(p.grad is None for p in student.parameters())
    assert student.training
    assert not any(layer._forward_hooks for layer in student.layers)
    with torch.no_grad():
        assert torch.equal(student(ids, [9]), before)


def test_a_block_that_does_nothing_is_seen_to_do_nothing(documents):
    student = make("pre")
    with torch.no_grad():
        for layer in student.layers[2:4]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    row = run(student, documents)["blocks"][1]
    assert (row["removal"], row["angle"], row["relative_update"]) == (0.0, 0.0, 0.0)


def test_attention_on_the_first_token_equals_explicit_weights(documents):
    """softmax(q k^T / sqrt(d)) written out per document and head, its first column averaged over all later tokens."""
    student = make("pre")
    found = run(student, documents)
    shares = [[] for _ in range(6)]
    with torch.no_grad():
        for i in range(len(documents)):
            ids = torch.from_numpy(documents[i][:-1].copy()).long()
            layout = student.layout([len(ids)])
            h = student.embed_tokens(ids)
            for number, layer in enumerate(student.layers):
                q, k, _ = layer.self_attn.project(layer.input_layernorm(h), layout)
                k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
                scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
                scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
                shares[number].append(scores.softmax(-1)[:, 1:, 0])
                h = layer(h, layout)
    for row, share in zip(found["layers"], shares, strict=True):
        assert row["sink"] == pytest.approx(torch.cat(share, dim=1).mean(1).tolist(), abs=1e-5)
        assert len(row["sink"]) == 4


def test_a_massive_activation_at_an_ordinary_token_is_named(documents):
    student = make("pre")
    token = int(documents[1][12])
    assert sum(int((documents[i][1:-1] == token).sum()) for i in range(5)) == 1
    with torch.no_grad():
        student.embed_tokens.weight[token, 3] = -400.0
    found = run(student, documents)
    (named,) = found["entry"]["outliers"]
    assert (named["text"], named["document"], named["position"]) == (f"<{token}>", 1, 12)
    assert (named["channel"], named["value"]) == (3, 400.0)
    counts = {kind: values["count"] for kind, values in found["entry"]["rms"].items()}
    assert counts["outlier"] == 1
    assert sum(counts.values()) - counts["all"] == counts["all"] == found["tokens"]  # every token is in one class
    assert found["blocks"][0]["outliers"][0]["token"] == token


def test_removing_one_layer_is_the_model_without_it(documents):
    student, shorter = make("pre"), make("pre")
    del shorter.layers[3]
    found = run(student, documents)

    @torch.no_grad()
    def loss(model):
        rows = [torch.from_numpy(documents[i].copy()).long() for i in range(5)]
        parts = [
            torch.nn.functional.cross_entropy(
                model(r[:-1], [len(r) - 1]) @ model.lm_head.weight.T, r[1:], reduction="none"
            )
            for r in rows
        ]
        return torch.cat(parts).double().mean().item()

    assert found["layers"][3]["removal"] == pytest.approx(loss(shorter) - loss(student), abs=1e-5)


def test_token_classes_of_a_tokenizer(shared):
    tokenizer = shared.tokenizer
    classes = TokenClasses.of(tokenizer, len(tokenizer))
    assert classes.special_ids == sorted(tokenizer.all_special_ids)
    texts = {classes.text(i) for i in classes.delimiter_ids}
    assert {".", "\n", ","} <= texts
    assert not any(c.isalnum() for text in texts for c in text)
    assert " " not in texts
    assert not set(classes.delimiter_ids) & set(classes.special_ids)


def test_fixed_batch_is_the_start_of_the_documents(documents):
    assert fixed_batch(documents, 8) == [0]
    assert fixed_batch(documents, 9) == [0, 1]
    assert fixed_batch(documents, 10_000) == [0, 1, 2, 3, 4]


def test_a_hugging_face_model_is_read_exactly(shared, capsys):
    import json

    from depthgrow.arms import as_student
    from depthgrow.cli import main
    from depthgrow.files import UserError
    from depthgrow.teacher.live import LiveTeacher

    teacher = LiveTeacher.load(shared.teacher, torch.float32, CPU)
    student = as_student(teacher, 1)
    ids = torch.arange(20)
    torch.testing.assert_close(student(ids, [20]), teacher.hidden(ids, [20]), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="does not divide"):
        as_student(teacher, 2)
    with pytest.raises(UserError, match="--layers-per-block 0"):
        as_student(teacher, 0)
    command = ["diagnose", str(shared.teacher), "--corpora", str(shared.corpus), "--documents", "10"]
    assert main([*command, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert len(found["blocks"]) == 3
    assert main(command) == 0
    assert f"{found['blocks'][1]['removal']:.3f}" in capsys.readouterr().out


def test_an_arms_diagnostics_from_the_command_line(mini, tmp_path, capsys):
    from dataclasses import replace

    from conftest import Silent, StopAt
    from depthgrow.cli import main
    from depthgrow.runner import run_study

    run_study(replace(mini, arms=("pre-single",)), tmp_path, stop=StopAt(), listener=Silent())
    assert main(["diagnose", str(tmp_path), "pre-single"]) == 0
    assert "block  removal" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "pre-single seed 42: ce" in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "nodes"), "pre-single"]) == 2
    assert "holds no study" in capsys.readouterr().err
