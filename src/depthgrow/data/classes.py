"""Which tokens bound documents and which only separate words: massive activations tend to sit on both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from depthgrow.config import fingerprint


@dataclass(frozen=True)
class TokenClasses:
    """special_ids: the tokenizer's special tokens; delimiter_ids: tokens whose text has no letter or digit and is not
    only spaces (newlines, punctuation, brackets); text: a token's own text."""

    special_ids: list[int]
    delimiter_ids: list[int]
    text: Callable[[int], str]

    @property
    def fingerprint(self) -> str:
        """Of what decides diagnostics and interventions: which tokens belong to which class."""
        return fingerprint([self.special_ids, self.delimiter_ids])

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int) -> TokenClasses:
        """Read from a Hugging Face tokenizer, for ids below ``vocab_size``."""
        special = sorted(i for i in tokenizer.all_special_ids if i < vocab_size)
        texts = tokenizer.batch_decode([[i] for i in range(vocab_size)])
        # "\ufffd" is a piece of a character of several bytes: not text by itself
        delimiters = [
            i
            for i, text in enumerate(texts)
            if i not in special and text.strip(" ") and "\ufffd" not in text and not any(c.isalnum() for c in text)
        ]
        return cls(special, delimiters, lambda token: texts[token])
