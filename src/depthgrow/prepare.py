"""What a study needs before its first step: teacher, tokens, targets, made ready and told apart by what they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from depthgrow.data.batches import Batches, MicroBatch
from depthgrow.data.tokens import TokenSet, prepare_tokens, recorded_tokens
from depthgrow.evaluate import Evaluation, evaluate
from depthgrow.files import UserError, cache_root, read_json, read_study
from depthgrow.head_loss import TeacherTargets, TopTargets
from depthgrow.parallel import on_first, sharded
from depthgrow.phase import Materials
from depthgrow.runtime import Listener, Stop, num_cores, pick_device, stopping_at_once, torch_dtype
from depthgrow.study import Facts, Study, Workspace
from depthgrow.teacher.cache import Rows, TargetCache, is_begun, open_cache, pick_live, row_bytes, teacher_work
from depthgrow.teacher.live import LiveTeacher
from depthgrow.teacher.sources import resolve_teacher


@dataclass
class Prepared:
    """Teacher, text and targets of a study, ready to train on; ``facts`` go into fingerprints."""

    teacher: LiveTeacher
    tokens: TokenSet
    shards: list[TargetCache] | None
    held_out: TargetCache | None
    facts: Facts
    device: torch.device

    def fill(self, study: Study, stop: Stop, listener: Listener) -> None:
        """Let the teacher see every document once, unless the cache has it already or it stays live."""
        shards = self.shards or []
        names = ["held-out documents", *(f"shard {i}" for i in range(len(shards)))]
        for name, cache in zip(names, [self.held_out, *shards], strict=True):
            if cache is None:
                continue
            if on_first(partial(bool, cache.missing)):
                listener.note(f"teacher targets of the {name}: {cache.rows.nbytes / 2**20:.0f} MiB in {cache.folder}")

                def progress(done: int, total: int, name: str = name) -> None:
                    listener.progress(f"teacher targets, {name}", done, total, {})

                workers = cores(study, self.device)
                cache.fill(stop, progress, workers=workers)

    def materials(self, study: Study, seed: int) -> Materials:
        size, shards = study.shard_documents, self.shards

        def train_targets(batch: MicroBatch) -> TeacherTargets | TopTargets:
            if shards is None:
                return self.teacher.targets(batch)
            return shards[batch.document_ids[0] // size if batch.document_ids else 0].targets(batch)

        batches = Batches(
            self.tokens.train,
            shard_documents=size,
            batch_documents=study.train.batch_documents,
            micro_tokens=study.train.micro_tokens,
            seed=seed,
        )
        return Materials(
            arch=self.teacher.arch,
            initial=self.teacher.initial,
            classes=self.teacher.classes,
            batches=batches,
            held_out=self.tokens.held_out,
            train_targets=train_targets,
            read_ahead=shards is not None,
            held_out_targets=self.held_out_targets,
            teacher_work=teacher_work(self.teacher.arch, live=shards is None, kept=study.teacher.kept),
        )

    def held_out_targets(self, batch: MicroBatch) -> TeacherTargets:
        """Always exact, whatever the training targets are."""
        targets = self.teacher.targets(batch) if self.held_out is None else self.held_out.targets(batch)
        assert isinstance(targets, TeacherTargets)
        return targets

    def evaluate_teacher(self, study: Study) -> Evaluation:
        """The teacher's own CE on the held-out documents."""
        return evaluate(
            lambda batch: self.held_out_targets(batch).hidden_ND,
            self.teacher.head_VD,
            self.tokens.held_out,
            None,
            micro_tokens=study.train.micro_tokens,
            device=self.device,
        )


def load_teacher(study: Study, device: torch.device, listener: Listener, stop: Stop | None) -> LiveTeacher:
    """The study's teacher in the dtype it computes in. Raises Stopped where a signal comes meanwhile."""
    listener.note(f"loading teacher {study.teacher.source}")
    with stopping_at_once(stop, "loading the teacher"):
        return LiveTeacher.load(resolve_teacher(study.teacher.source), torch_dtype(study.teacher.dtype), device)


