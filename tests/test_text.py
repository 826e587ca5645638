"""Text as users have it: what is read of it, what is left out and said, and what a token set's key holds."""

from __future__ import annotations

import gzip
import json
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import WORDS, StopAt
from depthgrow.data import tokens as tokens_module
from depthgrow.data.documents import absolute_spec, open_corpus
from depthgrow.data.tokens import DataConfig, prepare_tokens, recorded_tokens, vocabulary_size
from depthgrow.files import UserError
from depthgrow.pretrain import train_tokenizer
from depthgrow.runtime import Stopped

LONG = "a stone house under the old green tree by the river, "


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def rows(documents):
    return [tuple(documents[i].tolist()) for i in range(len(documents))]


def folders(cache):
    return {path.name for path in (cache / "tokens").iterdir() if path.is_dir()}


@pytest.fixture
def config(shared):
    return DataConfig(corpora=(str(shared.corpus),), held_out_documents=5, max_tokens=64)


# --- what is read ---------------------------------------------------------------------------------------------------------


def test_compressed_and_oddly_named_files_are_read_and_the_rest_is_named(tmp_path):
    line = json.dumps({"text": "packed"}) + "\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "b.ndjson").write_text(line.replace("packed", "ndjson"))
    (tmp_path / "c.TXT").write_bytes(b"\xef\xbb\xbfwith a byte order mark")
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + line.replace("packed", "marked").encode())
    import pyarrow

    with pyarrow.output_stream(str(tmp_path / "e.txt.zst"), compression="zstd") as stream:
        stream.write(b"zstandard")
    (tmp_path / "notes.docx").write_bytes(b"x")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.documents()) == ["packed", "ndjson", "with a byte order mark", "marked", "zstandard"]
    assert [p.split(" (")[1] for p in corpus.problems] == ["not a text format: .docx)"]


