"""FOSI for PyTorch where JAX is not installed: `make test-backends` runs this in an environment of its own."""

from regression import LEARNING_RATE, MOMENTUM, OPTIONS, STEPS, assert_missing, check_and_report, data

assert_missing("jax", "jaxlib", "optax", "flax", "lightning", "pytorch_lightning", "accelerate")

import torch

import fosi
from fosi.torch import FOSI

X, Y = map(torch.from_numpy, data())


def new_model():
    """A linear model that starts at 0, and plain SGD for it."""
    model = torch.nn.Linear(X.shape[1], 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def train(model, opt):
    """Returns the last loss and how many refreshes were due on the way."""

    def loss_fn():
        return torch.nn.functional.mse_loss(model(X).squeeze(1), Y)

    refreshes = 0
    for _ in range(STEPS):
        opt.zero_grad()
        loss_fn().backward()
        if getattr(opt, "refresh_due", False):  # the base has none
            opt.refresh(loss_fn)
            refreshes += 1
        opt.step()
    return loss_fn().item(), refreshes


base, _ = train(*new_model())
model, sgd = new_model()
opt = FOSI(sgd, model=model, **OPTIONS)
with_fosi, refreshes = train(model, opt)
assert opt.spectrum is not None
assert fosi.schedule.num_matvecs(10, 0, 1000) == 40
check_and_report("torch", torch.__version__, base, with_fosi, refreshes)
