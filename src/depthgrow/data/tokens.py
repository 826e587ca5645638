"""From documents to token ids on disk: a training set and a held-out set that no teacher or student trains on.

A document is held out when a hash of its text says so: the split does not depend on order, corpus or recipe, so a
teacher trained by this package has never seen the documents its students are evaluated on.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthgrow.config import fingerprint
from depthgrow.data.copies import Copies
from depthgrow.data.documents import Corpus, open_corpus
from depthgrow.files import UserError, locked, read_json, require_space, whole_folder, write_atomic, write_json
from depthgrow.runtime import Stop, Stopped, stopping_at_once

HELD_OUT_PERMILLE = 50
BATCH = 512  # documents handed to the tokenizer at a time


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which documents, and how they become tokens.

    corpora: names as in `depthgrow.data.documents`; max_tokens: a document is cut to that many; min_tokens: shorter
    ones are dropped; held_out_documents: size of the evaluation set; shard_documents: size of the fixed shard that
    phases go through (None: one phase's worth); start_token / end_token: text of the token put before each document, and
    after each that was not cut: 'auto' for the tokenizer's own (its BOS if it adds one by itself; its EOS), '' for none.
    near_duplicates: Jaccard similarity of word 5-grams from which a document counts as a copy of an earlier one and is
    dropped (None: only exact copies are).
    """

    corpora: tuple[str, ...] = ("wiki",)
    max_tokens: int = 8192
    min_tokens: int = 16
    held_out_documents: int = 256
    shard_documents: int | None = None
    start_token: str = "auto"
    end_token: str = "auto"
    near_duplicates: float | None = None

    def __post_init__(self) -> None:
        if not self.corpora:
            raise UserError("data.corpora is empty; name at least one corpus, for example wiki")
        if not 2 <= self.min_tokens <= self.max_tokens:
            raise UserError(f"data.min_tokens={self.min_tokens} must lie between 2 and max_tokens={self.max_tokens}")
        if self.shard_documents is not None and self.shard_documents < 1:
            raise UserError(f"data.shard_documents={self.shard_documents} must be at least 1, or none")
        if self.held_out_documents < 2:
            raise UserError(f"data.held_out_documents={self.held_out_documents} must be at least 2")
        if self.near_duplicates is not None and not 0 < self.near_duplicates < 1:
            raise UserError(f"data.near_duplicates={self.near_duplicates} must lie between 0 and 1, or be none")


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


def shuffled(texts: Iterator[str], finite: bool) -> Iterator[str]:
    """The documents of a finite corpus in the order of a hash of each; those of a stream in its own order."""
    if not finite:
        return texts
    return iter(sorted(texts, key=lambda text: hashlib.sha256(b"order\0" + text.encode()).digest()))


def interleave(streams: list[Iterator[str]]) -> Iterator[str]:
    """One document of each stream in turn until all are used up."""
    while streams:
        for stream in list(streams):
            try:
                yield next(stream)
            except StopIteration:
                streams.remove(stream)


