"""The budget ledger: tokens, active-layer tokens and FLOPs, in closed form for a plan and counted for a run."""

from __future__ import annotations

from dataclasses import dataclass

from depthgrow.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Which products a training step makes.

    layers: run forward; trained: of these, the ones whose weights get a gradient; passed: frozen ones that a gradient
    crosses on its way to something trained below; input_gradient: whether the lowest trained layer passes a gradient on to
    what it reads; head_trained: the head gets a gradient; teacher_logits: the teacher's head is applied to its hidden
    states (not where its most probable tokens come from a cache); teacher_layers: run forward in the step (a live
    teacher's; 0 where a cache holds its hidden states).
    """

    layers: int
    trained: int
    passed: int = 0
    input_gradient: bool = True
    head_trained: bool = True
    teacher_logits: bool = True
    teacher_layers: int = 0


@dataclass(frozen=True)
class Flops:
    """Floating-point operations (a multiply-add is two) of matrix products; element-wise work is left out.

    Attention counts the causal half of its products, forward and twice that backward, whatever a kernel recomputes.
    """

    layer_per_token: int
    head_per_token: int
    attention_per_pair: int
    qkv_per_token: int

    @classmethod
    def of(cls, arch: Architecture) -> Flops:
        heads = arch.num_heads + 2 * arch.num_kv_heads
        return cls(
            layer_per_token=2 * arch.layer_maps(),
            head_per_token=2 * arch.vocab_size * arch.hidden_size,
            attention_per_pair=4 * arch.num_heads * arch.head_dim,
            qkv_per_token=2 * arch.hidden_size * heads * arch.head_dim,
        )

    def forward(self, tokens: float, pairs: float, layers: int) -> float:
        """One forward pass through ``layers`` layers. pairs: sum over documents of n(n+1)/2 causal query-key pairs."""
        return layers * (tokens * self.layer_per_token + pairs * self.attention_per_pair)

    def student(self, tokens: float, pairs: float, work: StepWork) -> float:
        """The student's products in one step: forward, backward, and its head.

        A trained layer costs twice its forward pass backward: gradients of weights and of inputs. A frozen layer that a
        gradient crosses costs its inputs' gradients: the maps once, attention twice.
        """
        backward = 2 * self.forward(tokens, pairs, work.trained)
        backward += work.passed * (tokens * self.layer_per_token + 2 * pairs * self.attention_per_pair)
        if not work.input_gradient:
            backward -= tokens * self.qkv_per_token
        head = tokens * self.head_per_token * (2 + work.head_trained)
        return self.forward(tokens, pairs, work.layers) + backward + head

    def teacher(self, tokens: float, pairs: float, work: StepWork) -> float:
        """The teacher's products in one step: its logits, and its layers where it is live."""
        logits = tokens * self.head_per_token * work.teacher_logits
        return self.forward(tokens, pairs, work.teacher_layers) + logits


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
        spent: 'unique_tokens', 'total_tokens', 'active_layer_tokens', 'flops' of the other run (its student's), and its
        'pairs'.
        steps: how many steps the other run made.
    """
    tokens, pairs = spent["total_tokens"] / steps, spent["pairs"] / steps
    cost = {
        "unique_tokens": tokens,
        "total_tokens": tokens,
        "active_layer_tokens": tokens * layers,
        "flops": flops.student(tokens, pairs, StepWork(layers=layers, trained=layers)),
    }
    numbers = {name: max(1, round(spent[name] / cost[name])) for name in cost}
    return [Match(name, spent[name], numbers[name], numbers[name] * cost[name]) for name in cost]


def causal_pairs(lengths: list[int]) -> int:
    """Query-key pairs of causal attention inside each document."""
    return sum(n * (n + 1) // 2 for n in lengths)
