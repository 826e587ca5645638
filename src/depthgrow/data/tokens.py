"""From documents to token ids on disk: a training set and a held-out set that no teacher or student trains on.

A document is held out when a hash of its text says so: the split does not depend on order, corpus or recipe, so a
teacher trained by this package has never seen the documents its students are evaluated on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthgrow.config import fingerprint
from depthgrow.data.documents import Corpus, open_corpus
from depthgrow.files import UserError, locked, read_json, require_space, whole_folder, write_json

HELD_OUT_PERMILLE = 50
BATCH = 512  # documents handed to the tokenizer at a time


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which documents, and how they become tokens.

    corpora: names as in `depthgrow.data.documents`; max_tokens: a document is cut to that many; min_tokens: shorter
    ones are dropped; held_out_documents: size of the evaluation set; shard_documents: size of the fixed shard that
    phases go through (None: one phase's worth); start_token / end_token: text of the token put around each document,
    'auto' for the tokenizer's own (its BOS if it adds one by itself; its EOS), '' for none.
    """

    corpora: tuple[str, ...] = ("wiki",)
    max_tokens: int = 8192
    min_tokens: int = 16
    held_out_documents: int = 256
    shard_documents: int | None = None
    start_token: str = "auto"
    end_token: str = "auto"

    def __post_init__(self) -> None:
        if not self.corpora:
            raise UserError("data.corpora is empty; name at least one corpus, for example wiki")
        if not 2 <= self.min_tokens <= self.max_tokens:
            raise UserError(f"data.min_tokens={self.min_tokens} must lie between 2 and max_tokens={self.max_tokens}")
        if self.shard_documents is not None and self.shard_documents < 1:
            raise UserError(f"data.shard_documents={self.shard_documents} must be at least 1, or none")
        if self.held_out_documents < 2:
            raise UserError(f"data.held_out_documents={self.held_out_documents} must be at least 2")


class TokenizedDocuments:
    """Token ids of documents laid end to end in a memory-mapped file; document i is ``ids[offsets[i]:offsets[i+1]]``."""

    def __init__(self, ids: NDArray[Any], offsets: NDArray[np.int64], content_hash: str):
        self.ids, self.offsets, self.content_hash = ids, offsets, content_hash

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def num_targets(self) -> NDArray[np.int64]:
        """Target tokens of each document: one fewer than its tokens, since the first is predicted from nothing."""
        return np.diff(self.offsets) - 1

    @classmethod
    def from_lists(cls, documents: Sequence[Any]) -> TokenizedDocuments:
        lengths = [len(document) for document in documents]
        ids = np.concatenate([np.asarray(document, dtype=np.int32) for document in documents])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(ids, offsets, _content_hash(ids, offsets))

    def part(self, first: int, last: int) -> TokenizedDocuments:
        """Documents first .. last-1, with a content hash of their own."""
        ids = self.ids[self.offsets[first] : self.offsets[last]]
        offsets = self.offsets[first : last + 1] - self.offsets[first]
        return TokenizedDocuments(ids, offsets, _content_hash(ids, offsets))

    def save(self, stem: Path) -> None:
        np.save(stem.with_suffix(".ids.npy"), self.ids)
        np.save(stem.with_suffix(".offsets.npy"), self.offsets)

    @classmethod
    def load(cls, stem: Path, content_hash: str) -> TokenizedDocuments:
        """Raises UserError naming the file when it is not what was written."""
        path = stem.with_suffix(".ids.npy")
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
            offsets = np.load(stem.with_suffix(".offsets.npy"), allow_pickle=False)
            found = _content_hash(ids, offsets)
        except (OSError, ValueError) as error:
            raise UserError(f"token file {path} cannot be read ({error}); delete {stem.parent} and run again") from None
        if found != content_hash:
            raise UserError(f"token file {path} is damaged (checksum differs); delete {stem.parent} and run again")
        return cls(ids, offsets, content_hash)


