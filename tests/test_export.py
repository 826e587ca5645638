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


# --- an export is one model to everybody -----------------------------------------------------------------------------------

EVERY_WAY = """
import sys, torch
sys.modules["depthgrow"] = None
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
folder = sys.argv[1]
ids = load_file(folder + "/../ids.safetensors")["ids"]
found, refused = {}, []
for name, load in {
    "causal": AutoModelForCausalLM.from_pretrained,
    "model": AutoModel.from_pretrained,
    "pipeline": lambda f, trust_remote_code: pipeline("text-generation", f, trust_remote_code=trust_remote_code).model,
}.items():
    for trust in (False, True):
        try:
            model = load(folder, trust_remote_code=trust).eval()
        except (ValueError, OSError) as error:
            refused.append(f"{name} {trust}")
            continue
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        head = load_file(folder + "/model.safetensors")["lm_head.weight"]
        logits = out.logits if hasattr(out, "logits") else out.last_hidden_state @ head.T
        found[f"{name} {trust}"] = logits.float().contiguous()
        found[f"{name} {trust} embedding"] = out.hidden_states[0].contiguous()
save_file(found, folder + "/../every.safetensors")
print("refused:", ", ".join(refused))
"""


def load_every_way(folder, tmp_path, **environment):
    base = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, "-c", EVERY_WAY, str(folder)], capture_output=True, text=True, env=base | environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return load_file(tmp_path / "every.safetensors"), result.stdout


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_every_auto_class_and_pipeline_gives_our_logits_or_refuses(tmp_path, shared, placement):
    student = random_student("qwen3-yarn", placement)
    save_hf(student, shared.tokenizer, tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(0, 300, (2, 11), generator=torch.Generator().manual_seed(2))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    found, told = load_every_way(tmp_path / "model", tmp_path)
    with torch.no_grad():
        ours = (student(ids.flatten(), [11, 11]) @ student.lm_head.weight.T).view(2, 11, -1)
        embedding = student.embed_tokens(ids)
    for name, value in found.items():
        expected = embedding if name.endswith("embedding") else ours
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    trusted = {"causal True", "model True", "pipeline True"}
    if placement == "post":
        assert {name for name in found if not name.endswith("embedding")} == trusted
        assert "causal False, model False, pipeline False" in told
    else:
        assert len(found) == 12


def test_where_depthgrow_is_imported_its_classes_are_used(tmp_path, shared):
    import depthgrow.export

    student = random_student("llama-biased", "post")
    save_hf(student, shared.tokenizer, tmp_path / "m", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert type(model) is depthgrow.export.DepthgrowForCausalLM
    ids = torch.arange(9)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[None]).logits[0], student(ids, [9]) @ student.lm_head.weight.T)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.51.3", "4.57.6"])