def test_a_bad_line_or_row_costs_itself_alone_and_is_counted(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one"}\n{"text": \n\xff\n{"text": "three"}\n{"text": "half \\ud83d"}\n'
    )
    binary = pyarrow.array([b"raw bytes", None, b"\xff\xfe", "über".encode()], type=pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": binary}), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "c.parquet")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.documents()) == ["one", "three", "raw bytes", "über"]
    assert "3 of its texts skipped, the first line 2" in corpus.problems[0]
    assert "2 of its texts skipped, the first row 2: null" in corpus.problems[1]
    assert "no column 'text', only body" in corpus.problems[2]


def test_hidden_files_are_left_out_and_counted(tmp_path):
    drafts = tmp_path / "text" / ".ipynb_checkpoints"
    drafts.mkdir(parents=True)
    for number in range(3):
        (drafts / f"{number}.txt").write_text("an old draft")
    (tmp_path / "text" / ".hidden.txt").write_text("hidden")
    (tmp_path / "text" / "a.txt").write_text("kept")
    corpus = open_corpus(str(tmp_path / "text"))
    assert list(corpus.documents()) == ["kept"]
    assert any("4 hidden files left out" in problem for problem in corpus.problems)
    inside = open_corpus(str(drafts))  # a hidden folder that is named itself is meant
    assert len(list(inside.documents())) == 3


def test_the_wiki_is_utf8_whatever_the_locale(monkeypatch, tmp_path):
    import subprocess
    import sys

    code = (
        "from depthgrow.data.documents import open_corpus\n"
        "import hashlib, sys\n"
        "text = ''.join(open_corpus('wiki').documents())\n"
        "print(hashlib.sha256(text.encode()).hexdigest(), sum(ord(c) > 255 for c in text))\n"
    )
    out = [
        subprocess.run(
            [sys.executable, "-X", "utf8=0", "-c", code],
            env={"LC_ALL": locale, "PATH": "/usr/bin"},
            capture_output=True,
        ).stdout
        for locale in ("C.UTF-8", "en_US.ISO-8859-1", "C")
    ]
    assert len(set(out)) == 1
    assert int(out[0].split()[1]) > 100


# --- what becomes of it ---------------------------------------------------------------------------------------------------


def test_a_special_token_written_in_a_text_is_text(shared, tmp_path):
    end = shared.tokenizer.eos_token_id
    texts = [f"the river <|endoftext|> runs under house {i}" for i in range(400)]
    data = DataConfig(corpora=(write_lines(tmp_path / "t.jsonl", texts),), held_out_documents=2, min_tokens=4)
    tokens = prepare_tokens(data, shared.tokenizer, tmp_path, train_documents=50)
    for ids in rows(tokens.train):
        assert ids[0] == ids[-1] == end
        assert end not in ids[1:-1]
        assert "<|endoftext|>" in shared.tokenizer.decode(ids[1:-1])


def test_only_a_document_that_ends_has_an_end(shared, tmp_path):
    texts = [f"{i} {LONG * (i % 3 + 1)}" for i in range(600)]
    data = DataConfig(corpora=(write_lines(tmp_path / "t.jsonl", texts),), held_out_documents=3, max_tokens=48)
    tokens = prepare_tokens(data, shared.tokenizer, tmp_path, train_documents=60)
    end = shared.tokenizer.eos_token_id
    whole = {len(shared.tokenizer(t, add_special_tokens=False).input_ids) + 2 <= 48 for t in texts}
    assert whole == {True, False}
    for ids in rows(tokens.train):
        text = shared.tokenizer.decode(ids[1:])
        assert (
            (ids[-1] == end)
            == (text.endswith("<|endoftext|>"))
            == any(text.removesuffix("<|endoftext|>") == t for t in texts)
        )


def test_copies_are_dropped_by_what_the_model_sees_and_counted(shared, tmp_path):
    """The same text, NFC and NFD twins under a normalising tokenizer, and texts that differ behind the cut."""
    from tokenizers import normalizers

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=shared.tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    base = [f"café number {i} by the river, older than the green house" for i in range(200)]
    texts = [t for t in base for _ in range(4)]
    texts += [unicodedata.normalize("NFD", t) for t in base]
    long = [LONG * 12 + str(i) for i in range(20)]
    path = write_lines(tmp_path / "t.jsonl", texts + long)
    data = DataConfig(corpora=(path,), held_out_documents=4, max_tokens=40, min_tokens=4, start_token="")
    tokens = prepare_tokens(data, tokenizer, tmp_path, train_documents=None)
    train, held_out = rows(tokens.train), rows(tokens.held_out)
    assert len(set(train)) == len(train)
    assert not set(train) & set(held_out)
    assert tokens.info["exact_copies"] >= 3 * len(train)
    assert sum(ids in {tuple(d) for d in train + held_out} for ids in [train[0]]) == 1
    unique = prepare_tokens(
        replace(data, corpora=(write_lines(tmp_path / "u.jsonl", [*base, long[0]]),)),
        tokenizer,
        tmp_path,
        train_documents=None,
    )
    assert unique.info["exact_copies"] == 0


def test_near_copies_are_an_option(shared, tmp_path):
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(400)]
    base = [" ".join(rng.choice(words, 80)) for _ in range(150)]
    near = [t.rsplit(" ", 1)[0] + " changed" for t in base]
    path = write_lines(tmp_path / "t.jsonl", base + near)
    data = DataConfig(corpora=(path,), held_out_documents=2, max_tokens=2000)
    plain = prepare_tokens(data, shared.tokenizer, tmp_path, train_documents=None)
    without = prepare_tokens(replace(data, near_duplicates=0.6), shared.tokenizer, tmp_path, train_documents=None)
    assert plain.info["near_copies"] == 0
    assert without.info["near_copies"] > 100
    assert len(without.train) < 0.6 * len(plain.train)
    with pytest.raises(UserError, match=r"near_duplicates=1\.5"):
        DataConfig(near_duplicates=1.5)


def test_ids_with_holes_are_counted_to_the_largest(shared, tmp_path):
    """A tokenizer whose special token lies far above its other ids, as where some were reserved and dropped."""
    vocabulary = {word: 3 * i for i, word in enumerate(["?", "end", *WORDS, "."])}
    made = Tokenizer(models.WordLevel(vocabulary | {"<eos>": 90}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    holed = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    assert holed.eos_token_id == 90 > len(holed)
    assert vocabulary_size(holed) == holed.eos_token_id + 1
    data = DataConfig(corpora=(str(shared.corpus),), held_out_documents=2)
    tokens = prepare_tokens(data, holed, tmp_path, train_documents=5)
    assert rows(tokens.train)[0][-1] == holed.eos_token_id


# --- what decides a token set ---------------------------------------------------------------------------------------------


def test_two_tokenizers_that_differ_in_eos_alone_share_no_tokens(shared, tmp_path, config):
    import copy

    prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=10)
    other = copy.deepcopy(shared.tokenizer)
    other.eos_token = "e"
    found = prepare_tokens(config, other, tmp_path, train_documents=10)
    assert len(folders(tmp_path)) == 2
    end = other.convert_tokens_to_ids("e")
    assert end != shared.tokenizer.eos_token_id
    assert any(ids[-1] == end for ids in rows(found.train))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 50},
        {"min_tokens": 20},
        {"held_out_documents": 6},
        {"start_token": ""},
        {"end_token": ""},
        {"near_duplicates": 0.9},
    ],
)
def test_each_field_that_decides_tokens_is_in_their_key(shared, tmp_path, config, change):
    prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=10)
    prepare_tokens(replace(config, **change), shared.tokenizer, tmp_path, train_documents=10)
    assert len(folders(tmp_path)) == 2


