"""Forward statistics and gradients of the interventions against their formulas, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import HF_CONFIGS
from depthgrow.architecture import Architecture
from depthgrow.files import UserError
from depthgrow.interventions import EPS, INTERVENTIONS
from depthgrow.student import Student, StudentConfig
from depthgrow.study import plan_tree
from test_study import FACTS

N, D = 11, 8
STRUCTURAL = torch.arange(N) % 4 == 0


def parts(name, scale=1.0):
    """y, and dL/dx for a fixed upstream gradient g."""
    gen = torch.Generator().manual_seed(0)
    x = (7 * torch.randn(N, D, generator=gen, dtype=torch.float64)).requires_grad_()
    g = torch.randn(N, D, generator=gen, dtype=torch.float64)
    y = INTERVENTIONS[name](x, STRUCTURAL, scale)
    (grad,) = torch.autograd.grad((y * g).sum(), x)
    return x.detach(), g, y.detach(), grad


def unit_and_jacobian_product(x, g):
    """n(x), and g times its Jacobian: (g - n mean(g n)) / rms."""
    rms = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    n = x / rms
    return n, (g - n * (g * n).mean(-1, keepdim=True)) / rms


def test_forward_norm_has_the_norms_forward_and_the_identitys_backward():
    x, g, y, grad = parts("forward-norm")
    torch.testing.assert_close(y, unit_and_jacobian_product(x, g)[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(grad, g)


def test_backward_norm_is_the_mirror():
    x, g, y, grad = parts("backward-norm")
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, unit_and_jacobian_product(x, g)[1], rtol=1e-10, atol=1e-12)


def test_rescale_sets_the_scale_and_scales_the_gradient():
    x, g, y, grad = parts("rescale", scale=2.5)
    rms = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(y.square().mean(-1).sqrt(), torch.full((N,), 2.5).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, g * 2.5 / rms, rtol=1e-12, atol=1e-12)


def test_structural_clip_touches_structural_tokens_only():
    x, g, y, grad = parts("structural-clip", scale=0.5)
    assert torch.equal(y[~STRUCTURAL], x[~STRUCTURAL])
    assert torch.equal(grad[~STRUCTURAL], g[~STRUCTURAL])
    torch.testing.assert_close(
        y[STRUCTURAL].square().mean(-1).sqrt(), torch.full((3,), 0.5).double(), rtol=1e-5, atol=0
    )


def student(intervention, blocks, placement="pre"):
    arch = Architecture.from_hf(HF_CONFIGS["qwen3"])
    config = StudentConfig(layers_per_block=2)
    model = Student(config, arch, placement, intervention, seed=0, special_ids=[5])
    model.append_blocks(blocks)
    return model


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_it_acts_where_blocks_begin_and_nowhere_else(name):
    ids, lengths = torch.tensor([5, 1, 2, 3, 9, 8]), [4, 2]
    assert torch.equal(student(name, 1)(ids, lengths), student(None, 1)(ids, lengths))
    model = student(name, 3)
    inputs, outputs = [], []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, i: inputs.append(i[0]))
        layer.register_forward_hook(lambda m, i, o: outputs.append(o))
    model(ids, lengths)
    structural = torch.tensor([True, False, False, False, True, False])
    for index in range(1, 6):
        expected = outputs[index - 1]
        if index % 2 == 0:
            expected = INTERVENTIONS[name](expected, structural, 1.0)
        assert torch.equal(inputs[index], expected), index


def test_forward_norm_leaves_the_gradient_path_of_the_plain_model_in_the_prefix():
    """With the same upstream gradient at the boundary, the prefix's parameters get the plain model's gradient."""
    ids, lengths = torch.arange(6), [6]
    grads = []
    for name in (None, "forward-norm"):
        model = student(name, 2).double()
        store = []
        model.layers[2].register_forward_pre_hook(lambda m, i, store=store: store.append(i[0]))
        model(ids, lengths)
        upstream = torch.randn(6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads.append(torch.autograd.grad((store[0] * upstream).sum(), list(model.layers[:2].parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_arms_share_the_phase_that_has_no_boundary(mini):
    study = replace(mini, arms=("pre-grow", "pre-grow+forward-norm", "pre-grow+rescale"))
    paths = list(plan_tree(study, FACTS).paths.values())
    assert len({p[0] for p in paths}) == 1
    assert len({p[1] for p in paths}) == len({p[2] for p in paths}) == 3


def test_export_refuses_what_no_model_class_has(shared, tmp_path):
    from depthgrow.export.hf import save_hf

    with pytest.raises(UserError, match="forward-norm"):
        save_hf(student("forward-norm", 2), shared.tokenizer, tmp_path / "m", dtype=torch.float32)
