"""DeepXDE: FOSI as the optimizer of a model, with no change to DeepXDE, around Adam and around the L-BFGS after it.

The equation is u″ = f with u(0) = u(1) = 0 and the solution sin(πx) + sin(5πx)/2. DeepXDE owns the loop, so FOSI is
given the loss to take the curvature of. An optimizer made by the user gets nothing from ``compile()`` but ``decay``:
learning rate, weight decay and external variables are the base's.
"""

import os
import time

os.environ["DDE_BACKEND"] = "pytorch"  # before the import

import deepxde as dde
import numpy as np
import torch

from fosi.presets import deterministic
from fosi.torch import FOSI, FosiLBFGS
from fosi.torch.deepxde import curvature_loss

pi = np.pi
SETTINGS = {"k": 20, "num_matvecs": 60, "warmup": 200, "refresh_every": 100, "alpha": 0.1, "eps": 1.0}


def solution(x):
    return np.sin(pi * x) + np.sin(5 * pi * x) / 2


def equation(x, u):
    return dde.grad.hessian(u, x) + pi**2 * (torch.sin(pi * x) + 12.5 * torch.sin(5 * pi * x))


def build(width=32):
    dde.config.set_random_seed(0)
    interval = dde.geometry.Interval(0, 1)
    ends = dde.icbc.DirichletBC(interval, lambda x: 0, lambda x, on_boundary: on_boundary)
    data = dde.data.PDE(interval, equation, ends, num_domain=64, num_boundary=2, solution=solution, num_test=200)
    net = dde.nn.FNN([1, width, width, 1], "tanh", "Glorot normal")
    return dde.Model(data, net), net


def train(model, optimizer, iterations=None):
    """The loss, the relative error and the seconds."""
    began = time.perf_counter()
    model.compile(optimizer, metrics=["l2 relative error"], loss_weights=[1, 1000], verbose=0)
    model.train(iterations=iterations, display_every=10**6, verbose=0)
    state = model.train_state
    return float(np.sum(state.loss_train)), float(state.metrics_test[0]), time.perf_counter() - began


def main(iterations=1500, polish=1000, lr=3e-3):
    dde.optimizers.set_LBFGS_options(maxiter=polish)
    results = {"L-BFGS alone": train(build()[0], "L-BFGS")}
    for name, length in (
        ("Adam", iterations),
        ("Adam, twice as long", 2 * iterations),
        ("FOSI around Adam", iterations),
    ):
        model, net = build()
        optimizer = torch.optim.Adam(net.parameters(), lr=lr)
        if name.startswith("FOSI"):
            optimizer = FOSI(optimizer, model=net, curvature_loss=curvature_loss(model), **SETTINGS)  # new
        results[name] = train(model, optimizer, length)
        results[f"{name}, then L-BFGS"] = train(model, "L-BFGS")
    model, net = build()
    train(model, torch.optim.Adam(net.parameters(), lr=lr), iterations)
    last = FosiLBFGS(net.parameters(), model=net, curvature_loss=curvature_loss(model), **deterministic("lbfgs"))  # new
    calls = polish // last.defaults["max_iter"]  # an iteration of DeepXDE's is a call of step(), 20 of L-BFGS
    results["Adam, then FOSI around L-BFGS"] = train(model, last, calls)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small for more
    for name, (loss, error, seconds) in main().items():
        print(f"{name:34} loss {loss:.2e}   relative error {error:.2e}   {seconds:5.1f} s")
