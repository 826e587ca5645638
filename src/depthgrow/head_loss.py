"""The objective, formed chunk by chunk over tokens: no [tokens, vocabulary] tensor exists.

    loss = alpha * tau^2 * KL(softmax(z_t / tau) || softmax(z_s / tau)) + gamma * CE(z_s, next token)

summed over tokens and divided by a denominator the caller counts (all target tokens of the global batch).
With p = softmax(z_s), p' = softmax(z_s / tau), q' = softmax(z_t / tau):

    dloss/dz_s = alpha * tau * (p' - q') + gamma * (p - onehot(label))

so that one pass over a chunk gives its loss and its gradient, and the chunk's logits are thrown away.

Shapes: N tokens, n tokens of a chunk, D hidden, V vocabulary. Logits are products in the dtype of the hidden states;
softmax and sums are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgrow.files import UserError

# Bytes of one chunk's float32 logits, of which a few live at a time: on a CPU they should stay in the second-level cache
# (2,048-token vocabulary: 56 ms a batch against 95 ms for one chunk of 11 MB); a GPU wants large products.
CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
MIN_CHUNK = 128  # tokens: fewer would make narrow products of a large vocabulary


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Weights of the distillation (alpha) and cross-entropy (gamma) terms, and the softmax temperature tau."""

    alpha: float = 0.7
    gamma: float = 0.3
    tau: float = 1.0

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise UserError(f"objective.tau={self.tau} must be positive")
        if not (self.alpha >= 0 and self.gamma >= 0 and self.alpha + self.gamma > 0):
            raise UserError(f"objective.alpha={self.alpha} and gamma={self.gamma} must be >= 0 and not both zero")


@dataclass(frozen=True)
class TeacherTargets:
    """What a teacher says about N tokens: final-normed hidden states and the head that turns them into logits."""

    hidden_ND: Tensor
    head_VD: Tensor


@dataclass(frozen=True)
class TopTargets:
    """The teacher's k most probable tokens for each of N, and by omission one bucket with the rest of its probability.

    KL is then taken between distributions over k + 1 outcomes, the student's rest being one bucket too:

        sum_{i in top} q_i log(q_i / p_i) + q_rest log(q_rest / p_rest)   >= 0 and <= the full KL

    whose gradient is that of the full KL to a teacher who spreads q_rest as the student does: p - q, with
    q_v = q_rest p_v / p_rest outside the top.
    """

    id_Nk: Tensor
    log_q_Nk: Tensor


@dataclass(frozen=True)
class TokenValues:
    """Per-token values in nats; without a teacher ``kl`` and ``teacher_entropy`` are None. Both are taken at tau = 1."""

    ce_N: Tensor
    kl_N: Tensor | None
    teacher_entropy_N: Tensor | None


def chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk."""
    return max(MIN_CHUNK, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocab_size))


def _product(a_nK: Tensor, b_KM: Tensor) -> Tensor:
    """a @ b, summed and returned in float32 or wider, also where its factors are narrower.

    Rounding a logit of 20 to bfloat16 moves it by up to 0.06: at 152k words that alone is a KL of several 1e-4.
    """
    device = a_nK.device.type
    if torch.is_autocast_enabled(device):
        a_nK, b_KM = (x.to(torch.get_autocast_dtype(device)) for x in (a_nK, b_KM))
    with torch.autocast(device, enabled=False):
        if a_nK.dtype in (torch.float32, torch.float64):
            return a_nK @ b_KM
        if a_nK.is_cuda:
            return torch.mm(a_nK, b_KM, out_dtype=torch.float32)
        return a_nK.float() @ b_KM.float()  # exact factors; CPUs have no product of another type than its factors'


def _logits(h_nD: Tensor, head_VD: Tensor) -> Tensor:
    return _product(h_nD, head_VD.T)


def _chunks(h_ND: Tensor, vocab_size: int) -> Iterator[slice]:
    size = chunk_tokens(vocab_size, h_ND.device)
    return (slice(start, start + size) for start in range(0, len(h_ND), size))


def _softmax(z_nV: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(z) and the logarithm of its partition sum; ``z_nV`` is shifted in place so that its largest entry is 0."""
    z_nV.sub_(z_nV.amax(1, keepdim=True))
    p_nV = z_nV.softmax(1)
    return p_nV, p_nV.amax(1).log_().neg_()


def _ce(z_nV: Tensor, log_sum_n: Tensor, label_n: Tensor) -> Tensor:
    return log_sum_n - z_nV.gather(1, label_n.unsqueeze(1)).squeeze(1)


