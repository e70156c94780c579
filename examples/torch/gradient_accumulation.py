"""Gradient accumulation: one step for the gradients of four micro-batches.

FOSI counts steps, not backward passes, so nothing changes in the loop. The refresh may take one micro-batch, or, as
here, all of the step's: a sequence of functions stands for the mean of their losses, one graph in memory at a time.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from fosi.torch import FOSI

digits = load_digits()
inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
loss_fn = nn.CrossEntropyLoss()


def train(micro_batches, steps=60):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = FOSI(base, model=model, k=5, warmup=10, refresh_every=25)
    refreshes = 0
    for _ in range(steps):
        rows = torch.randint(len(inputs), (256,))
        parts = list(zip(inputs[rows].chunk(micro_batches), labels[rows].chunk(micro_batches), strict=True))
        optimizer.zero_grad()
        for x, y in parts:
            (loss_fn(model(x), y) / micro_batches).backward()
        if optimizer.refresh_due:
            optimizer.refresh([lambda x=x, y=y: loss_fn(model(x), y) for x, y in parts])
            refreshes += 1
        optimizer.step()
    with torch.no_grad():
        return loss_fn(model(inputs), labels).item(), refreshes


if __name__ == "__main__":
    whole, _ = train(micro_batches=1)
    parts, refreshes = train(micro_batches=4)
    print(f"loss after 60 steps: batches of 256 {whole:.5f}, four times 64 {parts:.5f} ({refreshes} refreshes)")
