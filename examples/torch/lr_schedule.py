"""A learning-rate schedule: torch's schedulers take the FOSI optimizer itself.

They set the learning rate (and OneCycleLR the momentum) in ``param_groups``, which are the base's. The Newton part
has its own rate, ``alpha``: a number, or as here a function of the step.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

from fosi.torch import FOSI

digits = load_digits()
inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
loss_fn = nn.CrossEntropyLoss()


def train(steps=150):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = FOSI(
        torch.optim.Adam(model.parameters()),
        model=model,
        k=5,
        alpha=lambda step: 0.05 * (1 + math.cos(math.pi * step / steps)) / 2,
        warmup=20,
        refresh_every=50,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    rates = []
    for _ in range(steps):
        rows = torch.randint(len(inputs), (256,))
        x, y = inputs[rows], labels[rows]
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if optimizer.refresh_due:
            optimizer.refresh(lambda x=x, y=y: loss_fn(model(x), y))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return loss_fn(model(inputs), labels).item(), rates


if __name__ == "__main__":
    loss, rates = train()
    print(f"learning rate: first {rates[0]:.1e}, highest {max(rates):.1e}, last {rates[-1]:.1e}")
    print(f"loss after {len(rates)} steps: {loss:.4f}")
