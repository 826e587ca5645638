"""Schedule in closed form; AdamW by name; frozen means frozen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from depthgrow.curriculum import Phase, canonical, grow, joint, schedule_position
from depthgrow.files import UserError
from depthgrow.optim import NamedAdamW, OptimConfig, learning_rate


def test_learning_rate_by_hand():
    c = OptimConfig(peak_lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(c, s, 11) for s in range(11)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 2)))
    assert rates[10] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_papers_warmup_is_750_of_50000():
    c = OptimConfig()
    assert learning_rate(c, 749, 50_000) == pytest.approx(1e-4)
    assert learning_rate(c, 748, 50_000) < 1e-4
    assert learning_rate(c, 49_999, 50_000) == pytest.approx(1e-6)


def test_schedule_restarts_per_phase_or_runs_through():
    phases = grow(3, 10)
    assert [schedule_position(phases, i) for i in range(3)] == [(0, 10)] * 3
    through = [phases[0], *(Phase(active=p.active, steps=10, restart_lr=False) for p in phases[1:])]
    assert [schedule_position(through, i) for i in range(3)] == [(0, 30), (10, 30), (20, 30)]
    assert schedule_position(canonical(joint(3, 7)), 0) == (0, 7)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def train(net, optimizer, steps, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = net(torch.randn(8, 4, generator=g)).square().mean()
        loss.backward()
        optimizer.step(1e-2, loss.detach())


def test_equals_torch_adamw_with_clipping():
    ours, theirs = model(), model()
    c = OptimConfig(peak_lr=1e-2, weight_decay=0.1, clip_norm=0.05)
    train(ours, NamedAdamW(ours.named_parameters(), c, lambda name: name.split(".")[0]), 5)
    groups = [  # gains and biases are not decayed
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        theirs(torch.randn(8, 4, generator=g)).square().mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        plain.step()
        plain.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_state_restores_bit_for_bit_even_over_stale_gradients():
    whole, split = model(), model()
    c = OptimConfig(peak_lr=1e-2, weight_decay=0.1)
    optimizer = NamedAdamW(whole.named_parameters(), c)
    train(whole, optimizer, 3, seed=1)
    train(whole, optimizer, 4, seed=2)
    first = NamedAdamW(split.named_parameters(), c)
    train(split, first, 3, seed=1)
    saved = {k: v.clone() for k, v in first.state().items()}
    split(torch.ones(2, 4)).sum().backward()  # leaves gradients behind
    second = NamedAdamW(split.named_parameters(), c)
    second.load_state(saved)
    assert all(torch.equal(saved[k], v) for k, v in second.state().items())
    train(split, second, 4, seed=2)
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_goes_by_name_into_a_grown_model():
    small, big = model(), nn.Sequential(*model(), nn.Linear(2, 2))
    c = OptimConfig(peak_lr=1e-2)
    first = NamedAdamW(small.named_parameters(), c)
    train(small, first, 2)
    second = NamedAdamW(big.named_parameters(), c)
    second.load_state(first.state())
    assert set(second.state()) == set(first.state())
    train(big, second, 1)
    assert {n.split(".", 1)[1] for n in second.state()} == dict(big.named_parameters()).keys()


def test_wrong_shape_is_an_error_not_a_silence():
    net = model()
    optimizer = NamedAdamW(net.named_parameters(), OptimConfig())
    with pytest.raises(UserError, match=r"0\.weight"):
        optimizer.load_state({"exp_avg.0.weight": torch.zeros(3, 3)})


def test_frozen_parameters_keep_their_bits_under_weight_decay():
    net = model()
    net[0].requires_grad_(False)
    before = [p.clone() for p in net[0].parameters()]
    optimizer = NamedAdamW(net.named_parameters(), OptimConfig(peak_lr=1e-1, weight_decay=0.5))
    train(net, optimizer, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, net[0].parameters(), strict=True))
    assert set(optimizer.parameters) == {"1.weight", "1.bias"}
    assert all(p.grad is None for p in net[0].parameters())


@pytest.mark.parametrize("bad", [{"min_lr": 1.0}, {"warmup_share": 1.0}, {"clip_norm": 0.0}])
def test_bad_values_name_the_field(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        OptimConfig(**bad)
