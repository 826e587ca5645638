"""What a decoder layer is made of, read from a Hugging Face config and written back to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from depthgrow.files import UserError

FAMILIES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}

# Position scalings whose angles do not depend on the length of the input; the others cannot be a fixed table.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Fields that change logits or hidden states in a way this stack does not compute: refused unless neutral.
NEUTRAL = {
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sub-layers of one decoder layer and the vocabulary around them (sizes in elements).

    ``num_layers`` is the teacher's own depth; a student's depth is its ``StudentConfig``'s.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 32768
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(f"architecture family {self.family!r} is not supported (known: {', '.join(FAMILIES)})")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")

    @classmethod
    def from_hf(cls, config: PreTrainedConfig, *, vocab_size: int | None = None) -> Architecture:
        """Read a teacher's config; refuse what the stack could not compute exactly.

        Args:
            vocab_size: number of tokens really in use; rows beyond it are padding and are dropped.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(
                f"model_type {family!r} is not supported: give a teacher of the {', '.join(sorted(FAMILIES))} families"
            )
        for name, neutral in NEUTRAL.items():
            value = getattr(config, name, neutral)
            if value not in (neutral, None):
                raise UserError(f"the teacher's config sets {name}={value!r}, which a student cannot honour")
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise UserError("the teacher's layer_types include sliding-window attention, which a student cannot honour")
        if config.hidden_act != "silu":
            raise UserError(f"the teacher's hidden_act={config.hidden_act!r} is not supported, only 'silu' is")
        rope = dict(config.rope_parameters or {})
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            raise UserError(f"rope_type {rope['rope_type']!r} is not supported (known: {', '.join(ROPE_TYPES)})")
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise UserError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported, only 1.0 is")
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            family=family,
            vocab_size=vocab_size or config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            qk_norm=family == "qwen3",
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            max_positions=config.max_position_embeddings,
            rope=rope,
        )

    def to_hf(self, num_layers: int, **extra: Any) -> PreTrainedConfig:
        """The family's own config class for a model of ``num_layers`` layers of this shape, head untied."""
        values: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": dict(self.rope),
            "tie_word_embeddings": False,
            "head_dim": self.head_dim,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.family != "qwen2":
            values["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            values["mlp_bias"] = self.mlp_bias
        return FAMILIES[self.family](**values | extra)

    def layer_maps(self) -> int:
        """Elements of one decoder layer's weight matrices."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * q + 2 * kv) + 3 * self.hidden_size * self.intermediate_size

    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, its two norms included."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = (
            (q + 2 * kv) * self.qkv_bias
            + self.hidden_size * self.o_bias
            + (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        )
        return self.layer_maps() + biases + 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm

    def rope_frequencies(self) -> tuple[torch.Tensor, float]:
        """Angle per position for each pair of a head's elements, [head_dim / 2], and the factor on cos and sin."""
        kind = self.rope.get("rope_type", "default")
        if kind == "default":
            exponents_h = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            return 1.0 / self.rope["rope_theta"] ** exponents_h, 1.0
        return ROPE_INIT_FUNCTIONS[kind](self.to_hf(1), torch.device("cpu"))
