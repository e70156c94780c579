"""Mixed precision: autocast in the forward pass and a GradScaler around the step.

The scaler takes FOSI as it takes any optimizer. The refresh switches autocast off by itself, since half precision
leaves little of a second derivative, and it wants the loss as it is, not the scaled one. Runs on a GPU if there is
one.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from fosi.torch import FOSI

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16

digits = load_digits()
inputs = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
labels = torch.tensor(digits.target, device=device)
loss_fn = nn.CrossEntropyLoss()


def train(steps=150):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = FOSI(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, k=5, warmup=20, refresh_every=50)
    scaler = torch.amp.GradScaler(device)
    refreshes = 0
    for _ in range(steps):
        rows = torch.randint(len(inputs), (256,), device=device)
        x, y = inputs[rows], labels[rows]
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        if optimizer.refresh_due:
            optimizer.refresh(lambda x=x, y=y: loss_fn(model(x), y))
            refreshes += 1
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        return loss_fn(model(inputs), labels).item(), refreshes, optimizer.spectrum


if __name__ == "__main__":
    loss, refreshes, spectrum = train()
    print(f"{device}, {dtype}: loss after 150 steps {loss:.4f} ({refreshes} refreshes)")
    print(f"{int(spectrum.accepted.sum())} of {len(spectrum.accepted)} eigenpairs in use")
