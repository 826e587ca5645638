"""Which tokens a step sees: a pure function of (config, seed, position). There is no iterator to save or restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from depthgrow.curriculum import DataPosition
from depthgrow.data.tokens import TokenizedDocuments
from depthgrow.files import UserError
from depthgrow.parallel import share
from depthgrow.runtime import keyed_seed


@dataclass(frozen=True)
class MicroBatch:
    """Documents laid end to end: ``label_N[i]`` is the token after ``ids_N[i]``; ``lengths`` (in targets) sum to N."""

    document_ids: list[int]
    lengths: list[int]
    ids_N: Tensor
    label_N: Tensor

    @property
    def num_targets(self) -> int:
        return len(self.label_N)

    def to(self, device: torch.device) -> MicroBatch:
        ids_N, label_N = (x.to(device, non_blocking=True) for x in (self.ids_N, self.label_N))
        return MicroBatch(self.document_ids, self.lengths, ids_N, label_N)


def pack(documents: TokenizedDocuments, indices: Sequence[int]) -> MicroBatch:
    """The documents ``indices`` as one micro-batch, which may be empty."""
    rows = [torch.from_numpy(np.asarray(documents[i], dtype=np.int64)) for i in indices]
    nothing = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        document_ids=list(indices),
        lengths=[len(row) - 1 for row in rows],
        ids_N=torch.cat([nothing, *(row[:-1] for row in rows)]),
        label_N=torch.cat([nothing, *(row[1:] for row in rows)]),
    )


def group_by_length(documents: TokenizedDocuments, indices: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split ``indices`` into groups of near-equal length, each at most ``max_tokens`` once padded (or one document)."""
    lengths = documents.num_targets
    group: list[int] = []
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        if group and (len(group) + 1) * lengths[group[0]] > max_tokens:
            yield group
            group = []
        group.append(int(index))
    if group:
        yield group


class Batches:
    """Global batches of a fixed number of documents from shards of a tokenized corpus.

    Shard s holds documents ``s*shard_documents ..`` in an order keyed by (seed, s); batch b of it takes the next
    ``batch_documents`` of that order, wrapping at the shard's end.
    """

    def __init__(
        self, documents: TokenizedDocuments, *, shard_documents: int, batch_documents: int, micro_tokens: int, seed: int
    ):
        if shard_documents < batch_documents:
            raise UserError(f"a shard of {shard_documents} documents is smaller than a batch of {batch_documents}")
        self.documents, self.seed = documents, seed
        self.shard_documents, self.batch_documents, self.micro_tokens = shard_documents, batch_documents, micro_tokens
        self._orders: dict[int, np.ndarray] = {}

    def document_ids(self, position: DataPosition) -> list[int]:
        """The documents of the global batch at ``position``, in stream order."""
        if (position.shard + 1) * self.shard_documents > len(self.documents):
            raise UserError(f"shard {position.shard} lies beyond the {len(self.documents)} training documents")
        if position.shard not in self._orders:
            rng = np.random.default_rng(keyed_seed(self.seed, f"shard {position.shard} order"))
            self._orders[position.shard] = rng.permutation(self.shard_documents)
        places = (position.batch * self.batch_documents + np.arange(self.batch_documents)) % self.shard_documents
        return [int(i) + position.shard * self.shard_documents for i in self._orders[position.shard][places]]

    def lengths(self, position: DataPosition) -> list[int]:
        """Target tokens of every document of a global batch; their sum is the loss's denominator."""
        return [len(self.documents[i]) - 1 for i in self.document_ids(position)]

    def global_batch(self, position: DataPosition, rank: int = 0, ranks: int = 1) -> list[MicroBatch]:
        """A rank's share of the batch, in micro-batches of near-equal document lengths; all ranks get as many of them,
        so that their collective passes match: one that has fewer is given empty ones."""
        indices = self.document_ids(position)
        dealt = [[indices[i] for i in places] for places in share(self.lengths(position), ranks)]
        groups = [list(group_by_length(self.documents, own, self.micro_tokens)) for own in dealt]
        idle: list[list[int]] = [[]] * (max(map(len, groups)) - len(groups[rank]))
        return [pack(self.documents, group) for group in groups[rank] + idle]
