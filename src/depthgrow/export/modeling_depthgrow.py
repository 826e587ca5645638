"""A causal language model whose norms sit after the residual sums (post-norm), around a known family's sub-layers.

    h0 = n(embedding);   each layer:  h = n1(h + attention(h));  h = n2(h + mlp(h));   no final norm

Attention and MLP are those of the family that the config names (llama, qwen2 or qwen3). Needs nothing but torch and
transformers, 4.51 or newer: this file goes beside the weights and is loaded with ``trust_remote_code=True``.
"""

import importlib

import transformers
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model, Qwen3RMSNorm

CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LAYERS_RETURN_TUPLES = tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (4, 54)


class DepthgrowConfig(Qwen3Config):
    """Qwen3's config, which holds what the other families' have, and what it does not hold: the family, its MLP's biases and
    the placement of the norms."""

    model_type = "depthgrow"

    def __init__(self, family="qwen3", placement="post", mlp_bias=False, **kwargs):
        if family not in CLASSES or placement != "post":
            raise ValueError(f"family {family!r} with placement {placement!r} is not one this file computes")
        self.family, self.placement, self.mlp_bias = family, placement, mlp_bias
        super().__init__(**kwargs)


class DepthgrowDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        family = importlib.import_module(f"transformers.models.{config.family}.modeling_{config.family}")
        name = CLASSES[config.family]
        self.self_attn = getattr(family, f"{name}Attention")(config, layer_idx)
        self.mlp = getattr(family, f"{name}MLP")(config)
        # of the first layer, so that hidden_states[0] is the embedding, as everywhere in transformers
        self.entry_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if layer_idx == 0 else nn.Identity()

    def forward(self, hidden_states, **kwargs):
        hidden_states = self.entry_norm(hidden_states)
        attended, weights = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = self.input_layernorm(hidden_states + attended)
        hidden_states = self.post_attention_layernorm(hidden_states + self.mlp(hidden_states))
        if not LAYERS_RETURN_TUPLES:
            return hidden_states
        return (hidden_states, weights) if kwargs.get("output_attentions") else (hidden_states,)


class DepthgrowModel(Qwen3Model):
    config_class = DepthgrowConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([DepthgrowDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.Identity()
        self.post_init()


class DepthgrowForCausalLM(Qwen3ForCausalLM):
    config_class = DepthgrowConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = DepthgrowModel(config)
        self.post_init()
