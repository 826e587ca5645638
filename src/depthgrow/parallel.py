"""One process or many: the ranks that torchrun started, what they must agree on, and how a model is spread over them.

    torchrun --nproc-per-node N -m depthgrow study RECIPE

Without torchrun every function here is the identity, so that callers have one path. Under it a student is sharded by
FSDP2 (`fully_shard`): each decoder layer, the embedding and the head apart; gradients are summed over ranks, never
averaged, since the loss is already divided by the global batch's tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from depthgrow.files import UserError, launched

T = TypeVar("T")

# of a phase, for compiling to repay itself: it takes up to one minute and gains about a tenth (docs/performance.md)
COMPILER_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
COMPILE_SECONDS, COMPILE_STEPS = 600.0, 100
KEEP_GATHERED = 16 * 2**30  # bytes of a whole student's weights


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Inside, this process is one of torchrun's ranks; without torchrun nothing happens."""
    if not launched():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    except UserError as error:
        # an error that rank 0 did not hand out may be this rank's alone
        error.told_elsewhere = bool(error.told_elsewhere)
        raise
    finally:
        dist.destroy_process_group()


def world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if sharded() else 0


def sharded() -> bool:
    """Whether there are several ranks; one rank works as a process without torchrun does."""
    return world() > 1


def first() -> bool:
    """The rank that writes files and talks."""
    return rank() == 0


def on_first(action: Callable[[], T]) -> T:
    """What ``action`` returns on rank 0, the only one to call it; what it raises there is raised on every rank."""
    if not sharded():
        return action()
    told: list[Any] = [None, None]
    if first():
        try:
            told[0] = action()
        except Exception as error:
            told[1] = error
    dist.broadcast_object_list(told)
    if told[1] is not None:
        told[1].told_elsewhere = not first()
        raise told[1]
    return told[0]


@contextmanager
def on_first_held(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """What rank 0 enters, until all ranks have left; a failure to enter is raised on every rank."""
    with ExitStack() as held:
        on_first(lambda: held.enter_context(enter()))
        yield
        any_rank(False)  # nobody is still inside


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on some rank."""
    return bool(max_ranks(torch.tensor(int(flag))))


def sum_ranks(x: Tensor) -> Tensor:
    """The sum of ``x`` over ranks, in place."""
    if sharded():
        dist.all_reduce(x)
    return x


def max_ranks(x: Tensor) -> Tensor:
    """The largest of every element over ranks, in place."""
    if sharded():
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def set_layers(student: Any, *, recompute: bool, compiled: bool) -> None:
    """How a student's layers run, from now on.

    Args:
        recompute: layers keep their input only and run again in the backward pass (activation checkpointing).
        compiled: by `torch.compile`; layers share its graphs (one a kind of pass), whatever the number of tokens.
    """
    for layer in student.layers:
        layer.__dict__.pop("forward", None)  # that of its class again
        if compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def settle_layers(
    student: Any,
    compiled: str,
    begun: bool | None,
    steps: int,
    seconds_a_step: Callable[[int], float],
    *,
    recompute: bool,
    tell: Callable[[str], None],
) -> bool:
    """Settle whether a student's layers run compiled for a phase of ``steps``; returns it.

    Args:
        compiled: 'true', 'false', or 'auto': where a long phase measures faster with it, on this machine.
        begun: what was settled when the phase began, if it did: 'auto' keeps to it.
        seconds_a_step: the fastest of so many forward and backward passes, the same on all ranks.

    Raises:
        UserError: the compiler fails where it was asked for, or on a rank: its sharded layers cannot be used any more.
    """
    set_layers(student, recompute=recompute, compiled=False)
    if compiled != "false" and any(os.environ.get(name) == "1" for name in COMPILER_OFF):
        if compiled == "true":
            raise UserError(
                f"train.compile=true, but the environment turns the compiler off ({' or '.join(COMPILER_OFF)} is 1); "
                "unset one of the two"
            )
        return False
    if compiled == "false" or (compiled == "auto" and begun is False):
        return False
    plain = math.inf
    if compiled == "auto" and begun is None:
        if steps < COMPILE_STEPS:
            return False
        for passes in (1, 3):  # the first is a cold one: too slow to say yes by, not to say no
            plain = seconds_a_step(passes)
            if plain * steps < COMPILE_SECONDS:
                return False
    try:
        set_layers(student, recompute=recompute, compiled=True)
        seconds = seconds_a_step(1 if plain == math.inf else 3)
    except UserError:
        raise
    except Exception as error:
        reason = f"torch.compile failed: {' '.join(str(error).split())[:160]}"
        if compiled == "true" or sharded():
            problem = UserError(f"{reason}; run again with --train.compile false")
            problem.told_elsewhere = False
            raise problem from error
        tell(f"layers not compiled ({reason})")
        pays = False
    else:
        pays = seconds < plain
        if plain < math.inf:
            tell(f"layers {'' if pays else 'not '}compiled ({seconds:.2f} s a step against {plain:.2f} s)")
    if not pays:
        set_layers(student, recompute=recompute, compiled=False)
    return pays


def spread(student: Any, device: torch.device) -> None:
    """Put a student on the device and, under torchrun, shard it over the ranks; parameters keep their names.

    Weights are gathered and gradients summed in float32; the products' dtype is autocast's affair, as in one process.
    """
    if not sharded():
        student.to(device)
        return
    mesh = init_device_mesh(device.type, (world(),))
    # small enough to stay gathered from the forward to the backward pass, which saves a second gathering
    large = sum(p.nbytes for p in student.parameters()) > KEEP_GATHERED
    for part in (*student.layers, student.embed_tokens, student.lm_head):
        fully_shard(part, mesh=mesh, reshard_after_forward=large)
    fully_shard(student, mesh=mesh)
    for module in student.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def own_part(x: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient, sharing its memory; anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def cut_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has whole, cut as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def whole(x: Tensor, like: Tensor | None = None) -> Tensor:
    """The tensor of which ``x`` is this rank's part (cut as ``like`` is), on every rank; all ranks must call this."""
    if isinstance(like, DTensor):
        x = DTensor.from_local(
            x, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return x.full_tensor() if isinstance(x, DTensor) else x


def collected(tensors: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, Tensor]:
    """(name, this rank's part, the parameter it is cut like) as whole tensors on the CPU: on rank 0, nothing elsewhere."""
    found = {}
    for name, part, like in tensors:
        value = whole(part.detach(), like if part.shape == own_part(like).shape else None)
        if first():
            found[name] = value.detach().cpu()
    return found


def share(sizes: Iterable[int], ranks: int) -> list[list[int]]:
    """Places 0, 1, .. dealt out so that each rank's sizes sum to nearly the same: the largest first, to the lightest."""
    sizes, loads = list(sizes), [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[place]
        dealt[lightest].append(place)
    return dealt
