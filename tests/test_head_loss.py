"""The chunked objective against a ten-line float64 reference, and against the faults others shipped."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy

from depthgrow import head_loss as module
from depthgrow.files import UserError
from depthgrow.head_loss import ObjectiveConfig, TeacherTargets, TopTargets, head_loss, token_values, top_targets

N, D, DT, V = 37, 16, 24, 101


def inputs(dtype=torch.float64, seed=0, n=N):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = (0.5 * torch.randn(V, D, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    t = TeacherTargets(
        torch.randn(n, DT, generator=g, dtype=torch.float64).to(dtype),
        (0.5 * torch.randn(V, DT, generator=g, dtype=torch.float64)).to(dtype),
    )
    labels = torch.randint(0, V, (n,), generator=g)
    return h, w, labels, t


def reference(h, w, labels, t, o, denominator):
    z, zt = h @ w.T, t.hidden_ND.double() @ t.head_VD.double().T
    q = (zt / o.tau).softmax(1)
    kl = (q * (q.log() - (z / o.tau).log_softmax(1))).sum()
    ce = cross_entropy(z, labels, reduction="sum")
    return (o.alpha * o.tau**2 * kl + o.gamma * ce) / denominator


@pytest.mark.parametrize(("alpha", "gamma", "tau"), list(itertools.product((0.7, 1.0, 0.0), (0.3, 0.9), (1.0, 2.5))))
def test_value_and_gradient_equal_the_float64_reference(alpha, gamma, tau, monkeypatch):
    monkeypatch.setattr(module, "chunk_tokens", lambda vocab, device: 8)  # several chunks and a ragged last one
    o = ObjectiveConfig(alpha=alpha, gamma=gamma, tau=tau)
    h, w, labels, t = inputs()
    expected = torch.autograd.grad(reference(h, w, labels, t, o, 50.0), (h, w))
    result = head_loss(h, w, labels, t, o, 50.0)
    torch.testing.assert_close(result.loss, reference(h, w, labels, t, o, 50.0).detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(result.loss * 3, (h, w)), expected, strict=True):
        torch.testing.assert_close(ours, 3 * theirs, rtol=1e-10, atol=1e-12)


def test_gradient_is_the_numeric_derivative():
    h, w, labels, t = inputs()
    o = ObjectiveConfig(alpha=0.6, gamma=0.5, tau=1.7)
    gradients = torch.autograd.grad(head_loss(h, w, labels, t, o, float(N)).loss, (h, w))
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        dh, dw = (1e-5 * torch.randn(x.shape, generator=g, dtype=x.dtype) for x in (h, w))
        high, low = (head_loss(h + s * dh, w + s * dw, labels, t, o, float(N)).loss.item() for s in (1, -1))
        slope = sum((gradient * step).sum() for gradient, step in zip(gradients, (dh, dw), strict=True))
        assert (high - low) / 2 == pytest.approx(slope.item(), rel=1e-6, abs=1e-12)


def test_a_second_backward_pass_is_refused_not_wrong():
    h, w, labels, t = inputs()
    loss = head_loss(h, w, labels, t, ObjectiveConfig(), float(N)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_float32_agrees_with_float64():
    o = ObjectiveConfig()
    wide, narrow = inputs(), inputs(torch.float32)
    for a, b in zip(
        torch.autograd.grad(head_loss(*wide, o, float(N)).loss, wide[:2]),
        torch.autograd.grad(head_loss(*narrow, o, float(N)).loss, narrow[:2]),
        strict=True,
    ):
        torch.testing.assert_close(b.double(), a, rtol=1e-5, atol=1e-7)


def test_identical_models_have_exactly_zero_kl():
    h, w, labels, _ = inputs(torch.float32)
    same = TeacherTargets(h.detach(), w.detach())
    assert head_loss(h, w, labels, same, ObjectiveConfig(), 1.0).kl_sum.item() == 0.0
    values = token_values(h, w, labels, same)
    assert torch.equal(values.kl_N, torch.zeros(N))
    loss = head_loss(h, w, labels, same, ObjectiveConfig(alpha=1.0, gamma=0.0), 1.0).loss
    assert all(torch.count_nonzero(g) == 0 for g in torch.autograd.grad(loss, (h, w)))


def test_sums_are_the_per_token_values():
    h, w, labels, t = inputs()
    values, result = token_values(h, w, labels, t), head_loss(h, w, labels, t, ObjectiveConfig(tau=2.0), 9.0)
    torch.testing.assert_close(result.ce_sum, values.ce_N.sum())
    torch.testing.assert_close(result.kl_sum, values.kl_N.sum())
    zt = t.hidden_ND @ t.head_VD.T
    torch.testing.assert_close(values.teacher_entropy_N, torch.distributions.Categorical(logits=zt).entropy())
    assert (values.kl_N > 0).all()


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_one_hot_teacher_is_finite(tau):
    h, w, labels, t = inputs(torch.float32)
    sharp = TeacherTargets(1e4 * t.hidden_ND, t.head_VD)  # every probability but one underflows to zero
    result = head_loss(h, w, labels, sharp, ObjectiveConfig(tau=tau), float(N))
    assert torch.isfinite(result.loss)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(result.loss, (h, w)))
    values = token_values(h, w, labels, sharp)
    top = (sharp.hidden_ND @ sharp.head_VD.T).argmax(1)
    torch.testing.assert_close(values.kl_N, cross_entropy(h @ w.T, top, reduction="none"), rtol=1e-4, atol=1e-4)
    assert values.teacher_entropy_N.abs().max() < 1e-4


def test_splitting_the_tokens_changes_nothing():
    o = ObjectiveConfig()
    whole, parts = inputs(torch.float32), inputs(torch.float32)
    head_loss(*whole, o, float(N)).loss.backward()
    for piece in (slice(0, 11), slice(11, 12), slice(12, N)):  # unequal on purpose: a mean of means would differ
        h, w, labels, t = parts
        targets = TeacherTargets(t.hidden_ND[piece], t.head_VD)
        head_loss(h[piece], w, labels[piece], targets, o, float(N)).loss.backward()
    torch.testing.assert_close(parts[0].grad, whole[0].grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(parts[1].grad, whole[1].grad, rtol=1e-6, atol=1e-7)


def test_error_of_the_head_gradient_does_not_grow_with_the_number_of_chunks(monkeypatch):
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in inputs(torch.bfloat16, n=600)
    ]
    wide[:2] = (x.detach().requires_grad_() for x in wide[:2])
    wide[3] = TeacherTargets(wide[3].hidden_ND.double(), wide[3].head_VD.double())
    exact = torch.autograd.grad(head_loss(*wide, ObjectiveConfig(), 600.0).loss, wide[1])[0]
    errors = []
    for size in (600, 4, 1):
        monkeypatch.setattr(module, "chunk_tokens", lambda vocab, device, size=size: size)
        narrow = inputs(torch.bfloat16, n=600)
        ours = torch.autograd.grad(head_loss(*narrow, ObjectiveConfig(), 600.0).loss, narrow[1])[0]
        errors.append(((ours.double() - exact).norm() / exact.norm()).item())
    assert max(errors) < 1.1 * errors[0]


def test_labels_are_used_as_given_and_shifting_matters():
    h, w, labels, t = inputs()
    shifted = token_values(h, w, labels.roll(1), t).ce_N
    right = token_values(h, w, labels, t).ce_N
    torch.testing.assert_close(right, cross_entropy(h @ w.T, labels, reduction="none"))
    assert (shifted - right).abs().max() > 0.1


def test_no_tensor_of_tokens_by_vocabulary_is_made(monkeypatch):
    """Peak memory stays below one [tokens, vocabulary] float32 tensor."""
    tokens, vocab, width = 2048, 8192, 8
    h = torch.randn(tokens, width, requires_grad=True)
    w = torch.randn(vocab, width, requires_grad=True)
    t = TeacherTargets(torch.randn(tokens, width), torch.randn(vocab, width))
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        head_loss(h, w, torch.zeros(tokens, dtype=torch.long), t, ObjectiveConfig(), 1.0).loss.backward()
    assert sizes
    assert max(sizes) <= tokens * vocab / 16


def test_without_teacher_it_is_cross_entropy():
    h, w, labels, _ = inputs()
    result = head_loss(h, w, labels, None, ObjectiveConfig(alpha=0.0, gamma=1.0), float(N))
    torch.testing.assert_close(result.loss, cross_entropy(h @ w.T, labels))
    torch.testing.assert_close(
        torch.autograd.grad(result.loss, h)[0], torch.autograd.grad(cross_entropy(h @ w.T, labels), h)[0]
    )


def test_frozen_head_gets_no_gradient_and_hidden_states_do():
    h, w, labels, t = inputs()
    head_loss(h, w.detach(), labels, t, ObjectiveConfig(), 1.0).loss.backward()
    assert h.grad is not None
    assert w.grad is None


def test_other_vocabulary_is_refused():
    h, w, labels, t = inputs()
    with pytest.raises(UserError, match="not one vocabulary"):
        head_loss(h, w, labels, TeacherTargets(t.hidden_ND, t.head_VD[:-1]), ObjectiveConfig(), 1.0)


@pytest.mark.parametrize("bad", [{"tau": 0.0}, {"alpha": -1.0}, {"alpha": 0.0, "gamma": 0.0}])
def test_bad_objective_is_refused(bad):
    with pytest.raises(UserError, match="objective"):
        ObjectiveConfig(**bad)


def bucketed(h, w, labels, top, o, denominator):
    """KL over the kept tokens and one bucket with all others, and CE: by autograd, from the definition."""
    p = (h @ w.T).softmax(1)
    q_top, p_top = top.log_q_Nk.double().exp(), p.gather(1, top.id_Nk.long())
    q_rest, p_rest = 1 - q_top.sum(1), 1 - p_top.sum(1)
    kl = (q_top * (q_top / p_top).log()).sum() + (q_rest * (q_rest / p_rest).log()).sum()
    return (o.alpha * kl + o.gamma * cross_entropy(h @ w.T, labels, reduction="sum")) / denominator


@pytest.mark.parametrize("k", [1, 7, V - 1])
def test_top_targets_equal_the_bucketed_kl_and_its_gradient(k, monkeypatch):
    monkeypatch.setattr(module, "chunk_tokens", lambda vocab, device: 8)
    o = ObjectiveConfig(alpha=0.8, gamma=0.3)
    h, w, labels, t = inputs()
    kept = top_targets(t.hidden_ND, t.head_VD, k)
    top = TopTargets(kept.id_Nk, kept.log_q_Nk.double())
    expected = torch.autograd.grad(bucketed(h, w, labels, top, o, 50.0), (h, w))
    result = head_loss(h, w, labels, top, o, 50.0)
    torch.testing.assert_close(result.loss, bucketed(h, w, labels, top, o, 50.0).detach(), rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(result.loss, (h, w)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_top_kl_lies_between_zero_and_the_full_kl_and_grows_with_k():
    h, w, labels, t = inputs()
    full = head_loss(h, w, labels, t, ObjectiveConfig(), 1.0).kl_sum.item()
    found = [
        head_loss(h, w, labels, top_targets(t.hidden_ND, t.head_VD, k), ObjectiveConfig(), 1.0).kl_sum.item()
        for k in (1, 4, 16, 64, V)
    ]
    assert 0 < found[0] < found[1] < found[2] < found[3] < found[4]
    assert found[4] == pytest.approx(full, rel=1e-5)  # log-probabilities are kept in float32


def test_a_teacher_whose_top_holds_everything_is_finite():
    h, w, labels, t = inputs(torch.float32)
    sharp = top_targets(1e4 * t.hidden_ND, t.head_VD, 3)  # nothing is left for the bucket
    result = head_loss(h, w, labels, sharp, ObjectiveConfig(), float(N))
    result.loss.backward()
    assert result.kl_sum.isfinite()
    assert h.grad.isfinite().all()
    assert w.grad.isfinite().all()
    with pytest.raises(UserError, match="tau=1 only"):
        head_loss(h, w, labels, sharp, ObjectiveConfig(tau=2.0), 1.0)


def test_inside_autocast_products_are_narrow_and_sums_are_not():
    o = ObjectiveConfig()
    h, w, labels, t = inputs(torch.float32)
    expected = torch.autograd.grad(head_loss(h, w, labels, t, o, float(N)).loss, (h, w))
    with torch.autocast("cpu", torch.bfloat16):
        result = head_loss(h, w, labels, t, o, float(N))
    assert result.loss.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(result.loss, (h, w)), expected, strict=True):
        assert ours.dtype == torch.float32
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert 1e-6 < error < 2e-2  # bfloat16 was used, and did not spread


def test_inside_a_compiled_function_it_is_the_same():
    o = ObjectiveConfig()
    h, w, labels, t = inputs(torch.float32)

    def step(h, w):
        return head_loss(torch.tanh(h), w, labels, t, o, float(N)).loss * 2

    expected = torch.autograd.grad(step(h, w), (h, w))
    for ours, theirs in zip(
        torch.autograd.grad(torch.compile(step, backend="aot_eager")(h, w), (h, w)), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_of_bfloat16_factors_are_not_rounded(autocast):
    """Logits near 20: rounded to bfloat16 they give three times the KL. The oracle is float64 on the same factors."""
    generator = torch.Generator().manual_seed(0)
    h_ND, t_ND = (torch.randn(40, 64, generator=generator) for _ in range(2))
    t_ND = (h_ND + 0.01 * t_ND).bfloat16()
    head_VD = (torch.randn(3000, 64, generator=generator) * 2.5).bfloat16()
    label_N = torch.randint(0, 3000, (40,), generator=generator)
    exact_NV = h_ND.bfloat16().double() @ head_VD.double().T
    assert exact_NV.abs().amax() > 20
    q_NV, p_NV = ((x.double() @ head_VD.double().T).log_softmax(1) for x in (t_ND, h_ND.bfloat16()))
    kl_N, ce_N = (q_NV.exp() * (q_NV - p_NV)).sum(1), -p_NV.gather(1, label_N[:, None])[:, 0]
    rounded_NV = exact_NV.bfloat16().double().log_softmax(1)
    rounded_kl = (q_NV.exp() * (q_NV - rounded_NV)).sum(1).mean()
    assert rounded_kl > 1.2 * kl_N.mean()  # so the fault would be seen below
    h_ND = h_ND if autocast else h_ND.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = token_values(h_ND, head_VD, label_N, TeacherTargets(t_ND, head_VD))
        result = head_loss(
            h_ND.requires_grad_(),
            head_VD.requires_grad_(),
            label_N,
            TeacherTargets(t_ND, head_VD.detach()),
            ObjectiveConfig(),
            40,
        )
    torch.testing.assert_close(found.kl_N.double(), kl_N, rtol=1e-3, atol=2e-6)
    torch.testing.assert_close(found.ce_N.double(), ce_N, rtol=1e-5, atol=1e-5)
    assert float(result.kl_sum) == pytest.approx(float(kl_N.sum()), rel=1e-3)
    assert float(result.ce_sum) == pytest.approx(float(ce_N.sum()), rel=1e-6)
