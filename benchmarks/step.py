"""A training step against other people's loops on the same documents, to the same loss.

    python benchmarks/step.py [--recipe laptop-deep] [--arm pre-joint] [--steps 24] [--repeats 3] [--peers plain,liger,trl]

One phase (the arm's last) is trained from the same weights, one way after the other, in turn; medians over the repeats:

    ours, cached / live     `depthgrow.trainer.run_phase`, teacher targets from a warm cache / computed at every step
    ours, compiled          from the cache, with `train.compile`; compiling itself is not counted
    plain, live / cached    a plain Hugging Face loop (see loops.py) / the same given our cached hidden states
    liger, live / cached    the same with Liger's chunked loss, where it is installed
    trl, live               TRL's GKD trainer, where it is installed; it has no CE term: ours is repeated at alpha 1, gamma 0

Speed is in target tokens (padding not counted) per second over all steps but the first four. Losses of the first and the
last step must agree (of the first alone for TRL, whose learning rate is constant). Only pre arms have a counterpart.
"""

from __future__ import annotations

import importlib.util

import torch
import transformers

import loops
from common import arguments, in_turn, last_node, ready, save, short, show, timed_phase
from depthgrow.config import override


def main() -> None:
    options = arguments(
        __doc__ or "", recipe="laptop-deep", arm="pre-joint", steps=24, repeats=3, threads=1, peers="plain,liger,trl"
    )
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    changes = short(options.steps) | {"arms": [options.arm], "train.threads": options.threads}
    study, prepared = ready(options.recipe, **changes | {"teacher.targets": "hidden"})
    live_study, live_prepared = ready(options.recipe, **changes | {"teacher.targets": "live"})
    node, compiled = last_node(study, prepared), override(study, {"train.compile": True})
    torch.set_num_threads(options.threads)
    ways = {
        "ours, cached": lambda: timed_phase(study, prepared, node),
        "ours, live": lambda: timed_phase(live_study, live_prepared, node),
        "ours, compiled": lambda: timed_phase(study, prepared, last_node(compiled, prepared)),
    }
    peers = options.peers.split(",")
    for name, package in (("plain", "torch"), ("liger", "liger_kernel")):
        if name in peers and importlib.util.find_spec(package):
            for cached in (False, True):
                label = f"{name}, {'cached' if cached else 'live'}"
                ways[label] = lambda cached=cached, liger=name == "liger": loops.plain(
                    study, prepared, node, cached=cached, liger=liger
                )
    if "trl" in peers and importlib.util.find_spec("trl"):
        soft = override(study, {"objective.alpha": 1.0, "objective.gamma": 0.0})
        soft_node = last_node(soft, prepared)
        ways["ours, cached, KL alone"] = lambda: timed_phase(soft, prepared, soft_node)
        ways["trl, live, KL alone"] = lambda: loops.trl(soft, prepared, soft_node)
    found = in_turn(ways, options.repeats)
    base = found.get("plain, live", found["ours, live"])["tokens_per_second"]
    show(
        f"{options.recipe}, {options.arm}, {options.steps} steps, {options.threads} thread(s), {options.repeats} repeats",
        ["", "tokens/s", "of plain, live", "first loss", "last loss", "waits for data"],
        [
            [
                name,
                f"{f['tokens_per_second']:,.0f}",
                f"{f['tokens_per_second'] / base:.2f}",
                f"{f['first_loss']:.6f}",
                f"{f['last_loss']:.6f}" if "last_loss" in f else "",
                f"{100 * f['data_wait']:.2f} %" if "data_wait" in f else "",
            ]
            for name, f in found.items()
        ],
    )
    save(options, found)


if __name__ == "__main__":
    main()
