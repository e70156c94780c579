"""Hugging Face Accelerate: FOSI goes through ``accelerator.prepare`` as any optimizer does.

``prepare`` returns a wrapper that knows nothing of refreshes, so keep the FOSI you made and ask it: both are the same
optimizer. Accelerate's mixed precision puts autocast into the model's ``forward``, where the refresh cannot switch it
off: keep the ``forward`` the model had before. Accumulation and checkpoints are Accelerate's own.
"""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fosi.torch import FOSI


def train(mixed_precision="no", epochs=3):
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    fosi = FOSI(torch.optim.AdamW(model.parameters(), lr=5e-3), model=model, k=5, warmup=10, refresh_every=15)
    forward = model.forward
    model, optimizer, loader = accelerator.prepare(model, fosi, loader)
    loss_fn = nn.CrossEntropyLoss()

    losses, refreshes = [], 0
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                accelerator.backward(loss)
                if fosi.refresh_due:
                    fosi.refresh(lambda x=x, y=y: loss_fn(forward(x), y))
                    refreshes += 1
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        before = fosi.spectrum.eigenvalues
        accelerator.load_state(folder)
    assert torch.equal(fosi.spectrum.eigenvalues, before)
    return losses, refreshes


if __name__ == "__main__":
    losses, refreshes = train()
    last = losses[-29:]
    print(f"loss: first batch {losses[0]:.4f}, mean of the last epoch {sum(last) / len(last):.4f}")
    print(f"{refreshes} refreshes in {len(losses)} batches")
