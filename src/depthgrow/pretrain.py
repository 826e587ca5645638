"""Training a teacher: the same loop with cross-entropy alone, an unfrozen embedding, pre placement and no teacher."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from depthgrow.architecture import Architecture
from depthgrow.checkpoint import latest_checkpoint
from depthgrow.config import fingerprint, to_dict
from depthgrow.curriculum import Phase
from depthgrow.data.batches import Batches
from depthgrow.data.classes import TokenClasses
from depthgrow.data.documents import open_corpus
from depthgrow.data.tokens import DataConfig, TokenSet, interleave, is_held_out, prepare_tokens, shuffled
from depthgrow.evaluate import evaluate_model
from depthgrow.export.hf import save_hf
from depthgrow.files import UserError, cache_root, locked, read_done, read_json, whole_folder, write_json
from depthgrow.head_loss import ObjectiveConfig
from depthgrow.optim import OptimConfig
from depthgrow.phase import Materials, PhaseRun, TrainConfig, build_student, load_weights
from depthgrow.runtime import Listener, StopSignal, environment, pick_device
from depthgrow.student import StudentConfig
from depthgrow.teacher.live import LiveTeacher
from depthgrow.trainer import Diverged, run_phase

BOUNDARY_TOKEN = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """A model to train from scratch on next-token prediction. ``train.steps_per_phase`` is its whole length."""

    name: str
    arch: Architecture
    seed: int = 42
    init_gain: float = 0.5
    tokenizer_documents: int = 20_000
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose one special token marks the start (put there by itself) and the end of a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    boundary = (BOUNDARY_TOKEN, tokenizer.token_to_id(BOUNDARY_TOKEN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOUNDARY_TOKEN} $A", special_tokens=[boundary])
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"the corpus gives a vocabulary of {tokenizer.get_vocab_size()} tokens, fewer than arch.vocab_size={vocab_size};"
            " add text or set --arch.vocab_size"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOUNDARY_TOKEN, eos_token=BOUNDARY_TOKEN, pad_token=BOUNDARY_TOKEN
    )


def pretrain(config: Pretrain, out: Path, *, stop: StopSignal, listener: Listener) -> Path:
    """Train, evaluate and write ``out/model``: a plain Hugging Face folder in bfloat16 with a provenance file.

    Running it again goes on where it stopped, or returns at once when it is done.

    Raises:
        UserError: ``out`` was made with another config. Stopped: a signal came, everything is saved.
    """
    with locked(out / ".lock", f"{out} is in use by another depthgrow process; wait for it or stop it"):
        return _pretrain(config, out, stop, listener)


def _pretrain(config: Pretrain, out: Path, stop: StopSignal, listener: Listener) -> Path:
    identity = to_dict(config)
    if (out / "config.json").exists() and read_json(out / "config.json") != identity:
        raise UserError(f"{out} was made with another config ({out / 'config.json'}); choose another --out")
    write_json(out / "config.json", identity)
    tokenizer = _tokenizer(config, out / "tokenizer", listener)
    listener.note("tokenizing " + ", ".join(config.data.corpora))
    tokens = prepare_tokens(
        config.data, tokenizer, cache_root(), train_documents=config.data.shard_documents, stop=stop
    )
    shard = len(tokens.train)
    batches = Batches(
        tokens.train,
        shard_documents=shard,
        batch_documents=config.train.batch_documents,
        micro_tokens=config.train.micro_tokens,
        seed=config.seed,
    )
    materials = Materials(
        arch=config.arch,
        initial={},
        classes=TokenClasses.of(tokenizer, config.arch.vocab_size),
        batches=batches,
        held_out=tokens.held_out,
        train_targets=None,
        held_out_targets=None,
    )
    steps = config.train.steps_per_phase
    run = PhaseRun(
        label=config.name,
        placement="pre",
        intervention=None,
        student=StudentConfig(
            num_blocks=1, layers_per_block=config.arch.num_layers, init_gain=config.init_gain, freeze_embedding=False
        ),
        objective=ObjectiveConfig(alpha=0.0, gamma=1.0),
        optim=config.optim,
        train=config.train,
        seed=config.seed,
        init_seed=config.seed,
        phases=[Phase(active=1, steps=steps)],
        schedule=(0, steps),
        identity=identity,
    )
    folder, model = out / "run", out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "done.json").exists():
        with suppress(Diverged):
            run_phase(run, materials, folder, None, stop=stop, listener=listener)
    if read_done(folder).get("state") == "diverged":
        raise UserError(
            f"{out} has diverged ({folder / 'done.json'} says where); choose another --out, and a lower rate"
        )
    if not (model / "provenance.json").exists():
        shutil.rmtree(model, ignore_errors=True)  # whole only with its provenance, which is written last
        _export(config, run, materials, tokens, tokenizer, out)
    return model


def _tokenizer(config: Pretrain, folder: Path, listener: Listener) -> Any:
    if not (folder / "tokenizer_config.json").exists():
        listener.note(f"training a tokenizer of {config.arch.vocab_size} tokens")
        corpora = [open_corpus(spec) for spec in config.data.corpora]
        streams = [shuffled(corpus.documents(), corpus.finite) for corpus in corpora]
        texts = (text for text in interleave(streams) if not is_held_out(text))
        limited = (text for _, text in zip(range(config.tokenizer_documents), texts, strict=False))
        with whole_folder(folder) as scratch:
            train_tokenizer(limited, config.arch.vocab_size).save_pretrained(scratch)
    return AutoTokenizer.from_pretrained(folder)


def _export(config: Pretrain, run: PhaseRun, materials: Materials, tokens: TokenSet, tokenizer: Any, out: Path) -> None:
    student = build_student(run, materials, torch.device("cpu"))
    checkpoint = latest_checkpoint(out / "run" / "checkpoints")
    assert checkpoint is not None
    load_weights(student, checkpoint.weights(), checkpoint.path)
    save_hf(student, tokenizer, out / "model", dtype=torch.bfloat16)
    done = read_json(out / "run" / "done.json")
    exported = LiveTeacher.load(out / "model", torch.float32, pick_device(config.train.device))
    held_out = evaluate_model(exported, tokens.held_out, micro_tokens=config.train.micro_tokens).summary()
    write_json(
        out / "model" / "provenance.json",
        {
            "command": f"depthgrow pretrain {config.name}",
            "config": to_dict(config),
            "fingerprint": fingerprint(config),
            "seed": config.seed,
            "corpora": tokens.info["corpora"],
            "train_documents": tokens.info["train"]["documents"],
            "train_text_sha256": tokens.info["train_text_sha256"],
            "train_tokens_seen": done["counted"]["tokens"],
            "unique_train_tokens": done["unique_tokens"],
            "held_out_documents": tokens.info["held_out"]["documents"],
            "held_out_tokens": tokens.info["held_out"]["target_tokens"],
            "held_out_content_hash": tokens.info["held_out"]["content_hash"],
            "held_out_ce_float32": done["final"]["ce"],
            "held_out_ce_exported": held_out["ce"],
            "training_seconds": round(done["counted"]["seconds"]),
            "environment": environment(torch.device("cpu")),
        },
    )
