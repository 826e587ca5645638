"""How long documents are expected to be, for a plan: before any is read, from what is known of a text's kind.

The number of characters of a document is taken as log-normal, and every document is cut at ``max_tokens``. The mean alone
would not do: attention costs grow with the square of a length, so a text of very different lengths costs more than one of
equal lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

# (mean characters of a document, standard deviation of their logarithm). Of wiki and docstrings measured on the texts
# themselves; of FineWeb-Edu fitted to the published mean of 972.75 target tokens under a cut at 8,192 (3.1128e9 over
# 50,000 steps of 64 documents), with a spread that is an estimate.
KNOWN_TEXTS = {"wiki": (500.0, 0.452), "docstrings": (542.0, 0.632), "hf:HuggingFaceFW/fineweb-edu": (4152.6, 1.0)}
UNKNOWN_TEXT = (2000.0, 0.9)
CHARACTERS_PER_TOKEN = {"laptop": 2.94}  # of the shipped teacher's 2,048-token vocabulary
LARGE_VOCABULARY = 4.2  # characters a token, of English under a vocabulary of 50,000 or more
POINTS = 1000  # quantiles that stand for the distribution


@dataclass(frozen=True)
class Lengths:
    """Means over documents of target tokens and of causal query-key pairs; ``basis`` says in words where they come from."""

    tokens: float
    pairs: float
    basis: str


def expected_lengths(corpora: Sequence[str], teacher: str, max_tokens: int) -> Lengths:
    """What documents of these corpora (taken in turn) come to under a teacher's tokenizer."""
    characters = CHARACTERS_PER_TOKEN.get(teacher, LARGE_VOCABULARY)
    quantiles = [NormalDist().inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)]
    tokens = pairs = 0.0
    unknown = []
    for spec in corpora:
        name = next((name for name in KNOWN_TEXTS if spec == name or spec.startswith((f"{name}:", f"{name}@"))), None)
        if name is None:
            unknown.append(spec)
        mean, spread = UNKNOWN_TEXT if name is None else KNOWN_TEXTS[name]
        median = mean / characters * math.exp(-(spread**2) / 2)
        cut = [min(max_tokens - 1.0, median * math.exp(spread * z)) for z in quantiles]
        tokens += sum(cut) / POINTS / len(corpora)
        pairs += sum(n * (n + 1) / 2 for n in cut) / POINTS / len(corpora)
    basis = "known of this text"
    if unknown:
        basis = f"assumed, nothing is known of {', '.join(unknown)}; a prepared study's data.json has the count"
    return Lengths(tokens, pairs, basis)