def test_older_transformers_load_the_same_model(tmp_path_factory, tmp_path, shared, version):
    """Installed beside the present one; torch and the rest are shared. A theta far from every default shows a lost rope."""
    where = tmp_path_factory.mktemp("transformers")
    tokenizers = "tokenizers>=0.21,<0.22" if version.startswith("4.51") else "tokenizers>=0.22,<=0.23.0"
    packages = [f"transformers=={version}", "huggingface-hub>=0.30,<1.0", tokenizers]
    packages += ["requests", "urllib3", "charset-normalizer", "idna", "certifi"]  # of its hub client
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(where), *packages]
    subprocess.run(pip, check=True, capture_output=True)
    from transformers import Qwen3Config

    from conftest import LINEAR_ROPE, SIZES

    for number, (placement, rope) in enumerate(
        [
            ("pre", {"rope_type": "default", "rope_theta": 1e6}),
            ("post", {"rope_type": "default", "rope_theta": 1e6}),
            ("post", LINEAR_ROPE),
        ]
    ):
        HF_CONFIGS["theta"] = Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope)
        root = tmp_path / str(number)
        root.mkdir()
        student = random_student("theta", placement)
        del HF_CONFIGS["theta"]
        save_hf(student, shared.tokenizer, root / "model", dtype=torch.float32)
        ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(2))
        save_file({"ids": ids}, root / "ids.safetensors")
        found, told = load_every_way(root / "model", root, PYTHONPATH=str(where))
        with torch.no_grad():
            ours = (student(ids.flatten(), [40, 40]) @ student.lm_head.weight.T).view(2, 40, -1)
        named = {name: value for name, value in found.items() if not name.endswith("embedding")}
        assert {"causal True", "model True", "pipeline True"} <= named.keys(), told
        assert placement == "pre" or len(named) == 3
        for name, value in named.items():
            torch.testing.assert_close(value, ours, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


# --- it is used as it was trained ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["", "<|endoftext|>", "t"])
@pytest.mark.parametrize("end", ["", "<|endoftext|>", "."])
def test_the_tokenizer_begins_and_generation_ends_as_training_documents_did(mini, tmp_path, start, end):
    from transformers import AutoTokenizer, GenerationConfig

    from conftest import Silent, StopAt
    from depthgrow.cli import main
    from depthgrow.config import override
    from depthgrow.data.tokens import boundary_ids
    from depthgrow.prepare import prepare
    from depthgrow.runner import run_study

    study = override(mini, {"arms": ["pre-single"], "data.start_token": start, "data.end_token": end})
    prepared = prepare(study, Silent())
    first = prepared.tokens.train[0].tolist()
    run_study(study, tmp_path / "s", stop=StopAt(), listener=Silent())
    assert main(["export", str(tmp_path / "s"), "pre-single", "--to", str(tmp_path / "m")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    plain = prepared.teacher.tokenizer
    start_ids, end_ids = boundary_ids(study.data, plain)
    text = plain.decode(first[len(start_ids) : len(first) - len(end_ids) or None])
    assert tokenizer(text).input_ids == first[: len(first) - len(end_ids) or None]
    assert tokenizer(text)["input_ids"][: len(start_ids)] == start_ids
    assert plain("x").input_ids[0] == plain.eos_token_id  # the teacher's own tokenizer is left as it was
    stops = GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    assert stops == list(dict.fromkeys([*end_ids, plain.eos_token_id]))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["eos_token_id"] == (stops if len(stops) > 1 else stops[0])
    assert config["bos_token_id"] == (start_ids[0] if start_ids else plain.bos_token_id)
    card = (tmp_path / "m" / "README.md").read_text()
    assert (f"began with `{start}`" in card) is bool(start)
    assert ("no end token" in card) is (not end)


def test_generation_stops_at_the_end_it_was_trained_on(shared, tmp_path):
    """A head that makes "." certain: with it as the end of training documents, generation is over at once."""
    from depthgrow.export.hf import Boundaries

    student = random_student("qwen3", "pre")
    stop = shared.tokenizer.convert_tokens_to_ids(".")
    assert stop != shared.tokenizer.eos_token_id
    save_hf(
        student, shared.tokenizer, tmp_path / "m", dtype=torch.float32, boundaries=Boundaries(start=(), end=(stop,))
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        h = model.model(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
        model.lm_head.weight[stop] = h * 100
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False).shape[1] == 4


def test_the_teachers_rows_make_a_draft_for_it(mini, shared, tmp_path):
    """The teacher has 304 rows of which 300 are used: its student can draft for it once it has as many."""
    from conftest import Silent, StopAt
    from depthgrow.cli import main
    from depthgrow.config import override
    from depthgrow.runner import run_study

    run_study(override(mini, {"arms": ["pre-single"]}), tmp_path / "s", stop=StopAt(), listener=Silent())
    export = ["export", str(tmp_path / "s"), "pre-single", "--to"]
    assert main([*export, str(tmp_path / "plain")]) == main([*export, str(tmp_path / "rows"), "--teacher-rows"]) == 0
    plain, rows = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("plain", "rows"))
    teacher = AutoModelForCausalLM.from_pretrained(shared.teacher).eval()
    assert (plain.config.vocab_size, rows.config.vocab_size, teacher.config.vocab_size) == (300, 304, 304)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, rows(ids).logits[..., :300])
    alone = teacher.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(teacher.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=rows), alone)
