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

from depthgrow.architecture import Architecture
from depthgrow.config import fingerprint, to_dict
from depthgrow.data.batches import MicroBatch
from depthgrow.data.classes import TokenClasses
from depthgrow.files import UserError, sha256_file
from depthgrow.head_loss import TeacherTargets


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
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(f"teacher {str(source)!r} cannot be loaded: {reason}") from None
        if getattr(config, "auto_map", None):
            raise UserError(
                f"teacher {str(source)!r} needs code of its own (auto_map in its config), which is never run"
            )
        rows, used = config.vocab_size, len(tokenizer)
        if used > rows:
            raise UserError(
                f"teacher {str(source)!r}: its tokenizer has {used} tokens but the model only {rows} rows; "
                "they do not belong together"
            )
        arch = Architecture.from_hf(config, vocab_size=used)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
            model, loading = loaded
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(f"teacher {str(source)!r}: weights cannot be loaded: {reason}") from None
        absent = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
        if absent:
            raise UserError(
                f"teacher {str(source)!r}: {len(absent)} tensors are missing or misshapen, first {absent[0]}"
            )
        model.requires_grad_(False).eval().to(device)
        return cls(model, tokenizer, arch, fingerprint([to_dict(arch), _weights_hash(model, source)]))

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

    @torch.no_grad()
    def hidden(self, ids_N: Tensor, lengths: list[int]) -> Tensor:
        """Final-normed hidden states of documents laid end to end. Right padding needs no mask under causal attention."""
        if not lengths:
            return self.head_VD.new_empty(0, self.arch.hidden_size)
        ids_BT = torch.nn.utils.rnn.pad_sequence(list(ids_N.split(lengths)), batch_first=True)
        hidden_BTD = self.model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return torch.cat([row_TD[:n] for row_TD, n in zip(hidden_BTD, lengths, strict=True)])

    def targets(self, batch: MicroBatch) -> TeacherTargets:
        return TeacherTargets(self.hidden(batch.ids_N, batch.lengths), self.head_VD)


def _weights_hash(model: Any, source: str | Path) -> str:
    """Of the weight files of a local folder; of the tensors themselves for anything else."""
    digest = hashlib.sha256()
    files = sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    if files:
        for path in files:
            digest.update(sha256_file(path).encode())
    else:
        for name, value in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
