"""What a run meets outside the model: device, dtype, threads, seeds; who may stop it and who watches it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from depthgrow.files import UserError, launched

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU when there is one, else the CPU; under torchrun a rank's GPU is the one of its local rank."""
    local = os.environ.get("LOCAL_RANK") if launched() else None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if local is not None and name.startswith("cuda:"):
        raise UserError(f"train.device={name!r}: under torchrun every rank takes its own GPU; say cuda, or auto")
    if name == "cuda":
        name = f"cuda:{local or 0}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        problem = UserError(f"device {name!r} cannot be used ({first_line}); try --train.device auto")
        if 0 < torch.cuda.device_count() <= int(local or 0):
            problem.told_elsewhere = False  # a rank more than there are GPUs: the others have none to tell
        raise problem from None
    return device


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keyed_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the draw called ``name``: the same whatever was drawn before it, on any rank."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def keyed_generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(keyed_seed(seed, name))


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to repeat a run: versions, machine, threads."""
    packages = ("depthgrow", "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": sys.version.split()[0],
        "versions": versions,
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            names = [line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()


class Stop(Protocol):
    """Says whether the run is to stop at the next step."""

    @property
    def requested(self) -> bool: ...


class Stopped(Exception):
    """A signal asked the run to stop and everything it needs to go on has been saved."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Set by SIGINT, SIGTERM or (a lost terminal) SIGHUP; the loops look at it between steps. A second signal ends the
    process at once.

    at_once: what is being done, where nothing needs to be saved: the signal then raises `Stopped` on the spot.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once: str | None = None

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
        if self.at_once is not None:
            raise Stopped(self.at_once)

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        kinds = [kind for kind in STOP_SIGNALS if signal.getsignal(kind) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        previous = {kind: signal.signal(kind, self._handle) for kind in kinds}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextmanager
def stopping_at_once(stop: Stop | None, what: str) -> Iterator[None]:
    """Inside, a signal raises `Stopped` at once: for work that leaves nothing to save and has no steps.

    Not among several ranks, of which the others would wait for this one.
    """
    if not isinstance(stop, StopSignal) or launched():
        yield
        return
    if stop.requested:
        raise Stopped(what)
    stop.at_once = what
    try:
        yield
    finally:
        stop.at_once = None
    if stop.requested:  # heard while a library was catching exceptions of its own
        raise Stopped(what)


@dataclass(frozen=True)
class Work:
    """Steps a phase has still to make (``start`` .. ``steps``) and the cost of one, in any one unit."""

    cost: float
    start: int
    steps: int


Paths = dict[str, dict[str, list[str]]]  # arm -> seed -> the nodes it goes through


class Listener(Protocol):
    """Whoever shows progress. ``states`` are 'done' or 'started', by node; ``values`` are plain floats."""

    def note(self, text: str) -> None: ...

    def begin(self, work: dict[str, Work], paths: Paths, states: dict[str, str]) -> None: ...

    def progress(self, label: str, step: int, num_steps: int, values: dict[str, float]) -> None: ...