def _content_hash(ids: NDArray[Any], offsets: NDArray[np.int64]) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(offsets).tobytes())
    digest.update(np.ascontiguousarray(ids).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TokenSet:
    """Training and held-out documents as tokens, and the record of where they came from (``info``)."""

    train: TokenizedDocuments
    held_out: TokenizedDocuments
    info: dict[str, Any]


def is_held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 1000 < HELD_OUT_PERMILLE


def shuffled(corpus: Corpus) -> Iterator[str]:
    """A finite corpus in the order of a hash of each text; a stream in its own order."""
    if not corpus.finite:
        return corpus.documents()
    return iter(sorted(corpus.documents(), key=lambda text: hashlib.sha256(b"order\0" + text.encode()).digest()))


def interleave(streams: list[Iterator[str]]) -> Iterator[str]:
    """One document of each stream in turn until all are used up."""
    while streams:
        for stream in list(streams):
            try:
                yield next(stream)
            except StopIteration:
                streams.remove(stream)


def tokenizer_hash(tokenizer: Any) -> str:
    """Tells tokenizers apart by everything that decides ids: vocabulary, merges, normalisation."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def prepare_tokens(config: DataConfig, tokenizer: Any, cache: Path, *, train_documents: int | None) -> TokenSet:
    """Tokenize what is needed, once: the result lies in ``cache`` and is found there the next time.

    Args:
        train_documents: documents to take for training; None takes all of a finite corpus.

    Raises:
        UserError: a corpus is missing, or has too few documents.
    """
    corpora = [open_corpus(spec) for spec in config.corpora]
    identity = {
        "format": 1,
        "corpora": [[corpus.name, corpus.identity] for corpus in corpora],
        "tokenizer": tokenizer_hash(tokenizer),
        "config": [config.max_tokens, config.min_tokens, config.held_out_documents],
        "boundary": [config.start_token, config.end_token],
        "train_documents": train_documents,
        "held_out_permille": HELD_OUT_PERMILLE,
    }
    folder = cache / "tokens" / fingerprint(identity)
    with locked(folder.with_suffix(".lock")):
        if not (folder / "info.json").exists():
            _build(config, corpora, tokenizer, folder, identity, train_documents)
    info = read_json(folder / "info.json")
    return TokenSet(
        TokenizedDocuments.load(folder / "train", info["train"]["content_hash"]),
        TokenizedDocuments.load(folder / "held_out", info["held_out"]["content_hash"]),
        info,
    )


def boundary_ids(config: DataConfig, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids put before and after every document."""

    def find(text: str) -> list[int]:
        index = tokenizer.get_vocab().get(text)
        if index is None:
            raise UserError(
                f"boundary token {text!r} is not in the tokenizer's vocabulary; set data.start_token/end_token"
            )
        return [index]

    if config.start_token == "auto":
        added = tokenizer("a").input_ids
        start = added[:1] if added and added[0] == tokenizer.bos_token_id else []
    else:
        start = find(config.start_token) if config.start_token else []
    if config.end_token == "auto":
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    else:
        end = find(config.end_token) if config.end_token else []
    return start, end


def _build(
    config: DataConfig,
    corpora: list[Corpus],
    tokenizer: Any,
    folder: Path,
    identity: dict[str, Any],
    train_documents: int | None,
) -> None:
    if train_documents is None and not all(corpus.finite for corpus in corpora):
        raise UserError("a streamed corpus has no end; set data.shard_documents")
    start, end = boundary_ids(config, tokenizer)
    budget = config.max_tokens - len(start) - len(end)
    train: list[NDArray[np.int32]] = []
    held_out: list[NDArray[np.int32]] = []
    text_hash = hashlib.sha256()
    num_characters = 0
    wanted = sys.maxsize if train_documents is None else train_documents

    def take(texts: list[str]) -> None:
        nonlocal num_characters
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        for text, ids in zip(texts, encoded, strict=True):
            target, limit = (held_out, config.held_out_documents) if is_held_out(text) else (train, wanted)
            document = start + ids[:budget] + end
            if len(target) < limit and len(document) >= config.min_tokens:
                target.append(np.asarray(document, dtype=np.int32))
                if target is train:
                    text_hash.update(text.encode() + b"\0")
                    num_characters += len(text)

    buffer: list[str] = []
    for text in interleave([shuffled(corpus) for corpus in corpora]):
        buffer.append(text)
        if len(buffer) == BATCH:
            take(buffer)
            buffer = []
            if len(train) >= wanted and len(held_out) >= config.held_out_documents:
                break
    if buffer:
        take(buffer)
    names = ", ".join(config.corpora)
    problems = [problem for corpus in corpora for problem in corpus.problems]
    skipped = f"; skipped files: {'; '.join(problems[:3])}" if problems else ""
    if len(held_out) < config.held_out_documents:
        raise UserError(
            f"corpus {names} has {len(held_out)} held-out documents of at least {config.min_tokens} tokens, "
            f"{config.held_out_documents} are wanted; lower --data.held_out_documents (of diagnose: --documents) "
            f"or add text{skipped}"
        )
    if train_documents is not None and len(train) < train_documents:
        raise UserError(
            f"corpus {names} has {len(train)} training documents, {train_documents} are needed; lower "
            f"--train.batch_documents or --train.steps_per_phase, set --data.shard_documents, or add text{skipped}"
        )
    if not train:
        raise UserError(f"corpus {names} has no training document{skipped}")
    highest = max(int(document.max()) for document in train + held_out)
    if highest >= len(tokenizer):
        raise UserError(f"the tokenizer gave id {highest} but has {len(tokenizer)} tokens: it is damaged")

    sets = {"train": TokenizedDocuments.from_lists(train), "held_out": TokenizedDocuments.from_lists(held_out)}
    info: dict[str, Any] = {
        "identity": json.loads(json.dumps(identity)),
        "corpora": [{"name": c.name, "source": c.source, "licence": c.licence} for c in corpora],
        "skipped_files": problems,
        "train_text_sha256": text_hash.hexdigest(),
        "train_characters": num_characters,
    }
    for name, documents in sets.items():
        info[name] = {
            "documents": len(documents),
            "target_tokens": int(documents.num_targets.sum()),
            "content_hash": documents.content_hash,
        }
    require_space(folder.parent, sum(s.ids.nbytes for s in sets.values()), "the token files")
    with whole_folder(folder) as scratch:
        for name, documents in sets.items():
            documents.save(scratch / name)
        write_json(scratch / "info.json", info)
