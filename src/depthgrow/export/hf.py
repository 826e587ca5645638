"""Writing a student as a folder that plain ``transformers`` loads, and reading one back for comparison.

A pre student is its teacher family's own class with fewer layers. A post student is that class with the norms moved,
defined in one self-contained file beside the weights (loaded with ``trust_remote_code=True``, depthgrow not needed).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from depthgrow.checkpoint import save_tensors
from depthgrow.files import UserError, require_space, whole_folder, write_atomic
from depthgrow.student import PLACEMENTS, Student

TEMPLATE = Path(__file__).parent / "modeling_post.py.txt"
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def hf_state(student: Student) -> dict[str, Tensor]:
    """The student's tensors under the names of the Hugging Face model they go into."""
    entry = PLACEMENTS[student.placement].boundary == "entry"
    state = {}
    for name, value in student.named_parameters():
        if name.startswith("lm_head"):
            state[name] = value.detach()
        elif name == "norm.weight" and entry:
            state["model.entry_norm.weight"] = value.detach()
        else:
            state[f"model.{name}"] = value.detach()
    return state


def save_hf(student: Student, tokenizer: Any, folder: Path, *, dtype: torch.dtype, card: str | None = None) -> None:
    """Write ``folder``: config.json, model.safetensors, tokenizer files, and a model card and modelling file if needed.

    Raises:
        UserError: the folder exists and is not empty, or the student has no Hugging Face form.
    """
    if folder.resolve() == Path.cwd():
        raise UserError(f"{folder} is the folder you are in; name one to be made in it, for example --to my-model")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty; choose another folder or delete it")
    if student.placement not in ("pre", "post"):
        raise UserError(f"placement {student.placement!r} cannot be exported yet, only pre and post")
    if student.intervention is not None and student.active_blocks > 1:
        raise UserError(
            f"a student with intervention {student.intervention!r} cannot be exported: no model class has it"
        )
    arch = student.arch
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = arch.to_hf(len(student.layers), pad_token_id=tokenizer.pad_token_id, dtype=dtype, **ids)
    config.architectures = [f"{CLASSES[arch.family]}ForCausalLM"]
    weights = {name: value.to("cpu", dtype).contiguous().clone() for name, value in hf_state(student).items()}
    require_space(folder.parent, sum(w.nbytes for w in weights.values()), "the exported model")
    with whole_folder(folder, replace=False) as scratch:
        if student.placement == "post":
            config.architectures = ["PostNormForCausalLM"]
            config.auto_map = {"AutoModelForCausalLM": "modeling_depthgrow.PostNormForCausalLM"}
            config.placement = student.placement
            source = TEMPLATE.read_text().replace("FAMILY", arch.family).replace("Family", CLASSES[arch.family])
            write_atomic(scratch / "modeling_depthgrow.py", source)
        config.save_pretrained(scratch)
        save_tensors(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)
        tokenizer.save_pretrained(scratch)
        GenerationConfig(pad_token_id=tokenizer.pad_token_id, **ids).save_pretrained(scratch)
        if card is not None:
            write_atomic(scratch / "README.md", card)
