"""Counting models against the formula written out with dictionaries."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from depthgrow.data import baselines as module
from depthgrow.data.baselines import baselines
from depthgrow.data.tokens import TokenizedDocuments


def by_hand(train, held_out, vocabulary):
    """The same from the formulas, a token at a time."""
    pairs = [(a, b) for document in train for a, b in pairwise(document)]
    single, double = Counter(b for _, b in pairs), Counter(pairs)
    ce = {"unigram": 0.0, "bigram": 0.0}
    targets = [(a, b) for document in held_out for a, b in pairwise(document)]
    for u, v in targets:
        p = (single[v] + 1) / (len(pairs) + vocabulary)
        follow = sum(n for (a, _), n in double.items() if a == u)
        kinds = sum(1 for a, _ in double if a == u)
        q = (double[u, v] + kinds * p) / (follow + kinds) if follow else p
        ce["unigram"] -= math.log(p) / len(targets)
        ce["bigram"] -= math.log(q) / len(targets)
    return ce


def documents(rng, count, vocabulary):
    return [rng.integers(0, vocabulary, rng.integers(2, 9)).tolist() for _ in range(count)]


def test_both_models_equal_their_formulas():
    rng = np.random.default_rng(0)
    train, held_out = documents(rng, 30, 11), documents(rng, 8, 13)  # ids 11 and 12 were never seen in training
    found = baselines(TokenizedDocuments.from_lists(train), TokenizedDocuments.from_lists(held_out), 13)
    expected = by_hand(train, held_out, 13)
    for name, ce in expected.items():
        assert found[name]["ce"] == pytest.approx(ce, rel=1e-12)
        assert found[name]["ppl"] == pytest.approx(math.exp(ce), rel=1e-12)
    assert found["counted_tokens"] == sum(len(d) - 1 for d in train)


def test_only_whole_documents_up_to_the_bound_are_counted(monkeypatch):
    train = [[0, 1, 1], [0, 2, 2], [0, 1, 2, 1]]
    held_out = [[0, 1, 2]]
    monkeypatch.setattr(module, "MOST_TOKENS", 5)  # the third document would make it seven
    found = baselines(TokenizedDocuments.from_lists(train), TokenizedDocuments.from_lists(held_out), 3)
    assert found["counted_tokens"] == 4
    assert found["bigram"]["ce"] == pytest.approx(by_hand(train[:2], held_out, 3)["bigram"], rel=1e-12)


def test_a_probability_sums_to_one():
    rng = np.random.default_rng(1)
    train = TokenizedDocuments.from_lists(documents(rng, 20, 7))
    for start in range(8):  # 7 was never seen
        p = [
            math.exp(-baselines(train, TokenizedDocuments.from_lists([[start, v]]), 8)["bigram"]["ce"])
            for v in range(8)
        ]
        assert sum(p) == pytest.approx(1.0, rel=1e-12)
