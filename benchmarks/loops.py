"""Other people's loops on the same documents, from the same weights, to the same loss.

``plain`` is the loop as people write it: the family's own Hugging Face classes for student and teacher, right-padded
batches, full logits, ``kl_div`` + ``cross_entropy`` over the real tokens, AdamW, ``clip_grad_norm_``. ``liger`` puts Liger's
chunked distillation loss into it, ``trl`` is TRL's GKD trainer with off-policy settings (lmbda 0, beta 0: forward KL; it has
no cross-entropy term, so its objective is compared with ours at alpha 1, gamma 0).
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from common import WARM
from depthgrow.curriculum import DataPosition, data_start
from depthgrow.data.batches import pack
from depthgrow.optim import learning_rate
from depthgrow.phase import build_student
from depthgrow.prepare import Prepared
from depthgrow.study import Node, Study


def hf_student(prepared: Prepared, node: Node) -> Any:
    """The node's student as it starts, as a Hugging Face model of the teacher's family."""
    materials = prepared.materials(STUDY[0], node.run.seed)
    start = build_student(node.run, materials, prepared.device)
    config = prepared.teacher.arch.to_hf(len(start.layers))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(prepared.device)
    model.load_state_dict({k if k.startswith("lm_head") else f"model.{k}": p for k, p in start.state_dict().items()})
    model.model.embed_tokens.requires_grad_(False)
    return model


STUDY: list[Study] = []  # the study under way


def padded_batches(study: Study, prepared: Prepared, node: Node) -> list[tuple[list[int], Tensor, Tensor]]:
    """(document ids, ids_BT, label_BT) of every step, right-padded."""
    materials = prepared.materials(study, node.run.seed)
    first = data_start(node.run.phases, len(node.run.phases) - 1)
    found = []
    for step in range(node.run.phase.steps):
        chosen = materials.batches.document_ids(DataPosition(first.shard, first.batch + step))
        rows = [torch.from_numpy(materials.batches.documents[i].copy()).long() for i in chosen]
        input_BT = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
        label_BT = torch.nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
        found.append((chosen, input_BT, label_BT))
    return found


def plain(study: Study, prepared: Prepared, node: Node, *, cached: bool, liger: bool = False) -> dict[str, float]:
    """Tokens a second and the last loss of the plain loop, with the teacher live or with our cached hidden states."""
    STUDY[:] = [study]
    run, teacher = node.run, prepared.teacher
    materials, model = prepared.materials(study, run.seed), hf_student(prepared, node)
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = run.optim
    adamw = torch.optim.AdamW(trained, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay)
    fused = liger_loss(study) if liger else None
    losses: list[Tensor] = []
    tokens, clock = 0, time.perf_counter()
    for step, (chosen, input_BT, label_BT) in enumerate(padded_batches(study, prepared, node)):
        if step == WARM:
            tokens, clock = 0, time.perf_counter()
        input_BT, label_BT = input_BT.to(prepared.device), label_BT.to(prepared.device)
        mask_BT = label_BT != -100
        inputs = {"input_ids": input_BT, "attention_mask": mask_BT.long(), "use_cache": False}
        with torch.no_grad():
            if cached:
                assert materials.train_targets is not None
                found: Any = materials.train_targets(pack(materials.batches.documents, chosen))
                parts = found.hidden_ND.split(mask_BT.sum(1).tolist())
                target_BTD = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
            else:
                target_BTD = teacher.model.model(**inputs).last_hidden_state
        if fused is not None:
            hidden_BTD = model.model(**inputs).last_hidden_state
            flat = (hidden_BTD.flatten(0, 1), model.lm_head.weight, target_BTD.flatten(0, 1), teacher.head_VD)
            loss = fused(*flat, label_BT.flatten())
        else:
            target_BTV = target_BTD @ teacher.head_VD.T
            logit_BTV = model(**inputs).logits
            kl_BTV = F.kl_div(logit_BTV.log_softmax(-1), target_BTV.log_softmax(-1), reduction="none", log_target=True)
            kl = (kl_BTV.sum(-1) * mask_BT).sum() / mask_BT.sum()
            ce = F.cross_entropy(logit_BTV.flatten(0, 1), label_BT.flatten())
            loss = run.objective.alpha * kl + run.objective.gamma * ce
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.clip_norm)
        adamw.param_groups[0]["lr"] = learning_rate(optim, step, run.phase.steps)
        adamw.step()
        adamw.zero_grad()
        tokens += int(mask_BT.sum())
        losses.append(loss.detach())
    rate = tokens / (time.perf_counter() - clock)
    return {"tokens_per_second": rate, "first_loss": losses[0].item(), "last_loss": losses[-1].item()}


def liger_loss(study: Study) -> Any:
    """Liger's chunked KL + CE, called as (student hidden, head, teacher hidden, head, labels)."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    objective = study.objective
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=objective.gamma, weight_soft_loss=objective.alpha, beta=0.0)

    def call(h_ND: Tensor, head_VD: Tensor, target_ND: Tensor, target_VD: Tensor, label_N: Tensor) -> Tensor:
        return loss(h_ND, head_VD, target_ND, target_VD, label_N)

    return call


def trl(study: Study, prepared: Prepared, node: Node) -> dict[str, float]:
    """The same of TRL's trainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    STUDY[:] = [study]
    run, batches = node.run, padded_batches(study, prepared, node)
    optim, marks = run.optim, {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            marks[state.global_step] = time.perf_counter()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        # the last input token has no label, so the trainer's own shift leaves exactly the pairs of the other loops
        _, input_BT, label_BT = batches[rows[0]["step"]]
        last_B1 = label_BT.gather(1, (label_BT != -100).sum(1, keepdim=True) - 1)
        whole_BT = F.pad(input_BT, (0, 1)).scatter(1, (label_BT != -100).sum(1, keepdim=True), last_B1)
        kept_BT = F.pad(label_BT != -100, (1, 0), value=True)
        return {
            "input_ids": whole_BT,
            "attention_mask": kept_BT.long(),
            "labels": whole_BT.masked_fill(~kept_BT, -100),
            "prompts": whole_BT[:, :1],
            "prompt_attention_mask": kept_BT[:, :1].long(),
        }

    losses: list[float] = []

    class Trainer(GKDTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            value = super().compute_loss(*args, **kwargs)
            losses.append((value[0] if isinstance(value, tuple) else value).item())
            return value

    with tempfile.TemporaryDirectory() as folder:
        config = GKDConfig(
            output_dir=folder,
            lmbda=0.0,
            beta=0.0,
            temperature=1.0,
            max_steps=run.phase.steps,
            per_device_train_batch_size=1,
            learning_rate=optim.peak_lr,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_epsilon=optim.eps,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.clip_norm,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=prepared.device.type == "cpu",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = Trainer(
            model=hf_student(prepared, node),
            teacher_model=prepared.teacher.model,
            args=config,
            processing_class=prepared.teacher.tokenizer,
            data_collator=collate,
            train_dataset=Dataset.from_list([{"step": i, "input_ids": [0]} for i in range(len(batches))]),
            callbacks=[Clock()],
        )
        trainer.train()
    tokens = sum(int((label_BT != -100).sum()) for _, _, label_BT in batches[WARM:])
    # its learning rate is constant here: only the first loss can be compared
    return {"tokens_per_second": tokens / (marks[len(batches)] - marks[WARM]), "first_loss": losses[0]}
