"""Tiny real parts: random Hugging Face models, a tokenizer trained on the spot, a folder of documents."""

from __future__ import annotations

import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, logging

from depthgrow.pretrain import train_tokenizer

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# Every field the stack reads, off its default somewhere: biases, head_dim not hidden/heads, tied heads, RoPE scaling.
HF_CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3-biased-tied": Qwen3Config(**SIZES, head_dim=12, attention_bias=True, tie_word_embeddings=True),
    "qwen3-yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN_ROPE, rms_norm_eps=1e-5),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-linear": Qwen2Config(**SIZES, rope_parameters=LINEAR_ROPE),
    "llama": LlamaConfig(**SIZES),
    "llama-biased": LlamaConfig(**SIZES, head_dim=12, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
}


def random_model(config):
    """A model whose every tensor, norms and biases included, is away from its initial value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model


WORDS = ["the", "of", "and", "a", "stone", "river", "house", "green", "old", "runs", "under", "light", "tree", "grows"]


def make_text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A corpus, a tokenizer and a tiny teacher as users have them: files on disk. Also a private cache folder."""
    root = tmp_path_factory.mktemp("shared")
    rng = random.Random(5)
    texts = [make_text(rng, rng.randint(12, 60)) for _ in range(600)]
    corpus = root / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(iter(texts), 300)
    teacher = root / "teacher"
    config = Qwen3Config(**{**SIZES, "vocab_size": 304}, head_dim=16, tie_word_embeddings=True)
    random_model(config).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    return SimpleNamespace(root=root, corpus=corpus, texts=texts, teacher=teacher, tokenizer=tokenizer)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch, shared):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared.root / "cache"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture
def mini(shared):
    """A whole study in a second or two, on the tiny teacher."""
    from depthgrow.config import override
    from depthgrow.data.tokens import prepare_tokens
    from depthgrow.files import cache_root
    from depthgrow.recipes import debug

    study = override(
        debug(),
        {
            "name": "mini",
            "verdict": True,
            "teacher.source": str(shared.teacher),
            "data.corpora": [str(shared.corpus)],
            "data.max_tokens": 64,
            "data.held_out_documents": 6,
            "student.num_blocks": 3,
            "train.steps_per_phase": 6,
            "train.batch_documents": 4,
            "train.micro_tokens": 150,
            "train.eval_every": 3,
            "train.checkpoint_every": 2,
            "train.log_every": 2,
            "train.jobs": 1,
        },
    )
    # a stop is heard while texts are tokenized, too: once that is done, the polls of a test are steps
    prepare_tokens(study.data, shared.tokenizer, cache_root(), train_documents=study.shard_documents)
    return study


class Silent:
    """A listener that remembers notes, and can ask for a stop after so many progress reports."""

    def __init__(self):
        self.notes: list[str] = []
        self.reports: list[tuple] = []

    def note(self, text):
        self.notes.append(text)

    def begin(self, work, paths, states):
        self.work, self.paths, self.states = work, paths, states

    def progress(self, label, step, num_steps, values):
        self.reports.append((label, step, num_steps, values))


class StopAt:
    """Requests a stop at the given polls (counted over its life), as a signal at that moment would."""

    def __init__(self, *polls: int):
        self.polls, self.count = set(polls), 0

    @property
    def requested(self) -> bool:
        self.count += 1
        return self.count in self.polls


class StopIn:
    """Requests a stop from the first step on that is reported of a phase whose label has ``text``."""

    def __init__(self, listener: Silent, text: str):
        self.listener, self.text = listener, text

    @property
    def requested(self) -> bool:
        return any(self.text in label for label, *_ in self.listener.reports)


@pytest.fixture
def silent():
    return Silent()


@pytest.fixture
def never():
    return StopAt()


def tensors_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Same names, same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