def _kl(q_nV: Tensor, zt_nV: Tensor, log_sum_t_n: Tensor, z_nV: Tensor, log_sum_n: Tensor) -> Tensor:
    """KL(q || p) = sum_v q_v (zt_v - z_v) + log_sum - log_sum_t per token, of shifted logits; ``zt_nV`` is overwritten.

    A probability that underflows to 0 contributes exactly 0, since logits are finite.
    """
    return zt_nV.sub_(z_nV).mul_(q_nV).sum(1).add_(log_sum_n).sub_(log_sum_t_n)


@torch.no_grad()
def top_targets(hidden_ND: Tensor, head_VD: Tensor, top: int) -> TopTargets:
    """The ``top`` most probable tokens of every row (all, if the vocabulary is smaller)."""
    log_q_Nk, id_Nk = _logits(hidden_ND, head_VD).log_softmax(1).topk(min(top, len(head_VD)), dim=1)
    return TopTargets(id_Nk.int(), log_q_Nk.float())


def _top(targets: TopTargets, part: slice, z_nV: Tensor, p_nV: Tensor, log_sum_n: Tensor) -> tuple[Tensor, Tensor]:
    """The completed teacher distribution q_nV and the bucketed KL of every token (see `TopTargets`)."""
    id_nk, log_q_nk = targets.id_Nk[part].long(), targets.log_q_Nk[part].to(z_nV.dtype)
    q_nk = log_q_nk.exp()
    log_p_nk = z_nV.gather(1, id_nk) - log_sum_n.unsqueeze(1)
    q_nV = p_nV.scatter(1, id_nk, 0.0)
    rest_q_n, rest_p_n = (1 - q_nk.sum(1)).clamp_min(0), q_nV.sum(1).clamp_min(torch.finfo(p_nV.dtype).tiny)
    kl_n = torch.linalg.vecdot(q_nk, log_q_nk - log_p_nk) + torch.xlogy(rest_q_n, rest_q_n / rest_p_n)
    return q_nV.mul_((rest_q_n / rest_p_n).unsqueeze(1)).scatter_(1, id_nk, q_nk), kl_n


@torch.no_grad()
def token_values(h_ND: Tensor, head_VD: Tensor, label_N: Tensor, targets: TeacherTargets | None) -> TokenValues:
    """CE, KL to the teacher and teacher entropy of every token, in nats; nothing is differentiated."""
    wide = torch.float64 if h_ND.dtype == torch.float64 else torch.float32
    ce_N, kl_N, entropy_N = (torch.empty(len(h_ND), dtype=wide, device=h_ND.device) for _ in range(3))
    head_VD = head_VD.to(h_ND.dtype)
    for part in _chunks(h_ND, len(head_VD)):
        z_nV = _logits(h_ND[part], head_VD)
        _, log_sum_n = _softmax(z_nV)
        ce_N[part] = _ce(z_nV, log_sum_n, label_N[part])
        if targets is not None:
            zt_nV = _logits(targets.hidden_ND[part], targets.head_VD)
            q_nV, log_sum_t_n = _softmax(zt_nV)
            entropy_N[part] = log_sum_t_n - torch.linalg.vecdot(q_nV, zt_nV)
            kl_N[part] = _kl(q_nV, zt_nV, log_sum_t_n, z_nV, log_sum_n)
    return TokenValues(ce_N, kl_N, entropy_N) if targets is not None else TokenValues(ce_N, None, None)


