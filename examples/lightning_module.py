"""Lightning: configure_optimizers, metrics in the trainer's loggers, checkpoint and resume.

Run `python examples/lightning_module.py`.
"""

import lightning as L
import torch
import toy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from cachemuon import CacheMuon, param_groups


class Module(L.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model, self.steps = toy.GPT(), steps

    def training_step(self, batch, number):
        loss = toy.loss_of(self.model, *batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = CacheMuon(param_groups(self.model, adam=dict(lr=2e-3)), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LogMetrics(L.Callback):
    """Logs what the optimizer did since the last time, as often as the trainer logs."""

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = trainer.optimizers[0].metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.global_step)


def make(folder: str, steps: int) -> L.Trainer:
    # By steps, not by epochs: from a checkpoint of an epoch's end Lightning goes on with one batch too many.
    saved = dict(every_n_train_steps=steps // 2, save_top_k=-1, enable_version_counter=False)
    return L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=CSVLogger(folder),
        callbacks=[LogMetrics(), ModelCheckpoint(f"{folder}/checkpoints", "{step}", **saved)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(folder: str = "runs/lightning", steps: int = 20) -> dict:
    batches = map(toy.batch, range(steps // 2))  # so that there are two epochs
    data = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
    loader = DataLoader(data, batch_size=8)
    trainer, module = make(folder, steps), Module(steps)
    trainer.fit(module, loader)
    resumed, again = make(folder, steps), Module(steps)
    half = f"{folder}/checkpoints/step={steps // 2}.ckpt"
    resumed.fit(again, loader, ckpt_path=half, weights_only=True)

    losses = [t.callback_metrics["loss"].item() for t in (trainer, resumed)]
    stats = trainer.optimizers[0].cache_stats()
    print(f"{stats['hits']} of {stats['calls']} directions were cached; metrics in {trainer.logger.log_dir}")
    print(f"last loss {losses[0]:.4f}; resumed at step {steps // 2}: {losses[1]:.4f}")
    return {"losses": losses, "stats": stats, "modules": (module, again), "logs": trainer.logger.log_dir}


if __name__ == "__main__":
    main()
