"""Every base optimizer of the shared cases in torch, and runs of FOSI around it on the known problems."""

import math

import numpy as np
import torch

import fosi
from fosi.torch import FOSI
from tests.cases import BETA, RATES, diagonal


class Diagonal(torch.optim.Optimizer):
    """−lr diag(q) m̄ with a fixed q: an optimizer that torch does not have."""

    def __init__(self, params, lr, q, momentum=0.0, nesterov=False):
        super().__init__(params, {"lr": lr})
        self.q, self.beta, self.nesterov = q, momentum, nesterov

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, q in zip(group["params"], self.q, strict=True):
                trace = self.state[p].get("trace", 0.0) * self.beta + p.grad
                self.state[p]["trace"] = trace
                mean = p.grad + self.beta * trace if self.nesterov else trace
                p -= group["lr"] * q * (mean if self.beta else p.grad)


def shapes_of(tree):
    """The shapes in the order in which they lie in theta."""
    return [tree] if isinstance(tree, tuple) else [s for part in tree.values() for s in shapes_of(part)]


def as_params(problem, theta, dtype):
    """A flat vector as parameters in the problem's shapes."""
    pieces, end = [], 0
    for shape in shapes_of(problem.shapes):
        size = math.prod(shape)
        pieces.append(torch.tensor(theta[end : end + size].reshape(shape), dtype=dtype, requires_grad=True))
        end += size
    return pieces


def flat(params):
    return torch.cat([p.reshape(-1) for p in params])


def loss_of(problem, params, batch=None):
    """The problem's loss as a closure."""
    dtype = params[0].dtype
    batch = {name: torch.tensor(x, dtype=dtype) for name, x in (batch or problem.batch).items()}
    return lambda: problem.value(flat(params), batch, torch)


def base_named(name, params, problem, rate=None, weight_decay=0.0, **settings):
    """The base optimizer of a case, in torch."""
    rate = RATES[name][0] if rate is None else rate
    if name == "adam":
        return torch.optim.Adam(params, lr=rate, weight_decay=weight_decay, **settings)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=rate, weight_decay=weight_decay, **settings)
    if name.startswith("diagonal"):
        q = [x.detach() for x in as_params(problem, diagonal(len(problem.start)), params[0].dtype)]
        return Diagonal(params, rate, q, 0.0 if name == "diagonal" else BETA, name == "diagonal-nesterov")
    momentum = 0.0 if name == "gd" else BETA
    return torch.optim.SGD(
        params, lr=rate, momentum=momentum, nesterov=name == "nesterov", weight_decay=weight_decay, **settings
    )


def ours(name, base, problem, **options):
    """FOSI around it, with all Lanczos products and all pairs unless ``options`` say otherwise."""
    options = {
        "k": problem.k,
        "ell": problem.ell,
        "alpha": RATES[name][1],
        "accept": "all",
        "num_matvecs": len(problem.start),
        "lr_rule": None,
        **options,
    }
    if options["lr_rule"] == "default":
        del options["lr_rule"]
    if name.startswith("diagonal"):
        rule = None if name == "diagonal" else fosi.Trace(BETA, name == "diagonal-nesterov")
        options = {"momentum": rule, **options}
    return FOSI(base, **options)


def run(
    name, problem, steps, dtype, batches=None, curvature_batches=None, base_settings=None, scheduler=None, **options
):
    """θ₀ … θ_steps as rows, and the optimizer."""
    params = as_params(problem, problem.start, dtype)
    base = base_named(name, params, problem, **(base_settings or {}))
    opt = ours(name, base, problem, **options)
    schedule = None if scheduler is None else scheduler(opt)
    batches = [problem.batch] * steps if batches is None else batches
    curvature_batches = batches if curvature_batches is None else curvature_batches
    path = [problem.start]
    for t in range(steps):
        opt.zero_grad()
        loss_of(problem, params, batches[t])().backward()
        if opt.refresh_due:
            opt.refresh(loss_of(problem, params, curvature_batches[t]))
        opt.step()
        if schedule is not None:
            schedule.step()
        assert flat(params).dtype == dtype
        path.append(flat(params).detach().numpy().astype(np.float64))
    return np.stack(path), opt
