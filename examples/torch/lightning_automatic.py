"""PyTorch Lightning with automatic optimization.

``configure_optimizers`` returns FOSI, and ``RefreshCallback`` refreshes it: by itself nothing would, since the
Trainer owns the loop. The callback calls ``training_step`` once more for the loss, without logging. Checkpoints hold
FOSI's state.
"""

import logging
import warnings

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fosi.torch import FOSI
from fosi.torch.lightning import RefreshCallback

# What Lightning says about this machine is not what the example is about.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        base = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return FOSI(base, model=self, k=5, warmup=10, refresh_every=20)


def train(max_epochs=6):
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        callbacks=[RefreshCallback()],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))
    return trainer


if __name__ == "__main__":
    trainer = train()
    spectrum = trainer.optimizers[0].spectrum
    print(f"loss in the last epoch: {trainer.callback_metrics['loss']:.4f} ({trainer.global_step} steps)")
    print("largest eigenvalues:", ", ".join(f"{x:.2f}" for x in spectrum.eigenvalues.tolist()))
