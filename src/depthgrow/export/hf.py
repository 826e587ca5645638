"""Writing a student as a folder that plain ``transformers`` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from depthgrow.student import Student


def hf_state(student: Student) -> dict[str, Tensor]:
    """The student's tensors under Hugging Face's names."""
    return {
        (name if name.startswith("lm_head") else f"model.{name}"): value.detach()
        for name, value in student.named_parameters()
    }


def save_hf(student: Student, tokenizer: Any, folder: Path, *, dtype: torch.dtype) -> None:
    """A pre student as its teacher family's own class with fewer layers: no custom code."""
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = student.arch.to_hf(len(student.layers), **ids)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(hf_state(student))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
