"""A training step against a plain Hugging Face loop on the same documents, to the same loss.

    python benchmarks/step.py [--recipe laptop] [--arm pre-joint] [--steps 30] [--repeats 3] [--out step.json]

Four ways to make the same steps from the same weights, one after the other, in turn, medians over the repeats:

    ours, cached   the package's own phase (`depthgrow.trainer.run_phase`), teacher targets from a warm cache
    ours, live     the same with the teacher computing at every step
    plain, live    the loop as people write it: the family's own classes for student and teacher, right-padded batches,
                   full logits, kl_div + cross_entropy over the real tokens, AdamW, clip_grad_norm_
    plain, cached  the same loop given our cached hidden states, so that it only multiplies by the teacher's head

Speed is in target tokens (padding not counted) per second over all steps but the first five. The losses of the last step
are shown: they must agree. Only pre arms have a plain counterpart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from depthgrow.config import override
from depthgrow.curriculum import DataPosition, data_start
from depthgrow.data.batches import pack
from depthgrow.metrics import read_metrics
from depthgrow.optim import learning_rate
from depthgrow.recipes import load_recipe
from depthgrow.runner import Prepared, prepare
from depthgrow.study import Node, Study, plan_tree
from depthgrow.trainer import build_student, run_phase

WARM = 5  # steps not timed


class Quiet:
    """A listener and a stop signal that do nothing."""

    requested = False

    def note(self, text: str) -> None: ...

    def begin(self, *work: Any) -> None: ...

    def progress(self, *facts: Any) -> None: ...


def ours(study: Study, prepared: Prepared, node: Node) -> tuple[float, float]:
    """Tokens a second and the last loss of a phase run by the package."""
    with tempfile.TemporaryDirectory() as folder:
        run_phase(
            node.run, prepared.materials(study, node.run.seed), Path(folder), None, stop=Quiet(), listener=Quiet()
        )
        train = [r for r in read_metrics(Path(folder) / "metrics.jsonl") if r["kind"] == "train"]
    rates = [
        (r["tokens_per_second"], sum(t["tokens"] for t in train[i - WARM + 1 : i + 1]))
        for i, r in enumerate(train)
        if "tokens_per_second" in r
    ][1:]
    return sum(tokens for _, tokens in rates) / sum(tokens / rate for rate, tokens in rates), train[-1]["loss"]


def plain(study: Study, prepared: Prepared, node: Node, cached: bool) -> tuple[float, float]:
    """The same of a plain loop."""
    from transformers import AutoModelForCausalLM

    run, device = node.run, prepared.device
    materials = prepared.materials(study, run.seed)
    start = build_student(run, materials, device)
    config = materials.arch.to_hf(len(start.layers))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    weights = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in start.state_dict().items()}
    model.load_state_dict(weights)
    model.model.embed_tokens.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = run.optim
    adamw = torch.optim.AdamW(trained, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay)
    objective, teacher = run.objective, prepared.teacher
    first = data_start(run.phases, len(run.phases) - 1)
    loss, tokens, clock = torch.zeros(()), 0, 0.0
    for step in range(run.phase.steps):
        if step == WARM:
            tokens, clock = 0, time.perf_counter()
        ids = materials.batches.document_ids(DataPosition(first.shard, first.batch + step))
        rows = [torch.from_numpy(materials.batches.documents[i].copy()).long() for i in ids]
        input_BT = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
        label_BT = torch.nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
        mask_BT = label_BT != -100
        with torch.no_grad():
            if cached:
                assert materials.train_targets is not None
                hidden = materials.train_targets(pack(materials.batches.documents, ids)).hidden_ND
                padded = torch.nn.utils.rnn.pad_sequence(
                    list(hidden.split([len(r) - 1 for r in rows])), batch_first=True
                )
                target_BTV = padded @ teacher.head_VD.T
            else:
                target_BTV = teacher.model(input_ids=input_BT, attention_mask=mask_BT.long()).logits
        logit_BTV = model(input_ids=input_BT, attention_mask=mask_BT.long()).logits
        kl = F.kl_div(logit_BTV.log_softmax(-1), target_BTV.log_softmax(-1), reduction="none", log_target=True).sum(-1)
        kl = (kl * mask_BT).sum() / mask_BT.sum()
        ce = F.cross_entropy(logit_BTV.flatten(0, 1), label_BT.flatten())
        loss = objective.alpha * kl + objective.gamma * ce
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip_norm)
        adamw.param_groups[0]["lr"] = learning_rate(optim, step, run.phase.steps)
        adamw.step()
        adamw.zero_grad()
        tokens += int(mask_BT.sum())
    return tokens / (time.perf_counter() - clock), loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="laptop")
    parser.add_argument("--arm", default="pre-joint")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    changes = {"arms": [options.arm], "train.steps_per_phase": options.steps, "train.threads": options.threads}
    changes |= {"train.log_every": WARM, "optim.warmup_steps": WARM, "data.held_out_documents": 16}
    changes |= {"train.eval_every": options.steps, "train.checkpoint_every": options.steps}
    cached = override(load_recipe(options.recipe), changes)
    live = override(cached, {"teacher.targets": "live"})
    ready = {study.teacher.targets: (study, prepare(study, Quiet())) for study in (cached, live)}
    ready["cache"][1].fill(cached, Quiet(), Quiet())
    node = next(iter(plan_tree(cached, ready["cache"][1].facts).nodes.values()))
    ways = {
        "ours, cached": lambda: ours(*ready["cache"], node),
        "ours, live": lambda: ours(*ready["live"], node),
        "plain, live": lambda: plain(*ready["cache"], node, cached=False),
        "plain, cached": lambda: plain(*ready["cache"], node, cached=True),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            found[name].append(way())
    speed = {name: statistics.median(rate for rate, _ in runs) for name, runs in found.items()}
    print(
        f"{options.recipe}, {options.arm}, {options.steps} steps, {options.threads} thread(s), {options.repeats} repeats"
    )
    print(f"{'':14} tokens/s  of plain, live   last loss")
    for name, runs in found.items():
        print(f"{name:14} {speed[name]:8.0f} {speed[name] / speed['plain, live']:15.2f} {runs[-1][1]:11.6f}")
    if options.out:
        rows = {name: [{"tokens_per_second": r, "last_loss": loss} for r, loss in runs] for name, runs in found.items()}
        options.out.write_text(
            json.dumps({"options": vars(options) | {"out": str(options.out)}, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
