"""The block stack against Hugging Face's models and against an independent float64 post-norm."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from conftest import HF_CONFIGS, SIZES, random_model
from depthgrow.architecture import Architecture
from depthgrow.files import UserError
from depthgrow.student import PLACEMENTS, Layout, RMSNorm, Student, StudentConfig

LENGTHS = [7, 23, 1, 12]


def student_from(model, placement="pre"):
    arch = Architecture.from_hf(model.config)
    config = StudentConfig(num_blocks=3, layers_per_block=1)
    student = Student(config, arch, placement, seed=0)
    student.append_blocks(3)
    state = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    missing, unexpected = student.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    return student


def random_ids(total, vocab=SIZES["vocab_size"]):
    return torch.randint(0, vocab, (total,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", HF_CONFIGS)
@torch.no_grad()
def test_pre_student_equals_hugging_face_layer_by_layer(name):
    model = random_model(HF_CONFIGS[name])
    student = student_from(model)
    ids = random_ids(sum(LENGTHS))
    ours: list[torch.Tensor] = []
    for layer in student.layers:
        layer.register_forward_hook(lambda module, inputs, output: ours.append(output))
    final = student(ids, LENGTHS)
    logits = final @ student.lm_head.weight.T
    start = 0
    for length in LENGTHS:  # each document alone: what padding and neighbours must not change
        part = slice(start, start + length)
        theirs: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output, store=theirs: store.append(output))
            for layer in model.model.layers
        ]
        out = model(ids[part].unsqueeze(0))
        for hook in hooks:
            hook.remove()
        for mine, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine[part], reference[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits[part], out.logits[0], rtol=1e-5, atol=1e-5)
        start += length


def reference_post(model, ids):
    """Post-norm in float64 from the paper's formulas, written with nothing of ours: one document at a time."""
    w = {k: v.double() for k, v in model.state_dict().items()}
    c = model.config
    heads, groups, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    rope_theta = c.rope_parameters["rope_theta"]
    n = len(ids)

    def norm(x, weight):
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.rms_norm_eps)

    angles = torch.arange(n).double()[:, None] * rope_theta ** (-torch.arange(0, d, 2).double() / d)[None]

    def rope(x):  # [n, heads, d]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = norm(w["model.embed_tokens.weight"][ids], w["model.norm.weight"])
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}."
        q = (x @ w[p + "self_attn.q_proj.weight"].T).view(n, heads, d)
        k = (x @ w[p + "self_attn.k_proj.weight"].T).view(n, groups, d)
        v = (x @ w[p + "self_attn.v_proj.weight"].T).view(n, groups, d)
        q = rope(norm(q, w[p + "self_attn.q_norm.weight"]))
        k = rope(norm(k, w[p + "self_attn.k_norm.weight"]))
        out = torch.zeros(n, heads, d, dtype=torch.float64)
        for h in range(heads):
            g = h // (heads // groups)
            for t in range(n):
                score = (k[: t + 1, g] @ q[t, h]) / d**0.5
                out[t, h] = score.softmax(0) @ v[: t + 1, g]
        attended = out.reshape(n, -1) @ w[p + "self_attn.o_proj.weight"].T
        x = norm(x + attended, w[p + "input_layernorm.weight"])
        gate, up = x @ w[p + "mlp.gate_proj.weight"].T, x @ w[p + "mlp.up_proj.weight"].T
        mlp = (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        x = norm(x + mlp, w[p + "post_attention_layernorm.weight"])
    return x @ w["lm_head.weight"].T


@torch.no_grad()
def test_post_student_equals_independent_float64_reference():
    model = random_model(HF_CONFIGS["qwen3"])
    student = student_from(model, "post")
    ids = random_ids(sum(LENGTHS))
    wide = student.double()
    logits = wide(ids, LENGTHS) @ wide.lm_head.weight.T
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        torch.testing.assert_close(logits[part], reference_post(model, ids[part]), rtol=1e-6, atol=1e-6)
        start += length


def test_placements_have_equal_trainable_parameters():
    arch = Architecture.from_hf(HF_CONFIGS["qwen3"])
    counts, norms = set(), set()
    for placement in PLACEMENTS:
        student = Student(StudentConfig(), arch, placement, seed=0)
        student.append_blocks(3)
        counts.add(sum(p.numel() for p in student.parameters() if p.requires_grad))
        norms.add(sum(p.numel() for n, p in student.named_parameters() if "norm" in n))
    assert len(counts) == len(norms) == 1
    assert counts == {9 * arch.layer_parameters() + arch.vocab_size * arch.hidden_size + arch.hidden_size}


def test_blocks_start_identical_whatever_the_arm_and_the_order():
    arch = Architecture.from_hf(HF_CONFIGS["llama"])
    config = StudentConfig(layers_per_block=2)
    whole = Student(config, arch, "pre", seed=3)
    whole.append_blocks(3)
    torch.manual_seed(99)
    grown = Student(config, arch, "post", seed=3)
    for active in (1, 2, 3):
        torch.rand(17)  # unrelated draws in between
        grown.append_blocks(active)
    for (name, a), (other, b) in zip(whole.named_parameters(), grown.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    again = Student(config, arch, "pre", seed=4)
    again.append_blocks(1)
    assert not torch.equal(again.layers[0].mlp.up_proj.weight, whole.layers[0].mlp.up_proj.weight)
    assert not torch.equal(whole.layers[0].mlp.up_proj.weight, whole.layers[1].mlp.up_proj.weight)


def test_init_gain_keeps_the_papers_scale():
    arch = Architecture.from_hf(HF_CONFIGS["qwen3"])
    student = Student(StudentConfig(init_gain=1.28), arch, "pre", seed=0)
    student.append_blocks(3)
    drawn = torch.cat([p.flatten() for n, p in student.layers.named_parameters() if n.endswith("proj.weight")])
    assert abs(drawn.std().item() - 1.28 / arch.hidden_size**0.5) < 0.003
    assert 1.28 / 4096**0.5 == 0.02


def test_tied_teacher_gives_an_untied_student():
    model = random_model(HF_CONFIGS["llama3-rope"])
    arch = Architecture.from_hf(model.config)
    table = model.get_input_embeddings().weight.detach().clone()
    student = Student(StudentConfig(), arch, "pre", seed=0, embedding_VD=table, head_VD=table)
    student.append_blocks(1)
    loss = (student(random_ids(9), [9]) @ student.lm_head.weight.T).logsumexp(-1).sum()
    loss.backward()
    torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=0.1).step()
    assert torch.equal(student.embed_tokens.weight, table)
    assert not torch.equal(student.lm_head.weight, table)
    assert student.embed_tokens.weight.grad is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act"),
        (Qwen2Config(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type"),
        (LlamaConfig(**SIZES, logits_scaling=2.0), "logits_scaling"),
        (Qwen3Config(**SIZES, attention_dropout=0.1), "attention_dropout"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config, word):
    with pytest.raises(UserError, match=word):
        Architecture.from_hf(config)


def test_unknown_placement_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'post'"):
        Student(StudentConfig(), Architecture.from_hf(HF_CONFIGS["llama"]), "pots", seed=0)


def test_document_longer_than_the_positions_is_refused():
    student = Student(StudentConfig(), Architecture.from_hf(HF_CONFIGS["llama"]), "pre", seed=0)
    student.append_blocks(1)
    with pytest.raises(UserError, match="max_tokens"):
        student(random_ids(300), [300])


def test_the_norm_and_its_gradient_equal_the_formula():
    norm = RMSNorm(24, eps=1e-2).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 3, 24, dtype=torch.float64, requires_grad=True)
    expected = norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(norm, (x,))
    zero = torch.zeros(2, 24, requires_grad=True, dtype=torch.float64)
    norm(zero).sum().backward()
    torch.testing.assert_close(zero.grad, (norm.weight / 0.1).expand(2, 24).detach())


def test_the_norm_of_half_precision_is_taken_in_float32():
    norm, x = RMSNorm(24, eps=1e-6), torch.randn(5, 24).bfloat16() * 300
    unit = x.float() / x.float().pow(2).mean(-1, keepdim=True).sqrt()
    torch.nn.init.ones_(norm.weight)
    assert torch.equal(norm(x), unit.bfloat16().float())


def test_rope_table_grows_without_changing_earlier_positions():
    student = Student(StudentConfig(), Architecture.from_hf(HF_CONFIGS["qwen3-yarn"]), "pre", seed=0)
    student.append_blocks(1)
    ids = random_ids(200)
    short = student(ids[:20], [20])
    long = student(ids, [200])
    torch.testing.assert_close(long[:20], short, rtol=1e-5, atol=1e-6)


def test_architecture_survives_the_round_trip_through_hugging_face():
    for config in HF_CONFIGS.values():
        arch = Architecture.from_hf(config)
        assert Architecture.from_hf(arch.to_hf(arch.num_layers)) == arch


def test_the_variable_length_kernel_is_called_for_the_same_attention(monkeypatch):
    """The kernel runs on GPUs only: a stand-in with its documented signature does what it documents."""
    from torch.nn.attention.varlen import varlen_attn

    from depthgrow import student as module

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        inspect.signature(varlen_attn).bind(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
        assert options["window_size"] == (-1, 0)
        assert options["enable_gqa"]
        assert max_q == max_k == (cu_seq_q[1:] - cu_seq_q[:-1]).max()
        assert cu_seq_q.dtype == torch.int32
        out = torch.empty_like(query)
        for a, b in pairwise(cu_seq_q):
            for head in range(query.shape[1]):
                group = head // (query.shape[1] // key.shape[1])
                scores = query[a:b, head] @ key[a:b, group].T / query.shape[2] ** 0.5
                future = torch.ones_like(scores).triu(1).bool()
                out[a:b, head] = scores.masked_fill(future, -torch.inf).softmax(1) @ value[a:b, group]
        return out

    monkeypatch.setattr(module, "varlen_attn", kernel)
    lengths = [5, 1, 9]
    layout = Layout(lengths, torch.ones(16, 8), torch.zeros(16, 8))
    q, k, v = torch.randn(15, 4, 8), torch.randn(15, 2, 8), torch.randn(15, 2, 8)
    torch.testing.assert_close(layout.attend_at_once(q, k, v), layout.attend(q, k, v), rtol=1e-5, atol=1e-6)