def prepare(study: Study, listener: Listener, stop: Stop | None = None) -> Prepared:
    """Load the teacher, tokenize the text, open the caches.

    Raises:
        UserError: teacher or corpus is missing or does not fit; the message says what to install.
        Stopped: a signal came.
    """
    device = pick_device(study.train.device)
    torch.set_num_threads(study.train.threads)
    dtype = torch_dtype(study.teacher.dtype)
    teacher = load_teacher(study, device, listener, stop)
    if study.data.max_tokens > teacher.arch.max_positions + 1:
        raise UserError(
            f"data.max_tokens={study.data.max_tokens} exceeds the teacher's {teacher.arch.max_positions} positions; lower it"
        )
    listener.note("reading " + ", ".join(study.data.corpora))
    size, count = study.shard_documents, study.num_shards()
    tokens = prepare_tokens(study.data, teacher.tokenizer, cache_root(), train_documents=size * count, stop=stop)
    skipped = tokens.info["skipped_files"]
    for problem in skipped[:5]:
        listener.note(f"skipped {problem}")
    if len(skipped) > 5:
        listener.note(f"skipped {len(skipped)} files in all, named in data.json")
    dropped = tokens.info["exact_copies"] + tokens.info["near_copies"]
    if dropped:
        listener.note(f"left out {dropped} documents that repeat an earlier one")
    parts = [tokens.train.part(i * size, (i + 1) * size) for i in range(count)]
    facts = Facts(
        teacher=teacher.fingerprint,
        shards=tuple(part.content_hash for part in parts),
        held_out=tokens.held_out.content_hash,
        device=device.type,
        classes=teacher.classes.fingerprint,
    )
    root = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    exact, micro = Rows(teacher, dtype), study.train.micro_tokens
    coding = replace(exact, top=study.teacher.kept)
    if study.teacher.targets == "auto":
        missing = [part for part in (*parts, tokens.held_out) if not is_begun(root, exact, part, micro)]
        needed = sum(int(part.num_targets.sum()) for part in missing) * row_bytes(teacher.arch, dtype)
        live, reason = on_first(lambda: pick_live(needed, root))
        listener.note(reason)
    if study.teacher.targets == "live" or (study.teacher.targets == "auto" and live):
        return Prepared(teacher, tokens, None, None, facts, device)
    shards = [open_cache(root, coding, part, micro, first=i * size) for i, part in enumerate(parts)]
    held_out = open_cache(root, exact, tokens.held_out, micro)
    return Prepared(teacher, tokens, shards, held_out, facts, device)


def prepare_held_out(root: Path, study: Study, listener: Listener, stop: Stop | None = None) -> Prepared:
    """The teacher and the held-out documents that the study in ``root`` was made with: from the cache where it still has
    them, else from the corpora, which must then give the same. Training documents are not needed, nor their targets.

    Raises:
        UserError: teacher or held-out documents are not what the study was made with.
    """
    device = pick_device(study.train.device)
    torch.set_num_threads(study.train.threads)
    teacher = load_teacher(study, device, listener, stop)
    facts = Facts(**read_study(root)["facts"])
    tokens = recorded_tokens(read_json(root / "data.json"), cache_root())
    if tokens is None:
        listener.note("reading " + ", ".join(study.data.corpora))
        count = study.shard_documents * study.num_shards()
        tokens = prepare_tokens(study.data, teacher.tokenizer, cache_root(), train_documents=count, stop=stop)
    found = replace(facts, teacher=teacher.fingerprint, held_out=tokens.held_out.content_hash)
    Workspace(root).require_same(found)
    cached = Path(study.teacher.cache_dir) if study.teacher.cache_dir else cache_root()
    rows = Rows(teacher, torch_dtype(study.teacher.dtype))
    held_out = (
        None if study.teacher.targets == "live" else open_cache(cached, rows, tokens.held_out, study.train.micro_tokens)
    )
    return Prepared(teacher, tokens, None, held_out, found, device)


def cores(study: Study, device: torch.device) -> int:
    return 1 if device.type == "cuda" or sharded() else max(1, num_cores() // study.train.threads)
