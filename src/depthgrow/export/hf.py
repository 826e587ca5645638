"""Writing a student as a folder that plain ``transformers`` loads, and reading one back for comparison.

A pre student is its teacher family's own class with fewer layers. A post student has a model type of its own, ``depthgrow``,
whose classes lie in one self-contained file beside the weights: loading without that file's code
(``trust_remote_code=True``) is refused, and where `depthgrow.export` is imported its registered classes are used.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from depthgrow.checkpoint import save_tensors
from depthgrow.export import modeling_depthgrow
from depthgrow.export.modeling_depthgrow import DepthgrowConfig
from depthgrow.files import UserError, read_json, require_space, whole_folder, write_atomic, write_json
from depthgrow.student import PLACEMENTS, Student

CODE = Path(modeling_depthgrow.__file__)
CLASSES = modeling_depthgrow.CLASSES


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Ids that every training document began and ended with: an export is to be used as its model was trained."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


def hf_state(student: Student) -> dict[str, Tensor]:
    """The student's tensors under the names of the Hugging Face model they go into."""
    entry = PLACEMENTS[student.placement].boundary == "entry"
    state = {}
    for name, value in student.named_parameters():
        if name.startswith("lm_head"):
            state[name] = value.detach()
        elif name == "norm.weight" and entry:
            state["model.layers.0.entry_norm.weight"] = value.detach()
        else:
            state[f"model.{name}"] = value.detach()
    return state


def save_hf(
    student: Student,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    boundaries: Boundaries | None = None,
    padding: tuple[Tensor, Tensor] | None = None,
    card: str | None = None,
) -> None:
    """Write ``folder``: config.json, model.safetensors, tokenizer files, and a model card and modelling file if needed.

    Args:
        boundaries: what documents began and ended with in training; None takes the tokenizer's own.
        padding: further rows for embedding and head, the teacher's that no token uses, so that the student has its teacher's
            number of rows and can draft for it.

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
    weights = {name: value.to("cpu", dtype).contiguous().clone() for name, value in hf_state(student).items()}
    if padding is not None:
        for name, rows in zip(("model.embed_tokens.weight", "lm_head.weight"), padding, strict=True):
            weights[name] = torch.cat([weights[name], rows.to("cpu", dtype)])
    tokenizer = used_as_trained(tokenizer, boundaries)
    ids = special_ids(tokenizer, boundaries)
    config = student.arch.to_hf(
        len(student.layers),
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
        **ids,
        vocab_size=len(weights["lm_head.weight"]),
    )
    config.architectures = [f"{CLASSES[student.arch.family]}ForCausalLM"]
    require_space(folder.parent, sum(w.nbytes for w in weights.values()), "the exported model")
    with whole_folder(folder, replace=False) as scratch:
        config.save_pretrained(scratch)
        _complete_config(scratch / "config.json", student)
        if student.placement == "post":
            shutil.copyfile(CODE, scratch / CODE.name)
        save_tensors(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)
        _save_tokenizer(tokenizer, scratch)
        GenerationConfig(pad_token_id=tokenizer.pad_token_id, **ids).save_pretrained(scratch)
        if card is not None:
            write_atomic(scratch / "README.md", card)


def _complete_config(path: Path, student: Student) -> None:
    """What the config class does not write: the names transformers 4 reads, and a post student's own type and code."""
    config, rope = read_json(path), student.arch.rope
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": config.get("dtype")}
    config["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if student.placement == "post":
        module = CODE.stem
        config |= {
            "model_type": DepthgrowConfig.model_type,
            "family": student.arch.family,
            "placement": student.placement,
            "attention_bias": student.arch.o_bias if student.arch.family != "qwen2" else False,
            "mlp_bias": student.arch.mlp_bias,
            "architectures": ["DepthgrowForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{module}.DepthgrowConfig",
                "AutoModel": f"{module}.DepthgrowModel",
                "AutoModelForCausalLM": f"{module}.DepthgrowForCausalLM",
            },
        }
    write_json(path, config)


def special_ids(tokenizer: Any, boundaries: Boundaries | None) -> dict[str, Any]:
    """bos and eos for config and generation: what texts began and ended with in training, then the tokenizer's own end."""
    if boundaries is None:
        return {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ends = list(dict.fromkeys(i for i in (*boundaries.end[:1], tokenizer.eos_token_id) if i is not None))
    start = boundaries.start[0] if boundaries.start else tokenizer.bos_token_id
    return {"bos_token_id": start, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def used_as_trained(tokenizer: Any, boundaries: Boundaries | None) -> Any:
    """The tokenizer, or a copy that puts what training documents began with before a text, and nothing else."""
    if boundaries is None:
        return tokenizer
    plain = tokenizer("a", add_special_tokens=False).input_ids
    if tokenizer("a").input_ids == [*boundaries.start, *plain]:
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    for name in ("add_bos_token", "add_eos_token"):
        if hasattr(changed, name):
            setattr(changed, name, False)
    names = changed.convert_ids_to_tokens(list(boundaries.start))
    before = " ".join(f"{name}:0" for name in names)
    changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A:0".strip(),
        pair=f"{before} $A:0 $B:0".strip(),
        special_tokens=list(zip(names, boundaries.start, strict=True)),
    )
    return changed


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Under a class name that transformers 4 knows, too; what is loaded must give the same ids.

    Raises:
        UserError: it does not.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    text = "A text, as one writes it.\n\n1 + 1 = 2"
    if AutoTokenizer.from_pretrained(folder)(text).input_ids != tokenizer(text).input_ids:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} does not come back from its own files as it was; the export would be used "
            "otherwise than it was trained"
        )
