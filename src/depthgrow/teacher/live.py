"""A frozen Hugging Face teacher that computes its targets on demand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import find_adapter_config_file

from depthgrow.architecture import Architecture
from depthgrow.config import fingerprint, to_dict
from depthgrow.data.batches import MicroBatch
from depthgrow.data.classes import TokenClasses
from depthgrow.data.tokens import vocabulary_size
from depthgrow.files import UserError
from depthgrow.head_loss import TeacherTargets
from depthgrow.runtime import Stopped

DERIVED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")  # buffers that old files carry


@dataclass
class LiveTeacher:
    """The teacher's model, tokenizer and shapes. Vocabulary rows that no token uses are dropped, from head and embedding.

    fingerprint: what tells this teacher from another: its shapes and its weights.
    """

    model: Any
    tokenizer: Any
    arch: Architecture
    fingerprint: str

    @classmethod
    def load(cls, source: str | Path, dtype: torch.dtype, device: torch.device) -> LiveTeacher:
        """A local folder or a hub name of a Llama, Qwen2 or Qwen3 model.

        Raises:
            UserError: it cannot be found, is of another family, or its tokenizer does not fit.
        """
        where = f"teacher {str(source)!r}"
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Stopped:
            raise
        except Exception as error:  # damaged files make the libraries raise many kinds
            raise UserError(f"{where} cannot be loaded: {_short(error)}") from None
        if getattr(config, "auto_map", None):
            raise UserError(f"{where} needs code of its own (auto_map in its config), which is never run")
        if find_adapter_config_file(str(source)) is not None:
            raise UserError(
                f"{where} has an adapter beside its weights; merge it into them first (peft: merge_and_unload)"
            )
        quantised = getattr(config, "quantization_config", None)
        if quantised is not None:
            method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised.quant_method
            raise UserError(
                f"{where} is quantised ({method}); save it with its weights in bfloat16 or float32 first"
                " (model.dequantize() in transformers)"
            )
        rows, used = config.vocab_size, vocabulary_size(tokenizer)
        if used > rows:
            raise UserError(
                f"{where}: its tokenizer has ids up to {used - 1} but the model only {rows} rows; "
                "they do not belong together"
            )
        arch = Architecture.from_hf(config, vocab_size=used)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
            model, loading = loaded
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            raise UserError(f"{where}: weights cannot be loaded: {_short(error)}") from None
        absent = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
        if absent:
            raise UserError(f"{where}: {len(absent)} tensors are missing or misshapen, first {absent[0]}")
        unused = sorted(name for name in loading["unexpected_keys"] if not name.endswith(DERIVED))
        if unused:
            raise UserError(
                f"{where}: {len(unused)} tensors in its files have no place in the model that its config describes, first "
                f"{unused[0]}; config and weights do not belong together"
            )
        broken = next((name for name, p in model.named_parameters() if not p.isfinite().all()), None)
        if broken is not None:
            raise UserError(f"{where}: tensor {broken} has values that are not finite; the file is damaged")
        model.requires_grad_(False).eval()
        found = fingerprint([to_dict(arch), _weights_hash(model)])
        return cls(model.to(device), tokenizer, arch, found)

    @property
    def head_VD(self) -> Tensor:
        return self.model.get_output_embeddings().weight[: self.arch.vocab_size]

    @cached_property
    def classes(self) -> TokenClasses:
        """Which of its tokens are special, and which only separate words."""
        return TokenClasses.of(self.tokenizer, self.arch.vocab_size)

    @property
    def initial(self) -> dict[str, Any]:
        """What a student takes over; the tensors are copies, so that training the head leaves a tied embedding alone."""
        embedding_VD = self.model.get_input_embeddings().weight[: self.arch.vocab_size]
        return {
            "embedding_VD": embedding_VD.clone(),
            "head_VD": self.head_VD.clone(),
            "norm_D": self.model.model.norm.weight.clone(),
            "special_ids": self.classes.special_ids,
        }

    @property
    def padding(self) -> tuple[Tensor, Tensor]:
        """The rows of embedding and head that no token uses."""
        layers = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding_RD, head_RD = (layer.weight[self.arch.vocab_size :].detach() for layer in layers)
        return embedding_RD, head_RD

    @torch.no_grad()
    def hidden(self, ids_N: Tensor, lengths: list[int]) -> Tensor:
        """Final-normed hidden states of documents laid end to end. Right padding needs no mask under causal attention."""
        if not any(lengths):
            return self.head_VD.new_empty(0, self.arch.hidden_size)
        ids_BT = torch.nn.utils.rnn.pad_sequence(list(ids_N.split(lengths)), batch_first=True)
        hidden_BTD = self.model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return torch.cat([row_TD[:n] for row_TD, n in zip(hidden_BTD, lengths, strict=True)])

    def targets(self, batch: MicroBatch) -> TeacherTargets:
        return TeacherTargets(self.hidden(batch.ids_N, batch.lengths), self.head_VD)


def _weights_hash(model: Any) -> str:
    """Of the tensors as they were loaded, so that one model has one hash in whatever files it came."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
