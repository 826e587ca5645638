"""What counting alone reaches on the held-out text: a model that has not learned more has hardly trained.

With c(v) the count of v among the target tokens of the training documents, N their number, V the vocabulary's size, c(u, v)
that of v after u, c(u) the sum of those and T(u) how many different tokens follow u:

    unigram   p(v)     = (c(v) + 1) / (N + V)                          add-one smoothing
    bigram    p(v | u) = (c(u, v) + T(u) p(v)) / (c(u) + T(u))         Witten-Bell smoothing: no free constant
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthgrow.data.tokens import TokenizedDocuments

MOST_TOKENS = 20_000_000  # counted; the counts of more would not fit a laptop's memory, and change these figures little


def baselines(train: TokenizedDocuments, held_out: TokenizedDocuments, vocabulary: int) -> dict[str, Any]:
    """Held-out cross-entropy of both models in nats per target token, and the number of target tokens counted.

    Args:
        train: counted from its start, whole documents, up to `MOST_TOKENS` (at least one document).
        vocabulary: V, larger than every id.
    """
    enough = int(np.searchsorted(np.cumsum(train.num_targets), MOST_TOKENS, side="right"))
    before, after = _pairs(train, max(1, enough))
    seen_before, seen_after = _pairs(held_out, len(held_out))
    unigram = (np.bincount(after, minlength=vocabulary) + 1) / (len(after) + vocabulary)
    kinds, counts = np.unique(before * vocabulary + after, return_counts=True)
    following = np.bincount(before, minlength=vocabulary)
    different = np.bincount(kinds // vocabulary, minlength=vocabulary)
    wanted = seen_before * vocabulary + seen_after
    places = np.minimum(np.searchsorted(kinds, wanted), max(0, len(kinds) - 1))
    together = np.where(kinds[places] == wanted, counts[places], 0)
    u, known = seen_before, following[seen_before] > 0  # after a token that was never seen, all there is is the unigram
    share = (together + different[u] * unigram[seen_after]) / np.where(known, following[u] + different[u], 1)
    bigram = np.where(known, share, unigram[seen_after])
    found = {"unigram": unigram[seen_after], "bigram": bigram}
    ce = {name: float(-np.log(p).mean()) for name, p in found.items()}
    return {name: {"ce": value, "ppl": float(np.exp(value))} for name, value in ce.items()} | {
        "counted_tokens": len(after)
    }


def _pairs(documents: TokenizedDocuments, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every target token of the first ``count`` documents behind the token before it."""
    ids = np.asarray(documents.ids[: documents.offsets[count]], dtype=np.int64)
    inside = np.ones(max(0, len(ids) - 1), dtype=bool)
    inside[documents.offsets[1:count] - 1] = False  # from a document's last token to the next one's first
    return ids[:-1][inside], ids[1:][inside]
