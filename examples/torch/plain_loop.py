"""A plain training loop, with AdamW alone and with FOSI around it.

The two lines that FOSI adds are the wrapper and the refresh. The refresh takes a function that computes the loss,
without backward; here it is the loss of the batch at hand. It shows the loop on scikit-learn's digits; it is no
measurement of a gain, for which the rates of both would have to be tuned.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from fosi.torch import FOSI

digits = load_digits()
inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)


def train(with_fosi, steps=300):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if with_fosi:
        optimizer = FOSI(optimizer, model=model, k=10, alpha=0.05, warmup=20, refresh_every=50)
    refreshes = 0
    for _ in range(steps):
        rows = torch.randint(len(inputs), (256,))
        x, y = inputs[rows], labels[rows]
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if with_fosi and optimizer.refresh_due:
            optimizer.refresh(lambda x=x, y=y: loss_fn(model(x), y))
            refreshes += 1
        optimizer.step()
    with torch.no_grad():
        return loss_fn(model(inputs), labels).item(), refreshes


if __name__ == "__main__":
    alone, _ = train(with_fosi=False)
    ours, refreshes = train(with_fosi=True)
    print(f"loss after 300 steps: AdamW {alone:.4f}, FOSI-AdamW {ours:.4f} ({refreshes} refreshes)")
