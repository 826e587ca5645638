"""Exported folders against our own logits, in processes that do not have depthgrow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import HF_CONFIGS, random_model
from depthgrow.architecture import Architecture
from depthgrow.export.hf import hf_state, save_hf
from depthgrow.files import UserError
from depthgrow.student import Student, StudentConfig

# Loads a folder with depthgrow made unimportable; prints nothing, writes logits and generated ids.
LOADER = """
import sys, torch
sys.modules["depthgrow"] = None
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder, trust = sys.argv[1], sys.argv[2] == "trust"
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust).eval()
ids = load_file(folder + "/../ids.safetensors")["ids"]
with torch.no_grad():
    logits = model(ids).logits
    cached = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)
    first = model(ids[:, :5], use_cache=True)
    key = "cache" if hasattr(first, "cache") else "past_key_values"
    second = model(ids[:, 5:], **{key: getattr(first, key)})
steps = torch.cat([first.logits, second.logits], 1)
result = {"logits": logits.float(), "cached": cached, "plain": plain, "steps": steps.contiguous()}
save_file(result, folder + "/../out.safetensors")
"""


def random_student(name, placement):
    model = random_model(HF_CONFIGS[name])
    student = Student(StudentConfig(layers_per_block=1), Architecture.from_hf(model.config), placement, seed=0)
    student.append_blocks(3)
    state = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    student.load_state_dict(state, strict=True)
    with torch.no_grad():
        student.lm_head.weight.add_(0.01)  # untied: differs from the embedding even for a tied teacher
    return student


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_exported_logits_equal_ours_and_generation_with_cache_equals_without(tmp_path, shared, name, placement):
    student = random_student(name, placement)
    folder = tmp_path / "model"
    save_hf(student, shared.tokenizer, folder, dtype=torch.float32, card="# card\n")
    ids = torch.randint(0, 300, (2, 11), generator=torch.Generator().manual_seed(2))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    trust = "trust" if placement == "post" else "plain"
    result = subprocess.run(
        [sys.executable, "-c", LOADER, str(folder), trust],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    out = load_file(tmp_path / "out.safetensors")
    with torch.no_grad():
        ours = (student(ids.flatten(), [11, 11]) @ student.lm_head.weight.T).view(2, 11, -1)
    torch.testing.assert_close(out["logits"], ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out["steps"], ours, rtol=1e-4, atol=1e-4)
    assert torch.equal(out["cached"], out["plain"])
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["num_hidden_layers"] == 3
    assert (folder / "tokenizer.json").exists()
    assert (folder / "README.md").read_text() == "# card\n"
    assert (folder / "modeling_depthgrow.py").exists() == (placement == "post")


def test_a_wrong_wiring_would_be_seen(shared, tmp_path):
    """The same tensors under the other placement give other logits: the comparison above can fail."""
    pre, post = random_student("qwen3", "pre"), random_student("qwen3", "post")
    ids = torch.arange(9)
    with torch.no_grad():
        assert (pre(ids, [9]) - post(ids, [9])).abs().max() > 0.1


def test_blocks_land_under_their_own_names(shared, tmp_path):
    student = random_student("qwen2", "pre")
    save_hf(student, shared.tokenizer, tmp_path / "m", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    theirs = model.state_dict()
    for name, value in hf_state(student).items():
        assert torch.equal(theirs[name], value), name


def test_bfloat16_export_is_the_rounded_student(shared, tmp_path):
    student = random_student("llama", "pre")
    save_hf(student, shared.tokenizer, tmp_path / "m", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["lm_head.weight"], student.lm_head.weight.to(torch.bfloat16))


def test_a_folder_with_something_in_it_is_left_alone(shared, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        save_hf(random_student("llama", "pre"), shared.tokenizer, tmp_path, dtype=torch.float32)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