def tokenizer_hash(tokenizer: Any) -> str:
    """Tells tokenizers apart by everything that decides the ids of a text: vocabulary, merges, normalisation."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one written in Python
        return fingerprint([type(tokenizer).__name__, tokenizer.get_vocab()])
    settings = json.loads(backend.to_str())
    for unused in ("truncation", "padding", "post_processor"):  # the last call's, and what `boundary_ids` resolves
        settings.pop(unused, None)
    return fingerprint(settings)


def prepare_tokens(
    config: DataConfig, tokenizer: Any, cache: Path, *, train_documents: int | None, stop: Stop | None = None
) -> TokenSet:
    """Tokenize what is needed, once: the result lies in ``cache`` and is found there the next time.

    Args:
        train_documents: documents to take for training; None takes all of a finite corpus.

    Raises:
        UserError: a corpus is missing, or has too few documents. Stopped: a signal came; the next call goes on from there.
    """
    with stopping_at_once(stop, "reading the corpora"):
        corpora = [open_corpus(spec) for spec in config.corpora]
    boundary = boundary_ids(config, tokenizer)
    identity = {
        "format": 2,
        "corpora": [corpus.identity for corpus in corpora],
        "tokenizer": tokenizer_hash(tokenizer),
        "config": [config.max_tokens, config.min_tokens, config.held_out_documents],
        "boundary": [list(ids) for ids in boundary],
        "train_documents": train_documents,
        "held_out_permille": HELD_OUT_PERMILLE,
    }
    if config.near_duplicates is not None:
        identity["near_duplicates"] = config.near_duplicates
    folder = cache / "tokens" / fingerprint(identity)
    with locked(folder.with_suffix(".lock")):
        if not (folder / "info.json").exists():
            _build(config, corpora, tokenizer, folder, identity, stop)
    found = _load(folder)
    found.info["corpora"] = [{"name": c.name, "source": c.source, "licence": c.licence} for c in corpora]
    return found


def recorded_tokens(info: dict[str, Any], cache: Path) -> TokenSet | None:
    """The token set that ``info`` (a study's data.json) describes, if the cache still has it: its corpora need not be there.

    Raises:
        UserError: its files are damaged.
    """
    folder = cache / "tokens" / fingerprint(info.get("identity"))
    return _load(folder) if (folder / "info.json").exists() else None


def _load(folder: Path) -> TokenSet:
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


class _Taking:
    """The documents taken so far. ``read``: texts looked at, taken or not; a stopped run keeps them and goes on behind them."""

    def __init__(self, config: DataConfig, tokenizer: Any, boundary: tuple[list[int], list[int]], train: int | None):
        self.config, self.tokenizer = config, tokenizer
        self.start, self.end = boundary
        self.wanted = sys.maxsize if train is None else train
        self.copies = Copies(config.near_duplicates)
        self.train: list[NDArray[np.int32]] = []
        self.held_out: list[NDArray[np.int32]] = []
        self.hashes: list[bytes] = []  # of the training texts
        self.places: list[int] = []  # of the taken among the texts read
        self.read = self.characters = 0

    @property
    def enough(self) -> bool:
        return len(self.train) >= self.wanted and len(self.held_out) >= self.config.held_out_documents

    def take(self, texts: list[str]) -> None:
        """Tokenize; a special token's name inside a text is text, not that token."""
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
        budget = self.config.max_tokens - len(self.start)
        for text, ids in zip(texts, encoded, strict=True):
            self.read += 1
            held_out = is_held_out(text)
            target = self.held_out if held_out else self.train
            limit = self.config.held_out_documents if held_out else self.wanted
            # what is cut goes on: it has no end
            ends = len(ids) + len(self.end) <= budget
            document = np.asarray(self.start + (ids + self.end if ends else ids[:budget]), dtype=np.int32)
            if len(target) >= limit or len(document) < self.config.min_tokens or self.copies.seen(document, text):
                continue
            target.append(document)
            self.places.append(self.read - 1)
            if not held_out:
                self.hashes.append(hashlib.sha256(text.encode()).digest())
                self.characters += len(text)

    def save(self, path: Path) -> None:
        """Keep what was done, for a later call with the same key."""
        counts = {"read": self.read, "characters": self.characters}
        arrays: dict[str, Any] = counts | {"exact": self.copies.exact, "near": self.copies.near, "places": self.places}
        for name, documents in (("train", self.train), ("held_out", self.held_out)):
            arrays[f"{name}_lengths"] = [len(document) for document in documents]
            arrays[name] = np.concatenate([np.empty(0, np.int32), *documents])
        buffer = io.BytesIO()
        np.savez(buffer, hashes=np.frombuffer(b"".join(self.hashes), np.uint8), **arrays)
        write_atomic(path, buffer.getvalue())

    def load(self, path: Path, texts: Iterator[str]) -> None:
        """Take over what a stopped call kept; ``texts`` is left behind the last of the texts that it read."""
        with np.load(path, allow_pickle=False) as arrays:
            self.read, self.characters = int(arrays["read"]), int(arrays["characters"])
            self.places = arrays["places"].tolist()
            for name in ("train", "held_out"):
                ends = np.cumsum(arrays[f"{name}_lengths"], dtype=np.int64)
                setattr(self, name, [np.ascontiguousarray(part) for part in np.split(arrays[name], ends)[:-1]])
            whole = arrays["hashes"].tobytes()
            self.hashes = [whole[i : i + 32] for i in range(0, len(whole), 32)]
            taken = set(self.places)
            for document in (*self.train, *self.held_out):
                self.copies.add(document)
            for place, text in enumerate(islice(texts, self.read)):
                if place in taken:
                    self.copies.add_text(text)
            self.copies.exact, self.copies.near = int(arrays["exact"]), int(arrays["near"])


def _build(
    config: DataConfig, corpora: list[Corpus], tokenizer: Any, folder: Path, identity: dict[str, Any], stop: Stop | None
) -> None:
    train_documents = identity["train_documents"]
    if train_documents is None and not all(corpus.finite for corpus in corpora):
        raise UserError("a streamed corpus has no end; set data.shard_documents")
    taking = _Taking(config, tokenizer, (identity["boundary"][0], identity["boundary"][1]), train_documents)
    begun = folder.with_suffix(".begun.npz")
    try:
        _take_all(taking, corpora, begun, stop)
    except Stopped:
        taking.save(begun)
        raise
    problems = [problem for corpus in corpora for problem in corpus.problems]
    _require_enough(config, taking, train_documents, problems)
    highest, rows = max(int(d.max()) for d in taking.train + taking.held_out), vocabulary_size(tokenizer)
    if highest >= rows:
        raise UserError(f"the tokenizer gave id {highest} but its largest is {rows - 1}: it is damaged")
    sets = {name: TokenizedDocuments.from_lists(getattr(taking, name)) for name in ("train", "held_out")}
    info: dict[str, Any] = {
        "identity": json.loads(json.dumps(identity)),
        "skipped_files": problems,
        "exact_copies": taking.copies.exact,
        "near_copies": taking.copies.near,
        "train_text_sha256": hashlib.sha256(b"".join(taking.hashes)).hexdigest(),
        "train_characters": taking.characters,
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
    begun.unlink(missing_ok=True)


def _take_all(taking: _Taking, corpora: list[Corpus], begun: Path, stop: Stop | None) -> None:
    """Read the corpora in turn until there are enough documents, behind what an earlier call kept in ``begun``.

    Raises:
        Stopped: a signal came.
    """

    def heard(texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            if stop is not None and stop.requested:
                raise Stopped("tokenization")
            yield text

    texts = interleave([shuffled(heard(corpus.documents()), corpus.finite) for corpus in corpora])
    if begun.exists():
        taking.load(begun, texts)
    while not taking.enough:
        if stop is not None and stop.requested:
            raise Stopped("tokenization")
        buffer = list(islice(texts, BATCH))
        if not buffer:
            return
        taking.take(buffer)


def _require_enough(config: DataConfig, taking: _Taking, wanted: int | None, problems: list[str]) -> None:
    names, copies = ", ".join(config.corpora), taking.copies.exact + taking.copies.near
    left_out = f"; {copies} copies were dropped" if copies else ""
    left_out += f"; skipped files: {'; '.join(problems[:3])}" if problems else ""
    if len(taking.held_out) < config.held_out_documents:
        raise UserError(
            f"corpus {names} has {len(taking.held_out)} held-out documents of at least {config.min_tokens} tokens, "
            f"{config.held_out_documents} are wanted; lower --data.held_out_documents (of diagnose: --documents) "
            f"or add text{left_out}"
        )
    if wanted is not None and len(taking.train) < wanted:
        raise UserError(
            f"corpus {names} has {len(taking.train)} training documents, {wanted} are needed; lower "
            f"--train.batch_documents or --train.steps_per_phase, set --data.shard_documents, or add text{left_out}"
        )
    if not taking.train:
        raise UserError(f"corpus {names} has no training document{left_out}")


def vocabulary_size(tokenizer: Any) -> int:
    """One more than its largest id. ``len(tokenizer)`` counts tokens, which are fewer where the ids have holes."""
    return max(tokenizer.get_vocab().values()) + 1
