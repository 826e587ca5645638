"""Teachers: loading, refusing, and a cache that is exact to the byte."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from conftest import SIZES, StopAt, random_model
from depthgrow.curriculum import DataPosition
from depthgrow.data.batches import Batches, pack
from depthgrow.data.tokens import DataConfig, prepare_tokens
from depthgrow.files import UserError
from depthgrow.runtime import Stopped
from depthgrow.teacher.cache import Rows, open_cache, pick_live
from depthgrow.teacher.live import LiveTeacher
from depthgrow.teacher.sources import resolve_teacher

CPU = torch.device("cpu")


@pytest.fixture
def teacher(shared):
    return LiveTeacher.load(shared.teacher, torch.float32, CPU)


@pytest.fixture
def tokens(shared):
    config = DataConfig(corpora=(str(shared.corpus),), held_out_documents=5, max_tokens=64)
    return prepare_tokens(config, shared.tokenizer, shared.root / "cache" / "depthgrow", train_documents=40)


def test_hidden_states_are_final_normed_and_padding_free(teacher, tokens):
    batch = pack(tokens.train, [3, 0, 8])
    hidden = teacher.hidden(batch.ids_N, batch.lengths)
    logits = hidden @ teacher.head_VD.T
    start = 0
    for i, n in zip(batch.document_ids, batch.lengths, strict=True):
        ids = torch.from_numpy(np.array(tokens.train[i][:-1])).long()
        alone = teacher.model(ids[None]).logits[0, :, : teacher.arch.vocab_size]
        torch.testing.assert_close(logits[start : start + n], alone, rtol=1e-5, atol=1e-5)
        start += n


def test_rows_no_token_uses_are_dropped_on_both_sides(teacher, shared):
    assert len(shared.tokenizer) == 300
    assert teacher.model.config.vocab_size == 304
    assert teacher.arch.vocab_size == 300
    assert {teacher.initial[k].shape for k in ("embedding_VD", "head_VD")} == {(300, 32)}


def test_initial_tensors_are_copies(teacher):
    first = teacher.initial["head_VD"]
    first.zero_()
    assert teacher.head_VD.abs().sum() > 0
    assert not any(p.requires_grad for p in teacher.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_the_teacher_wrote(shared, tokens, tmp_path, never, dtype):
    teacher = LiveTeacher.load(shared.teacher, dtype, CPU)
    cache = open_cache(tmp_path, Rows(teacher, dtype), tokens.train, 100)
    cache.fill(never, lambda done, total: None)
    batches = Batches(tokens.train, shard_documents=40, batch_documents=7, micro_tokens=100, seed=3)
    again = open_cache(tmp_path, Rows(teacher, dtype), tokens.train, 100)
    assert not again.missing
    for step in range(12):  # two passes, wrapping mid-batch
        for micro in batches.global_batch(DataPosition(0, step)):
            for document, rows in zip(
                micro.document_ids, again.targets(micro).hidden_ND.split(micro.lengths), strict=True
            ):
                assert rows.dtype == dtype
                alone = cache.targets(pack(tokens.train, [document])).hidden_ND
                assert torch.equal(rows, alone)
            live = teacher.targets(micro).hidden_ND.float()
            error = (again.targets(micro).hidden_ND.float() - live).norm() / live.norm()
            assert error < (1e-6 if dtype == torch.float32 else 1e-2)  # other rectangle, other rounding


def test_filling_stops_and_goes_on(teacher, tokens, tmp_path, never):
    with pytest.raises(Stopped):
        open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100).fill(
            StopAt(2), lambda done, total: None, workers=2
        )
    half = open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100)
    assert 0 < len(half.missing) < 40
    reports = []
    half.fill(never, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (40, 40)
    fresh = open_cache(tmp_path / "other", Rows(teacher, torch.float32), tokens.train, 100)
    fresh.fill(never, lambda done, total: None)
    np.testing.assert_allclose(half.rows, fresh.rows, rtol=1e-5, atol=1e-5)
    both = open_cache(tmp_path / "workers", Rows(teacher, torch.float32), tokens.train, 100)
    both.fill(never, lambda done, total: None, workers=3)
    assert np.array_equal(both.rows, fresh.rows)


def test_one_flipped_byte_is_named(teacher, tokens, tmp_path, never):
    cache = open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100)
    cache.fill(never, lambda done, total: None)
    path = cache.folder / "rows.npy"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    damaged = open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100)
    with pytest.raises(UserError, match=r"rows\.npy is damaged at document"):
        damaged.targets(pack(tokens.train, list(range(40))))
    path.write_bytes(data[:-500])
    with pytest.raises(UserError, match="cannot be read"):
        open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100)


def test_other_teacher_other_documents_other_cache(teacher, tokens, shared, tmp_path):
    one = open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100)
    assert open_cache(tmp_path, Rows(teacher, torch.float32), tokens.held_out, 100).folder != one.folder
    assert open_cache(tmp_path, Rows(teacher, torch.bfloat16), tokens.train, 100).folder != one.folder
    with torch.no_grad():
        teacher.model.model.norm.weight[0] += 1
    teacher.model.save_pretrained(tmp_path / "changed")
    shared.tokenizer.save_pretrained(tmp_path / "changed")
    changed = LiveTeacher.load(tmp_path / "changed", torch.float32, CPU)
    assert open_cache(tmp_path, Rows(changed, torch.float32), tokens.train, 100).folder != one.folder
    (one.folder / "info.json").write_text("{}")
    with pytest.raises(UserError, match="belongs to another"):
        open_cache(
            tmp_path, Rows(LiveTeacher.load(shared.teacher, torch.float32, CPU), torch.float32), tokens.train, 100
        )


def test_tokenizer_that_does_not_fit_is_refused(shared, tmp_path):
    random_model(Qwen3Config(**{**SIZES, "vocab_size": 200}, head_dim=16)).save_pretrained(tmp_path)
    shared.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="ids up to 299 but the model only 200 rows"):
        LiveTeacher.load(tmp_path, torch.float32, CPU)


def test_other_family_missing_weights_and_missing_folder(shared, tmp_path):
    gpt2 = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1)).save_pretrained(gpt2)
    shared.tokenizer.save_pretrained(gpt2)
    with pytest.raises(UserError, match="model_type 'gpt2' is not supported"):
        LiveTeacher.load(gpt2, torch.float32, CPU)
    bare = tmp_path / "bare"
    shared.tokenizer.save_pretrained(bare)
    with pytest.raises(UserError, match="cannot be loaded"):
        LiveTeacher.load(bare, torch.float32, CPU)
    with pytest.raises(UserError, match="does not exist"):
        resolve_teacher("./nowhere")
    with pytest.raises(UserError, match="did you mean 'laptop'"):
        resolve_teacher("labtop")


def test_damaged_weights_are_one_line(shared, tmp_path):
    import shutil

    shutil.copytree(shared.teacher, tmp_path / "t")
    path = tmp_path / "t" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be loaded"):
        LiveTeacher.load(tmp_path / "t", torch.float32, CPU)


def test_smollm2_says_how_to_get_it(shared):
    with pytest.raises(UserError, match="depthgrow prepare smollm2"):
        resolve_teacher("smollm2")


def test_missing_tensor_is_an_error_not_a_random_layer(shared, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(shared.teacher, tmp_path / "t")
    path = tmp_path / "t" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        LiveTeacher.load(tmp_path / "t", torch.float32, CPU)


def test_shapes_are_part_of_the_teachers_fingerprint(shared, tmp_path):
    import json
    import shutil

    shutil.copytree(shared.teacher, tmp_path / "t")
    first = LiveTeacher.load(tmp_path / "t", torch.float32, CPU).fingerprint
    assert first == LiveTeacher.load(shared.teacher, torch.float32, CPU).fingerprint
    path = tmp_path / "t" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    assert LiveTeacher.load(tmp_path / "t", torch.float32, CPU).fingerprint != first


def test_a_model_with_code_of_its_own_is_refused(shared, tmp_path):
    import json
    import shutil

    shutil.copytree(shared.teacher, tmp_path / "t")
    path = tmp_path / "t" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "m.M"}}))
    with pytest.raises(UserError, match="never run"):
        LiveTeacher.load(tmp_path / "t", torch.float32, CPU)


def test_top_rows_are_the_teachers_most_probable_tokens(teacher, tokens, tmp_path, never):
    cache = open_cache(tmp_path, Rows(teacher, torch.float32, top=5), tokens.train, 100)
    cache.fill(never, lambda done, total: None)
    assert cache.folder != open_cache(tmp_path, Rows(teacher, torch.float32), tokens.train, 100).folder
    batch = pack(tokens.train, [3, 30])
    read = open_cache(tmp_path, Rows(teacher, torch.float32, top=5), tokens.train, 100).targets(batch)
    log_q = (teacher.hidden(batch.ids_N, batch.lengths) @ teacher.head_VD.T).log_softmax(1)
    best = log_q.topk(5, dim=1)
    torch.testing.assert_close(read.log_q_Nk, best.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_q.gather(1, read.id_Nk.long()), best.values, rtol=1e-5, atol=1e-5)
    assert cache.rows.nbytes == 5 * 8 * len(cache.rows)


def test_the_cache_is_left_out_only_where_half_the_disk_does_not_hold_it(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert pick_live(1000, tmp_path)[0] is False
    live, reason = pick_live(2 * free, tmp_path)
    assert live
    assert "topk" in reason


def test_a_teacher_of_which_part_would_be_thrown_away_is_refused(shared, tmp_path):
    import shutil

    shallow = tmp_path / "shallow"
    shutil.copytree(shared.teacher, shallow)
    config = json.loads((shallow / "config.json").read_text())
    half = {"num_hidden_layers": 2, "layer_types": None, "max_window_layers": 2}
    (shallow / "config.json").write_text(json.dumps(config | half))
    with pytest.raises(UserError, match=r"tensors in its files have no place .* first model\.layers\.2\."):
        LiveTeacher.load(shallow, torch.float32, CPU)
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "layer_types": None}
    (shallow / "config.json").write_text(json.dumps(config | llama))
    with pytest.raises(UserError, match=r"first model\.layers\.0\.self_attn\.k_norm\.weight"):
        LiveTeacher.load(shallow, torch.float32, CPU)


def test_an_adapter_beside_the_weights_and_quantised_weights_are_refused(shared, tmp_path):
    import shutil

    for name, change, message in (
        ("adapter", None, "merge_and_unload"),
        (
            "quantised",
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "quantised .bitsandb",
        ),
        ("code", {"auto_map": {"AutoConfig": "x.Y"}}, "code of its own|cannot be loaded"),
    ):
        folder = tmp_path / name
        shutil.copytree(shared.teacher, folder)
        if change is None:
            (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x", "peft_type": "LORA"}')
        else:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message):
            LiveTeacher.load(folder, torch.float32, CPU)


def test_weights_that_are_not_finite_are_named(shared, tmp_path):
    teacher = LiveTeacher.load(str(shared.teacher), torch.float32, CPU)
    with torch.no_grad():
        teacher.model.model.norm.weight[3] = float("nan")
    teacher.model.save_pretrained(tmp_path)
    teacher.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight has values that are not finite"):
        LiveTeacher.load(tmp_path, torch.float32, CPU)


def test_documents_of_one_token_have_no_targets_and_do_no_harm(shared):
    from depthgrow.data.batches import pack
    from depthgrow.data.tokens import TokenizedDocuments

    teacher = LiveTeacher.load(str(shared.teacher), torch.float32, CPU)
    documents = TokenizedDocuments.from_lists([[5], [6], [1, 2, 3]])
    assert teacher.targets(pack(documents, [0, 1])).hidden_ND.shape == (0, teacher.arch.hidden_size)
    alone, beside = (teacher.targets(pack(documents, ids)).hidden_ND for ids in ([2], [0, 2, 1]))
    torch.testing.assert_close(alone, beside)
