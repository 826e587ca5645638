"""The budget ledger: tokens, active-layer tokens and FLOPs, in closed form for a plan and counted for a run."""

from __future__ import annotations

from dataclasses import dataclass

from depthgrow.architecture import Architecture


@dataclass(frozen=True)
class Flops:
    """Floating-point operations (a multiply-add is two) of matrix products; element-wise work is left out."""

    layer_per_token: int
    head_per_token: int
    attention_per_pair: int

    @classmethod
    def of(cls, arch: Architecture) -> Flops:
        return cls(
            layer_per_token=2 * arch.layer_maps(),
            head_per_token=2 * arch.vocab_size * arch.hidden_size,
            attention_per_pair=4 * arch.num_heads * arch.head_dim,
        )

    def forward(self, tokens: int, pairs: int, layers: int) -> int:
        """One forward pass through ``layers`` layers. pairs: sum over documents of n(n+1)/2 causal query-key pairs."""
        return layers * (tokens * self.layer_per_token + pairs * self.attention_per_pair)

    def train_step(
        self,
        tokens: int,
        pairs: int,
        layers: int,
        trained: int,
        *,
        passed: int = 0,
        head_trained: bool = True,
        distilled: bool = True,
    ) -> int:
        """One step's products: forward; backward through ``trained`` layers (twice their forward); through ``passed``
        frozen layers that a gradient crosses (once); the head's forward and backward, and the teacher's logits."""
        head = tokens * self.head_per_token * (2 + head_trained + distilled)
        backward = 2 * self.forward(tokens, pairs, trained) + self.forward(tokens, pairs, passed)
        return self.forward(tokens, pairs, layers) + backward + head


@dataclass(frozen=True)
class Match:
    """The number of full-depth steps that come nearest to ``target`` of ``quantity``, and what they would spend."""

    quantity: str
    target: int
    steps: int
    spent: float


def matching_joint(spent: dict[str, int], steps: int, layers: int, flops: Flops) -> list[Match]:
    """The joint runs of ``layers`` layers that spend what another run spent, one for each quantity of the budget.

    steps* = round(target / cost of one joint step), where a step reads as many tokens and pairs as the other's did.

    Args:
        spent: 'unique_tokens', 'total_tokens', 'active_layer_tokens', 'flops' of the other run, and its 'pairs'.
        steps: how many steps the other run made.
    """
    tokens, pairs = spent["total_tokens"] / steps, spent["pairs"] / steps
    cost = {
        "unique_tokens": tokens,
        "total_tokens": tokens,
        "active_layer_tokens": tokens * layers,
        "flops": flops.train_step(round(tokens), round(pairs), layers, layers),
    }
    numbers = {name: max(1, round(spent[name] / cost[name])) for name in cost}
    return [Match(name, spent[name], numbers[name], numbers[name] * cost[name]) for name in cost]


def causal_pairs(lengths: list[int]) -> int:
    """Query-key pairs of causal attention inside each document."""
    return sum(n * (n + 1) // 2 for n in lengths)