def test_the_key_holds_content_and_not_names(shared, tmp_path, config):
    prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=10)
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(shared.corpus.read_bytes())
    again = replace(config, corpora=(str(moved),), shard_documents=7)  # a shard is a part of the same tokens
    found = prepare_tokens(again, shared.tokenizer, tmp_path, train_documents=10)
    assert found.info["corpora"][0]["name"] == str(moved)
    assert len(folders(tmp_path)) == 1
    prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=11)
    prepare_tokens(config, train_tokenizer(iter(shared.texts[:200]), 290), tmp_path, train_documents=10)
    moved.write_text(moved.read_text() + json.dumps({"text": LONG}) + "\n")
    prepare_tokens(again, shared.tokenizer, tmp_path, train_documents=10)
    assert len(folders(tmp_path)) == 4


def test_text_replaced_in_a_dataset_folder_is_seen(shared, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "train.jsonl", shared.texts[:300])
    data = DataConfig(corpora=(f"hf:{folder}",), held_out_documents=2)
    first = prepare_tokens(data, shared.tokenizer, tmp_path, train_documents=20)
    write_lines(folder / "train.jsonl", shared.texts[300:])
    second = prepare_tokens(data, shared.tokenizer, tmp_path, train_documents=20)
    assert not set(rows(first.train)) & set(rows(second.train))


def test_a_hub_dataset_is_pinned_to_the_commit_that_was_found(monkeypatch, tmp_path):
    import datasets
    import huggingface_hub

    commits = iter(["1" * 40, "2" * 40])
    read = []

    class Hub:
        def dataset_info(self, name, revision=None, timeout=None):
            try:
                return type("Info", (), {"sha": next(commits)})
            except StopIteration:
                raise OSError("no network") from None

    def load(name, config, split, streaming, revision):
        read.append(revision)
        return iter([{"text": "x"}])

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(datasets, "load_dataset", load)
    first, second, third = (open_corpus("hf:some/set") for _ in range(3))
    assert first.identity != second.identity
    assert second.identity == third.identity  # without a network: the commit of the last time
    assert "2" * 40 in second.source
    for corpus in (first, second):
        list(corpus.documents())
    assert read == ["1" * 40, "2" * 40]
    assert open_corpus(f"hf:some/set@{'3' * 40}").identity["revision"] == "3" * 40
    with pytest.raises(UserError, match=r"name the commit: hf:other/set@COMMIT"):
        open_corpus("hf:other/set")


def test_paths_are_the_same_from_everywhere(monkeypatch, tmp_path):
    (tmp_path / "t.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute_spec("t.txt") == absolute_spec("~/t.txt") == str(tmp_path / "t.txt")
    assert absolute_spec("wiki") == "wiki"
    assert absolute_spec("docstrings:stdlib") == "docstrings:stdlib"
    (tmp_path / "d").mkdir()
    assert absolute_spec("hf:d:config:test") == f"hf:{tmp_path / 'd'}:config:test"
    assert absolute_spec("hf:owner/name") == "hf:owner/name"


# --- a stop while it is read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near", [None, 0.8])
def test_a_stopped_tokenization_goes_on_to_the_same_tokens(monkeypatch, shared, tmp_path, config, near):
    config = replace(config, near_duplicates=near, corpora=(str(shared.corpus), "docstrings:numpy"))
    monkeypatch.setattr(tokens_module, "BATCH", 100)
    whole = prepare_tokens(config, shared.tokenizer, tmp_path / "whole", train_documents=900)
    listed = sum(len(list(open_corpus(spec).documents())) for spec in config.corpora)  # a poll a text, then one a batch
    for poll in (300, listed + 4, listed + 3):
        with pytest.raises(Stopped):
            prepare_tokens(config, shared.tokenizer, tmp_path / "cut", train_documents=900, stop=StopAt(poll))
    (begun,) = (tmp_path / "cut" / "tokens").glob("*.begun.npz")
    with np.load(begun) as arrays:
        assert arrays["read"] == 500  # three batches, then two
    cut = prepare_tokens(config, shared.tokenizer, tmp_path / "cut", train_documents=900, stop=StopAt())
    assert rows(cut.train) == rows(whole.train)
    assert rows(cut.held_out) == rows(whole.held_out)
    assert cut.info == whole.info
    assert not list((tmp_path / "cut" / "tokens").glob("*.begun.npz"))


def test_recorded_tokens_need_no_corpus(shared, tmp_path, config):
    made = prepare_tokens(config, shared.tokenizer, tmp_path, train_documents=10)
    found = recorded_tokens(json.loads(json.dumps(made.info)), tmp_path)
    assert rows(found.held_out) == rows(made.held_out)
    assert recorded_tokens({"identity": {"other": 1}}, tmp_path) is None