class _HeadLoss(torch.autograd.Function):
    """Forward computes loss and gradients together; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        head_VD: Tensor,
        label_N: Tensor,
        targets: TeacherTargets | TopTargets | None,
        objective: ObjectiveConfig,
        denominator: float,
    ) -> tuple[Tensor, Tensor]:
        alpha, gamma, tau = objective.alpha, objective.gamma, objective.tau
        wide = torch.float64 if h_ND.dtype == torch.float64 else torch.float32
        narrow_VD = head_VD.to(h_ND.dtype)
        grad_h_ND = torch.empty_like(h_ND)
        grad_head_VD = torch.zeros_like(head_VD, dtype=wide) if head_VD.requires_grad else None
        sums = torch.zeros(3, dtype=torch.float64, device=h_ND.device)  # objective, ce, kl
        for part in _chunks(h_ND, len(head_VD)):
            h_nD, label_n = h_ND[part], label_N[part]
            z_nV = _logits(h_nD, narrow_VD)
            grad_nV, log_sum_n = _softmax(z_nV)
            ce_sum = _ce(z_nV, log_sum_n, label_n).sum()
            sums[1] += ce_sum
            sums[0] += gamma * ce_sum
            if targets is None:
                grad_nV.mul_(gamma / denominator)
            elif isinstance(targets, TopTargets):
                q_nV, kl_n = _top(targets, part, z_nV, grad_nV, log_sum_n)
                grad_nV.mul_((alpha + gamma) / denominator).sub_(q_nV, alpha=alpha / denominator)
                sums[2] += kl_n.sum()
                sums[0] += alpha * kl_n.sum()
            else:
                zt_nV = _logits(targets.hidden_ND[part], targets.head_VD)
                if tau == 1.0:
                    q_nV, log_sum_t_n = _softmax(zt_nV)
                    grad_nV.mul_((alpha + gamma) / denominator).sub_(q_nV, alpha=alpha / denominator)
                    soft_n = kl_n = _kl(q_nV, zt_nV, log_sum_t_n, z_nV, log_sum_n)
                else:
                    z_tau_nV, zt_tau_nV = z_nV / tau, zt_nV / tau
                    (p_nV, log_sum_tau_n), (q_nV, log_sum_t_n) = _softmax(z_tau_nV), _softmax(zt_tau_nV)
                    grad_nV.mul_(gamma / denominator).add_(p_nV.sub_(q_nV), alpha=alpha * tau / denominator)
                    soft_n = _kl(q_nV, zt_tau_nV, log_sum_t_n, z_tau_nV, log_sum_tau_n)
                    q_nV, log_sum_t_n = _softmax(zt_nV)
                    kl_n = _kl(q_nV, zt_nV, log_sum_t_n, z_nV, log_sum_n)
                sums[2] += kl_n.sum()
                sums[0] += alpha * tau**2 * soft_n.sum()
            drop_n1 = torch.full_like(log_sum_n, -gamma / denominator).unsqueeze(1)
            grad_nV.scatter_add_(1, label_n.unsqueeze(1), drop_n1)
            narrow_nV = grad_nV.to(h_nD.dtype)
            grad_h_ND[part] = _product(narrow_nV, narrow_VD)
            if grad_head_VD is not None and narrow_nV.dtype == wide:
                grad_head_VD.addmm_(narrow_nV.T, h_nD)
            elif grad_head_VD is not None:  # a bf16 sum over chunks would lose more with every chunk
                grad_head_VD += _product(narrow_nV.T, h_nD)
        ctx.save_for_backward(grad_h_ND, grad_head_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(sums)
        return (sums[0] / denominator).to(wide), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # in place, to save a copy as large as the head: autograd itself refuses a second backward pass over changed tensors
        grad_h_ND, grad_head_VD = ctx.saved_tensors
        grad_head = None if grad_head_VD is None else grad_head_VD.mul_(grads[0]).to(ctx.head_dtype)
        return grad_h_ND.mul_(grads[0]), grad_head, None, None, None, None


class HeadLoss(NamedTuple):
    """``loss``: differentiable, already divided. The sums over tokens are in nats, at tau = 1, on the device."""

    loss: Tensor
    ce_sum: Tensor
    kl_sum: Tensor


def head_loss(
    h_ND: Tensor,
    head_VD: Tensor,
    label_N: Tensor,
    targets: TeacherTargets | TopTargets | None,
    objective: ObjectiveConfig,
    denominator: float,
) -> HeadLoss:
    """The objective of N tokens over ``denominator``, with gradients for ``h_ND`` and ``head_VD``.

    Args:
        h_ND: student hidden states; head_VD: student head; label_N: the next token of each.
        targets: the teacher's, or None for cross-entropy alone (then alpha is ignored).
        denominator: number of target tokens in the global batch, whatever part of it these N are.

    Raises:
        UserError: teacher and student heads disagree on the vocabulary; top targets with a temperature.
    """
    if isinstance(targets, TopTargets) and objective.tau != 1.0:
        raise UserError(f"objective.tau={objective.tau}: the most probable tokens are kept for tau=1 only")
    if isinstance(targets, TeacherTargets) and len(targets.head_VD) != len(head_VD):
        raise UserError(
            f"teacher head has {len(targets.head_VD)} rows, student head {len(head_VD)}: not one vocabulary"
        )
    loss, sums = _HeadLoss.apply(h_ND, head_VD, label_N, targets, objective, denominator)
    return HeadLoss(loss, sums[1], sums[2])
