"""The student: a stack of decoder layers in blocks, whose norms sit where the placement puts them.

    ids_N -> embedding -> [entry norm] -> layer 0 .. layer active*L-1 -> [final norm] -> h_ND   (the head is the loss's)

Shapes: N tokens of all documents laid end to end (there is no padding), T tokens of one document, D hidden size,
H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from depthgrow.architecture import Architecture
from depthgrow.files import UserError, unknown
from depthgrow.head_loss import HeadLoss, ObjectiveConfig, TeacherTargets, TopTargets, head_loss
from depthgrow.interventions import INTERVENTIONS
from depthgrow.runtime import keyed_generator

varlen_attn: Any = None
with suppress(ImportError):
    from torch.nn.attention.varlen import varlen_attn
# a torch older than the kernel, or than its present options, attends one document at a time
VARIABLE_LENGTH = varlen_attn is not None and {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys()


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """Depth and initialisation of a student. Its sub-layers are the teacher's, its norm placement is the arm's.

    boundary_scale: c of the interventions that set a scale (see `depthgrow.interventions`).
    init_gain: every linear map is drawn from normal(0, init_gain / sqrt(hidden_size)). 1.28 is the gain that the
    study's normal(0, 0.02) has at hidden size 4096; a plain 0.02 at small width would shrink every sub-layer's output.
    """

    num_blocks: int = 3
    layers_per_block: int = 3
    init_gain: float = 1.28
    freeze_embedding: bool = True
    boundary_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "layers_per_block"):
            if getattr(self, name) < 1:
                raise UserError(f"student.{name}={getattr(self, name)} must be at least 1")
        if self.init_gain <= 0:
            raise UserError(f"student.init_gain={self.init_gain} must be positive")


class Layout:
    """Where documents laid end to end begin and end, and the rotary tables of their positions."""

    def __init__(self, lengths: Sequence[int], cos_Td: Tensor, sin_Td: Tensor):
        self.lengths = list(lengths)
        if max(lengths, default=0) > len(cos_Td):
            raise UserError(
                f"a document of {max(lengths)} tokens exceeds the model's {len(cos_Td)} positions; lower data.max_tokens"
            )
        position_N = torch.cat([torch.arange(n) for n in (*lengths, 0)]).to(cos_Td.device, non_blocking=True)
        self.first_N = position_N == 0
        self.ends_B = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(cos_Td.device, non_blocking=True)
        self.cos_N1d = cos_Td[position_N].unsqueeze(1)
        self.sin_N1d = sin_Td[position_N].unsqueeze(1)

    @torch.compiler.disable  # a compiled layer would be specialised to one list of lengths
    def attend(self, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, causal, inside each document: [N, H * d].

        One call a document: on a CPU mostly faster than one right-padded rectangle, and without its copies. On a GPU, where
        products are in half precision, one call of torch's variable-length kernel for all of them.
        """
        grouped = q_NHd.shape[1] != k_NGd.shape[1]
        half = v_NGd.dtype in (torch.bfloat16, torch.float16)
        if q_NHd.is_cuda and half and self.lengths and VARIABLE_LENGTH:
            return self.attend_at_once(q_NHd, k_NGd, v_NGd)
        if not self.lengths:  # a rank without documents: every parameter still gets its gradient, which is zero
            return q_NHd.flatten(1) + (k_NGd.sum() + v_NGd.sum())
        mixed = []
        for q_THd, k_TGd, v_TGd in zip(*(x.split(self.lengths) for x in (q_NHd, k_NGd, v_NGd)), strict=True):
            q_1HTd, k_1GTd, v_1GTd = (x.transpose(0, 1).unsqueeze(0) for x in (q_THd, k_TGd, v_TGd))
            out_1HTd = F.scaled_dot_product_attention(q_1HTd, k_1GTd, v_1GTd, is_causal=True, enable_gqa=grouped)
            mixed.append(out_1HTd.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(mixed)

    def attend_at_once(self, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor) -> Tensor:
        """The same by torch's variable-length kernel, in the dtype of v (q and k were rotated by float32 tables)."""
        q_NHd, k_NGd, longest = q_NHd.to(v_NGd.dtype), k_NGd.to(v_NGd.dtype), max(self.lengths)
        bounds = (self.ends_B, self.ends_B, longest, longest)
        grouped = q_NHd.shape[1] != k_NGd.shape[1]
        causal = {"window_size": (-1, 0), "enable_gqa": grouped}
        return varlen_attn(q_NHd, k_NGd, v_NGd.contiguous(), *bounds, **causal).flatten(1)

    def rotate(self, x_NHd: Tensor) -> Tensor:
        """Rotary position embedding: each pair (x_i, x_{i+d/2}) is turned by its position's angle.

        The table of sines carries the sign of the pair's other half, so that halves only change places.
        """
        return torch.addcmul(x_NHd * self.cos_N1d, x_NHd.roll(x_NHd.shape[-1] // 2, -1), self.sin_N1d)


class _UnitRMS(torch.autograd.Function):
    """y = x r with r = 1 / sqrt(mean(x^2) + eps); dL/dx = r (g - y mean(g y)) for g = dL/dy.

    For CPUs, where ``F.rms_norm`` is five operations and three tensors of x's size: with this a small step is 3 % faster
    (benchmarks/layer.py).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, r = ctx.saved_tensors
        dot = (grads[0] * y).sum(-1, keepdim=True)
        return torch.addcmul(grads[0], y, dot, value=-1 / y.shape[-1]).mul_(r), None


class RMSNorm(nn.Module):
    """w * (x / sqrt(mean(x^2) + eps)): normalised in float32, rounded to x's dtype, then scaled (Hugging Face's order)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        unit = F.rms_norm(wide, self.weight.shape, eps=self.eps) if x.is_cuda else _UnitRMS.apply(wide, self.eps)
        return self.weight * unit.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal self-attention: softmax(q k^T / sqrt(d)) v, rotary positions, optional q/k norm and biases."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.head_dim = arch.head_dim
        query, key = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.hidden_size, query, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(arch.hidden_size, key, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(arch.hidden_size, key, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(query, arch.hidden_size, bias=arch.o_bias)
        self.q_norm: nn.Module = RMSNorm(arch.head_dim, arch.rms_norm_eps) if arch.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(arch.head_dim, arch.rms_norm_eps) if arch.qk_norm else nn.Identity()

    def project(self, h_ND: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: q_NHd, k_NGd, v_NGd."""
        q_NHd = layout.rotate(self.q_norm(self.q_proj(h_ND).unflatten(-1, (-1, self.head_dim))))
        k_NGd = layout.rotate(self.k_norm(self.k_proj(h_ND).unflatten(-1, (-1, self.head_dim))))
        v_NGd = self.v_proj(h_ND).unflatten(-1, (-1, self.head_dim))
        return q_NHd, k_NGd, v_NGd

    def forward(self, h_ND: Tensor, layout: Layout) -> Tensor:
        return self.o_proj(layout.attend(*self.project(h_ND, layout)))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)

    def forward(self, h_ND: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h_ND)) * self.up_proj(h_ND))


class DecoderLayer(nn.Module):
    """Attention, MLP and two norms under Hugging Face's parameter names; the placement says how they are wired."""

    def __init__(self, arch: Architecture, placement: str):
        super().__init__()
        self.self_attn = Attention(arch)
        self.mlp = MLP(arch)
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.wiring = PLACEMENTS[placement].forward

    def forward(self, h_ND: Tensor, layout: Layout) -> Tensor:
        return self.wiring(self, h_ND, layout)


def pre(layer: DecoderLayer, h_ND: Tensor, layout: Layout) -> Tensor:
    # x + f(n(x)), for f = attention, then f = MLP
    h_ND = h_ND + layer.self_attn(layer.input_layernorm(h_ND), layout)
    return h_ND + layer.mlp(layer.post_attention_layernorm(h_ND))


def post(layer: DecoderLayer, h_ND: Tensor, layout: Layout) -> Tensor:
    # n(x + f(x)), for f = attention, then f = MLP
    h_ND = layer.input_layernorm(h_ND + layer.self_attn(h_ND, layout))
    return layer.post_attention_layernorm(h_ND + layer.mlp(h_ND))


class Head(nn.Linear):
    """The language-model head. Calling it gives the loss: no logits leave it."""

    def forward(  # type: ignore[override]  # FSDP gathers the weight around calls, so the loss must be one
        self,
        h_ND: Tensor,
        label_N: Tensor,
        targets: TeacherTargets | TopTargets | None,
        objective: ObjectiveConfig,
        denominator: float,
    ) -> HeadLoss:
        return head_loss(h_ND, self.weight, label_N, targets, objective, denominator)


@dataclass(frozen=True)
class Placement:
    """Where a layer's norms sit (``forward``) and where the one boundary norm does: 'final' or 'entry'."""

    forward: Callable[[DecoderLayer, Tensor, Layout], Tensor]
    boundary: str


PLACEMENTS = {"pre": Placement(pre, "final"), "post": Placement(post, "entry")}


class Student(nn.Module):
    """``active`` blocks of ``layers_per_block`` layers between a frozen copied embedding and a trained copied head.

    Every fresh tensor is drawn from a generator keyed by (seed, parameter name): a block starts identical in every
    arm, whenever it is appended.

    Args:
        intervention: what is done to the stream entering every block but the first; None for nothing.
        embedding_VD, head_VD, norm_D: the teacher's tensors to start from; None draws them (training from scratch).
        special_ids: tokens that, with each document's first, count as structural.
    """

    def __init__(
        self,
        config: StudentConfig,
        arch: Architecture,
        placement: str,
        intervention: str | None = None,
        *,
        seed: int,
        embedding_VD: Tensor | None = None,
        head_VD: Tensor | None = None,
        norm_D: Tensor | None = None,
        special_ids: Sequence[int] = (),
    ):
        super().__init__()
        if placement not in PLACEMENTS:
            raise unknown("placement", placement, PLACEMENTS)
        if intervention is not None and intervention not in INTERVENTIONS:
            raise unknown("intervention", intervention, INTERVENTIONS)
        self.config, self.arch, self.seed = config, arch, seed
        self.placement, self.intervention = placement, intervention
        self.special_ids = torch.tensor(list(special_ids), dtype=torch.long)
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList()
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.lm_head = Head(arch.hidden_size, arch.vocab_size, bias=False)
        self._draw(self)
        with torch.no_grad():
            for parameter, source in (
                (self.embed_tokens.weight, embedding_VD),
                (self.lm_head.weight, head_VD),
                (self.norm.weight, norm_D),
            ):
                if source is not None:
                    parameter.copy_(source)
        self.embed_tokens.weight.requires_grad_(not config.freeze_embedding)
        frequency_h, self._rope_factor = arch.rope_frequencies()
        self.rope_frequency_h = frequency_h
        self._rope: tuple[Tensor, Tensor] | None = None

    @property
    def active_blocks(self) -> int:
        return len(self.layers) // self.config.layers_per_block

    def append_blocks(self, active: int) -> None:
        """Append fresh blocks until ``active`` of them are there, on the embedding's device and dtype."""
        weight = self.embed_tokens.weight
        while self.active_blocks < active:
            for _ in range(self.config.layers_per_block):
                layer = DecoderLayer(self.arch, self.placement)
                self._draw(layer, f"layers.{len(self.layers)}.")
                self.layers.append(layer.to(weight.device, weight.dtype))

    @torch.no_grad()
    def _draw(self, module: nn.Module, prefix: str = "") -> None:
        std = self.config.init_gain / self.arch.hidden_size**0.5
        for name, parameter in module.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, std, generator=keyed_generator(self.seed, prefix + name))

    def block_parameters(self, block: int) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of one block, in order."""
        first = block * self.config.layers_per_block
        for index in range(first, first + self.config.layers_per_block):
            yield from self.layers[index].named_parameters(prefix=f"layers.{index}")

    def part_of(self, name: str) -> str:
        """The part of the model that a parameter's name belongs to: 'embedding', 'block 0' .., 'boundary norm' or 'head'."""
        if name.startswith("layers."):
            return f"block {int(name.split('.')[1]) // self.config.layers_per_block}"
        return {"embed_tokens.weight": "embedding", "norm.weight": "boundary norm", "lm_head.weight": "head"}[name]

    def layout(self, lengths: Sequence[int]) -> Layout:
        """Documents of these lengths (in tokens), with their rotary tables."""
        longest = max(lengths, default=0)
        weight = self.norm.weight
        if self._rope is None or len(self._rope[0]) < longest or self._rope[0].device != weight.device:
            size = min(self.arch.max_positions, max(longest, 512 if self._rope is None else 2 * len(self._rope[0])))
            angle_Th = torch.outer(
                torch.arange(size, device=weight.device).float(), self.rope_frequency_h.to(weight.device)
            )
            cos_Th, sin_Th = (f(angle_Th) * self._rope_factor for f in (torch.cos, torch.sin))
            tables = torch.cat((cos_Th, cos_Th), dim=-1), torch.cat((-sin_Th, sin_Th), dim=-1)
            self._rope = (tables[0].to(weight.dtype), tables[1].to(weight.dtype))
        return Layout(lengths, *self._rope)

    def forward(
        self, ids_N: Tensor, lengths: Sequence[int], *, first: int = 0, stream_ND: Tensor | None = None
    ) -> Tensor:
        """Hidden states h_ND whose product with ``lm_head.weight`` is the logits.

        Args:
            first, stream_ND: go on before layer ``first`` with this residual stream, instead of from the embedding.
        """
        layout = self.layout(lengths)
        entry = PLACEMENTS[self.placement].boundary == "entry"
        h_ND = self.embed_tokens(ids_N) if stream_ND is None else stream_ND
        if entry and stream_ND is None:
            h_ND = self.norm(h_ND)
        structural_N = layout.first_N
        if self.intervention is not None:
            self.special_ids = self.special_ids.to(ids_N.device)
            structural_N = structural_N | torch.isin(ids_N, self.special_ids)
        for index in range(first, len(self.layers)):
            if self.intervention is not None and index and index % self.config.layers_per_block == 0:
                h_ND = INTERVENTIONS[self.intervention](h_ND, structural_N, self.config.boundary_scale)
            h_ND = self.layers[index](h_ND, layout)
        return h_ND if entry else self.norm(h_ND)
