"""AdamW over named parameters, a closed-form learning rate, global-norm clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthgrow.files import UserError
from depthgrow.parallel import collected, cut_like, own_part, sharded, sum_ranks


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule. Learning rates transfer as 1 / width: 1e-4 at hidden 4096 is 3.2e-3 at 128.

    warmup_steps: steps of linear warm-up; None takes ``warmup_share`` of the schedule's length. weight_decay: of matrices
    alone; gains of norms and biases are not decayed, since zero is no neutral value of a gain. clip_norm: largest global
    norm of the gradient; None clips nothing.
    """

    peak_lr: float = 1e-4
    min_lr: float = 1e-6
    warmup_share: float = 0.015
    warmup_steps: int | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.peak_lr:
            raise UserError(f"optim.min_lr={self.min_lr} must lie between 0 and optim.peak_lr={self.peak_lr}")
        if not 0 <= self.warmup_share < 1:
            raise UserError(f"optim.warmup_share={self.warmup_share} must lie in [0, 1)")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name}={getattr(self, name)} must lie in [0, 1)")
        if not self.eps > 0:
            raise UserError(f"optim.eps={self.eps} must be positive")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"optim.clip_norm={self.clip_norm} must be positive, or none for no clipping")
        if not self.weight_decay >= 0:
            raise UserError(f"optim.weight_decay={self.weight_decay} must be >= 0")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise UserError(f"optim.warmup_steps={self.warmup_steps} must be >= 0")


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of step 0 .. num_steps-1 of a schedule: peak*(step+1)/warmup, then a cosine that ends at min_lr."""
    warmup = config.warmup_steps if config.warmup_steps is not None else round(config.warmup_share * num_steps)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - 1 - warmup)
    return config.min_lr + 0.5 * (config.peak_lr - config.min_lr) * (1 + math.cos(math.pi * min(1.0, progress)))


class NamedAdamW:
    """torch's AdamW whose state is addressed by parameter name, so that it survives growth and freezing.

    Only parameters that require a gradient are held: a frozen one has no moments and cannot decay. Of a sharded parameter
    each rank updates its own part.

    Args:
        part_of: the part of the model that a parameter's name belongs to; gradient norms are reported by part.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        part_of: Callable[[str], str] = lambda name: "all",
    ):
        self.config = config
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._parts = {name: own_part(parameter).detach() for name, parameter in self.parameters.items()}
        decayed = [self._parts[name] for name, p in self.parameters.items() if p.dim() > 1]
        others = [self._parts[name] for name, p in self.parameters.items() if p.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.peak_lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        # 1 on the device from the first loss or gradient on that was not finite: no update is made any more
        device = next(iter(self._parts.values())).device if self._parts else torch.device("cpu")
        self._diverged = torch.zeros((), device=device)
        self.groups: dict[str, list[Tensor]] = {}
        for name, part in self._parts.items():
            self.groups.setdefault(part_of(name), []).append(part)
            self.parameters[name].grad = None  # a stale gradient would be taken for the first step's

    def step(self, lr: float, loss: Tensor) -> dict[str, Tensor]:
        """Clip the global gradient norm, update, drop the gradients. Returns the norms before clipping, on the device:
        'grad_norm' of all and 'grad_norm PART' of each part.

        If ``loss`` or the norm is not finite, neither this step nor a later one changes a weight or a moment: what was
        trained until then stays to be saved, and the device is asked only when the losses are read anyway.
        """
        for name, parameter in self.parameters.items():
            self._parts[name].grad = None if parameter.grad is None else own_part(parameter.grad)
            parameter.grad = None
        norms = torch.stack(
            [nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]) for held in self.groups.values()]
        )
        if sharded():
            norms = sum_ranks(norms.square()).sqrt()
        total = norms.norm()
        if self.config.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parts.values(), self.config.clip_norm, total)
        healthy = loss.isfinite() & total.isfinite()
        self._diverged = torch.maximum(self._diverged, (~healthy).to(self._diverged.dtype))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.found_inf = self._diverged  # type: ignore[attr-defined]  # what torch's GradScaler sets: the fused
        self._adamw.step()  # kernel then leaves everything as it is
        self._adamw.zero_grad(set_to_none=True)
        return {"grad_norm": total} | {
            f"grad_norm {group}": norm for group, norm in zip(self.groups, norms, strict=True)
        }

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as ``{'exp_avg.NAME': ..., 'exp_avg_sq.NAME': ..., 'step.NAME': ...}``, whole, on rank 0."""
        return collected(
            (f"{key}.{name}", value, parameter)
            for name, parameter in self.parameters.items()
            for key, value in self._adamw.state[self._parts[name]].items()
        )

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore moments by name; parameters the state does not know start without any.

        Raises:
            UserError: a moment's shape does not fit its parameter.
        """
        for name, parameter in self.parameters.items():
            if f"exp_avg.{name}" not in state:
                continue
            if state[f"exp_avg.{name}"].shape != parameter.shape:
                raise UserError(f"optimizer state of {name} has shape {tuple(state[f'exp_avg.{name}'].shape)}")
            moments = {key: cut_like(state[f"{key}.{name}"], parameter) for key in ("exp_avg", "exp_avg_sq")}
            moments["step"] = state[f"step.{name}"]
            # copies, and the step too on the device: the fused kernel wants it there
            self._adamw.state[self._parts[name]] = {k: v.clone().to(parameter.device) for k, v in moments.items()}
