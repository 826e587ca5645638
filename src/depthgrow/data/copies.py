"""Documents that repeat an earlier one: as independent samples they would narrow every interval without a reason, and a
held-out document that lies in the training set measures nothing."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from depthgrow.files import UserError

HASHES = 128  # of a sketch: its Jaccard similarity has a standard error below 0.05
GRAM = 5  # words


class Copies:
    """Which documents were taken before: the same tokens, or (``similarity`` given) a text that shares most of its words.

    The tokens are what a model sees: texts that differ in what the tokenizer normalises, or behind the cut, are the same.
    Near copies by MinHash of word 5-grams (Broder 1997) in a locality-sensitive index.

    Raises:
        UserError: near copies are wanted and the library that finds them is not installed.
    """

    def __init__(self, similarity: float | None):
        self.exact = self.near = 0
        self._tokens: set[bytes] = set()
        self._index: Any = None
        if similarity is not None:
            try:
                import datasketch
            except ImportError:
                raise UserError(
                    "data.near_duplicates needs datasketch: pip install 'depthgrow[dedup]', or leave it none"
                ) from None
            self._sketch = partial(datasketch.MinHash, num_perm=HASHES)
            self._index = datasketch.MinHashLSH(threshold=similarity, num_perm=HASHES)

    def seen(self, document: NDArray[np.int32], text: str) -> bool:
        """Whether it repeats one taken before (then it is counted); if not, it is taken now."""
        if _digest(document) in self._tokens:
            self.exact += 1
            return True
        if self._index is not None and self._index.query(self._sketched(text)):
            self.near += 1
            return True
        self.add(document)
        self.add_text(text)
        return False

    def add(self, document: NDArray[np.int32]) -> None:
        self._tokens.add(_digest(document))

    def add_text(self, text: str) -> None:
        if self._index is not None:
            self._index.insert(len(self._index.keys), self._sketched(text))

    def _sketched(self, text: str) -> Any:
        words = text.lower().split()
        sketch = self._sketch()
        sketch.update_batch([" ".join(words[i : i + GRAM]).encode() for i in range(max(1, len(words) - GRAM + 1))])
        return sketch


def _digest(document: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(document.tobytes()).digest()[:16]
