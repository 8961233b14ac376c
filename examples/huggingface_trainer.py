"""Hugging Face Trainer: three ways to hand it the optimizer, metrics among its logs, resuming.

Run `python examples/huggingface_trainer.py`.

`optimizer_cls_and_kwargs=(CacheMuon, {"lr": 0.02})` ends in an error: Trainer puts all parameters into two
groups of its own, biases and norms among them, and Muon is for matrices. With "params" or a factory it does
not.
"""

import torch
import toy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from cachemuon import CacheMuon, param_groups


class Factory:
    """Trainer makes one of these, and calls it with the model that it is about to train."""

    def __call__(self, model: torch.nn.Module, lr: float, adam_lr: float) -> CacheMuon:
        return CacheMuon(param_groups(model, adam=dict(lr=adam_lr)), lr=lr)


class LogMetrics(TrainerCallback):
    """Logs what the optimizer did as often as the loss, to wherever Trainer reports."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        if control.should_log:
            muon = getattr(optimizer, "optimizer", optimizer)  # out of accelerate's wrapper
            self.trainer.log(muon.metrics())
            control.should_log = True  # logging has put it out, and the loss is still to come


def make(way: str, folder: str, steps: int) -> Trainer:
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=toy.VOCABULARY, **sizes))
    groups = param_groups(model, adam=dict(lr=2e-3))
    handed = {
        "optimizers": {"optimizers": (CacheMuon(groups, lr=0.02), None)},
        "params": {"optimizer_cls_and_kwargs": (CacheMuon, {"params": groups, "lr": 0.02})},
        "factory": {"optimizer_cls_and_kwargs": (Factory, {"lr": 0.02, "adam_lr": 2e-3})},
    }
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="cosine",  # it scales the lr of each group; `learning_rate` is not used
        logging_steps=5,
        save_steps=steps // 2,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    texts = [{"input_ids": text, "labels": text} for number in range(16) for text in toy.batch(number)[0]]
    trainer = Trainer(model, arguments, train_dataset=texts, **handed[way])
    trainer.add_callback(LogMetrics(trainer))
    return trainer


def main(folder: str = "runs/trainer", way: str = "factory", steps: int = 20) -> dict:
    trainer = make(way, folder, steps)
    trainer.train()
    resumed = make(way, folder, steps)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}")
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    hits = [entry["muon/hit_rate"] for entry in history if "muon/hit_rate" in entry]
    print("losses", losses, "hit rates", [round(rate, 2) for rate in hits])
    return {"losses": losses, "hits": hits, "models": (trainer.model, resumed.model)}


if __name__ == "__main__":
    main()
