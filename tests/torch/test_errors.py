"""Wrong use is refused at once, with a message that names the argument, what it was and what would be right."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from fosi.torch import FOSI, estimate_spectrum
from tests.torch.training import assert_same_bits, batch, loss_of, network, train, values


def sgd(params=None, **settings):
    return torch.optim.SGD(network().parameters() if params is None else params, **{"lr": 0.1, **settings})


def two_groups(first, second):
    model = network()
    return [{"params": [*model[0].parameters()], **first}, {"params": [*model[2].parameters()], **second}]


def lone(dtype, n=4):
    return [torch.ones(n, dtype=dtype, requires_grad=dtype.is_floating_point or dtype.is_complex)]


def assert_says(error, *words):
    """All of them, in this order."""
    assert re.search(".*".join(map(re.escape, words)), str(error.value), re.DOTALL), str(error.value)


# What is wrong, how it is built, the exception, and what its message must say in this order.
CONSTRUCTION = {
    "LBFGS": (lambda: FOSI(torch.optim.LBFGS(network().parameters())), TypeError, ["base=LBFGS", "by itself"]),
    "SparseAdam": (
        lambda: FOSI(torch.optim.SparseAdam([*network().parameters()])),
        TypeError,
        ["base=SparseAdam", "sparse", "dense"],
    ),
    "parameters for base": (
        lambda: FOSI([torch.ones(2)]),
        TypeError,
        ["base must be a torch.optim.Optimizer", "torch.optim.Adam(model.parameters()", "got [tensor("],
    ),
    "a class for base": (lambda: FOSI(torch.optim.SGD), TypeError, ["base must be", "torch.optim", "got <class"]),
    "None for base": (lambda: FOSI(None), TypeError, ["base must be", "got None"]),
    "FOSI in FOSI": (lambda: FOSI(FOSI(sgd(), k=1)), TypeError, ["base is a FOSI", "bare optimizer, once"]),
    "a function for model": (
        lambda: FOSI(sgd(), model=torch.tanh),
        TypeError,
        ["model must be a torch.nn.Module or None", "got <built-in method tanh"],
    ),
    "a loss for curvature_loss": (
        lambda: FOSI(sgd(), curvature_loss=torch.tensor(1.5)),
        TypeError,
        ["curvature_loss must be a function without arguments that returns the loss", "got tensor(1.5"],
    ),
    "no pairs": (lambda: FOSI(sgd(), k=0), ValueError, ["k=0", "ell=0", "k + ell must be from 1"]),
    "too many pairs": (lambda: FOSI(sgd(), k=20, ell=7), ValueError, ["k=20", "ell=7", "27", "1 to n=26"]),
    "default k for few parameters": (lambda: FOSI(sgd(lone(torch.float32))), ValueError, ["k=10", "1 to n=4"]),
    "negative k": (lambda: FOSI(sgd(), k=-1, ell=3), ValueError, ["k=-1", "at least 0"]),
    "negative ell": (lambda: FOSI(sgd(), ell=-2), ValueError, ["ell=-2", "at least 0"]),
    "k not whole": (lambda: FOSI(sgd(), k=2.5), TypeError, ["k=2.5", "float", "int"]),
    "num_matvecs too small": (
        lambda: FOSI(sgd(), k=4, ell=2, num_matvecs=5),
        ValueError,
        ["num_matvecs=5", "k=4", "ell=2", "at least k + ell = 6"],
    ),
    "complex parameters": (
        lambda: FOSI(sgd(lone(torch.complex64)), k=1),
        ValueError,
        ["complex64", "not supported", "real and imaginary parts"],
    ),
    "integer parameters": (lambda: FOSI(sgd(lone(torch.int64)), k=1), ValueError, ["int64", "dense float"]),
    "maximize": (
        lambda: FOSI(sgd(maximize=True), k=1),
        ValueError,
        ["maximize=True in param_groups[0]", "not supported", "minimise the negative"],
    ),
    "maximize in one group": (
        lambda: FOSI(torch.optim.Adam(two_groups({}, {"maximize": True})), k=1),
        ValueError,
        ["maximize=True in param_groups[1]"],
    ),
    "differentiable": (
        lambda: FOSI(torch.optim.Adam(network().parameters(), differentiable=True), k=1),
        ValueError,
        ["differentiable=True in param_groups[0]", "not supported"],
    ),
    "different momentum": (
        lambda: FOSI(sgd(two_groups({"momentum": 0.9}, {"momentum": 0.5})), k=1),
        ValueError,
        ["param_groups have different momentum", "0.9", "0.5", "momentum=fosi.Trace(decay)"],
    ),
    "different betas": (
        lambda: FOSI(torch.optim.Adam(two_groups({}, {"betas": (0.5, 0.9)})), k=1),
        ValueError,
        ["different momentum", "0.9", "0.5", "fosi.Ema(decay)"],
    ),
    "dampening and different rates": (
        lambda: FOSI(sgd(two_groups({"lr": 0.1}, {"lr": 0.2}), momentum=0.9, dampening=0.5), k=1),
        ValueError,
        ["dampening=0.5", "one learning rate", "momentum=fosi.Trace(decay)"],
    ),
    "unknown option": (lambda: FOSI(sgd(), K=3), TypeError, ["K=3", "'k'", "num_matvecs"]),
    "option without its name": (lambda: FOSI(sgd(), network(), 3), TypeError, ["positional argument"]),
    "negative alpha": (lambda: FOSI(sgd(), k=1, alpha=-0.1), ValueError, ["alpha", "finite number ≥ 0", "-0.1"]),
    "NaN alpha": (lambda: FOSI(sgd(), k=1, alpha=np.nan), ValueError, ["alpha", "finite number ≥ 0", "nan"]),
    "infinite alpha": (lambda: FOSI(sgd(), k=1, alpha=np.inf), ValueError, ["alpha", "finite", "inf"]),
    "no alpha": (lambda: FOSI(sgd(), k=1, alpha=None), TypeError, ["alpha", "a schedule", "None"]),
    "overhead 0": (lambda: FOSI(sgd(), k=1, overhead=0), ValueError, ["overhead=0", "positive, finite"]),
    "negative overhead": (lambda: FOSI(sgd(), k=1, overhead=-0.1), ValueError, ["overhead=-0.1", "positive, finite"]),
    "unknown precision": (
        lambda: FOSI(sgd(), k=1, precision="bfloat16"),
        ValueError,
        ["precision must be one of", "'float32', 'float64'", "got 'bfloat16'"],
    ),
    "a dtype for precision": (
        lambda: FOSI(sgd(), k=1, precision=torch.float64),
        ValueError,
        ["precision must be one of", "'float32', 'float64'", "got torch.float64"],
    ),
    "unknown accept": (
        lambda: FOSI(sgd(), k=1, accept="most"),
        ValueError,
        ["accept must be one of", "'converged', 'all'", "got 'most'"],
    ),
    "unknown lr_rule": (
        lambda: FOSI(sgd(), k=1, lr_rule="adam"),
        ValueError,
        ["lr_rule must be one of", "'gd'", "got 'adam'"],
    ),
    "momentum as a number": (
        lambda: FOSI(sgd(), k=1, momentum=0.9),
        ValueError,
        ["momentum must be fosi.Trace(decay), fosi.Ema(decay), None or 'auto'", "got 0.9"],
    ),
    "max_lr_scale below 1": (lambda: FOSI(sgd(), k=1, max_lr_scale=0.5), ValueError, ["max_lr_scale", "≥ 1", "0.5"]),
    "refresh_every 0": (lambda: FOSI(sgd(), k=1, refresh_every=0), ValueError, ["refresh_every=0", "at least 1"]),
    "negative warmup": (lambda: FOSI(sgd(), k=1, warmup=-1), ValueError, ["warmup=-1", "at least 0"]),
    "seed not whole": (lambda: FOSI(sgd(), k=1, seed=1.5), TypeError, ["seed must be an int", "got 1.5"]),
    "no parameters": (lambda: estimate_spectrum(lambda: torch.ones(()), []), ValueError, ["params is empty"]),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_construction(case):
    build, exception, words = CONSTRUCTION[case]
    with pytest.raises(exception) as error:
        build()
    assert_says(error, *words)


def test_different_momentum_can_be_settled_by_name():
    """The way out that the message shows."""
    from fosi.torch import Trace

    groups = two_groups({"momentum": 0.9}, {"momentum": 0.5})
    assert FOSI(sgd(groups), k=1, momentum=Trace(0.9)).options.momentum == Trace(0.9)


# Closures of a refresh: what the message must say in this order.


def without_graph(model):
    with torch.no_grad():
        return loss_of(model, batch(0))()


def with_backward(model, **keywords):
    loss = loss_of(model, batch(0))()
    loss.backward(**keywords)
    return loss


def with_zero_grad(model):
    model.zero_grad()
    return loss_of(model, batch(0))()


CLOSURES = {
    "a float": (
        lambda model: loss_of(model, batch(0))().item(),
        TypeError,
        ["closure must return the loss as a tensor", "got float", "not loss.item()"],
    ),
    "None": (lambda model: None, TypeError, ["closure must return the loss as a tensor", "got NoneType"]),
    "a tuple": (lambda model: (loss_of(model, batch(0))(), 1), TypeError, ["must return the loss", "got tuple"]),
    "detached": (
        lambda model: loss_of(model, batch(0))().detach(),
        ValueError,
        ["requires_grad is False", "without .detach()", "opt.refresh(lambda: loss_fn(model(x), y))"],
    ),
    "no_grad": (without_graph, ValueError, ["requires_grad is False", "torch.no_grad()"]),
    "no parameters in it": (lambda model: torch.ones(()), ValueError, ["requires_grad is False"]),
    "one loss a row": (
        lambda model: model(batch(0)[0]).square().mean(1),
        ValueError,
        ["must return one real number", "shape (12,)", "float32", ".mean()"],
    ),
    "whole numbers": (
        lambda model: torch.ones((), dtype=torch.int64),
        ValueError,
        ["must return one real number", "int64"],
    ),
    "a leaf": (lambda model: torch.ones((), requires_grad=True), ValueError, ["leaf tensor", "compute the loss"]),
    "backward inside": (with_backward, ValueError, ["without calling backward()", "compute it anew"]),
    "backward inside, graph kept": (
        lambda model: with_backward(model, retain_graph=True),
        ValueError,
        ["changed .grad", "not call backward()"],
    ),
    "zero_grad inside": (with_zero_grad, ValueError, ["changed .grad", "not call backward() or zero_grad()"]),
}


@pytest.mark.parametrize("by", ["refresh", "curvature_loss"])
@pytest.mark.parametrize("case", CLOSURES)
def test_closures(case, by):
    """And the optimizer stays as it was: the refresh is still due."""
    closure, exception, words = CLOSURES[case]
    model = network()
    extra = {} if by == "refresh" else {"curvature_loss": lambda: closure(model)}
    opt = FOSI(sgd(model.parameters()), model=model, k=2, warmup=0, **extra)
    loss_of(model, batch(1))().backward()
    before, kept = values(model), opt.state_dict()
    with pytest.raises(exception) as error:
        opt.step() if extra else opt.refresh(lambda: closure(model))
    assert_says(error, *words)
    assert opt.refresh_due and opt.spectrum is None
    assert_same_bits(values(model), before)
    assert_same_bits(opt.state_dict(), kept)
    opt.curvature_loss = None
    opt.refresh(loss_of(model, batch(1)))
    assert not opt.refresh_due


def test_the_loss_of_the_step_itself_is_no_closure():
    """Its graph went with its backward pass."""
    model = network()
    opt = FOSI(sgd(model.parameters()), model=model, k=2, warmup=0)
    loss = loss_of(model, batch(0))()
    loss.backward()
    with pytest.raises(ValueError) as error:
        opt.refresh(lambda: loss)
    assert_says(error, "graph of the loss is gone", "compute it anew", "opt.refresh(lambda: loss_fn(model(x), y))")


@pytest.mark.parametrize("given", [3.0, [], [3.0], ["loss"]], ids=str)
def test_what_is_not_a_closure(given):
    opt = FOSI(sgd(), k=2)
    with pytest.raises(TypeError) as error:
        opt.refresh(given)
    assert_says(error, "closure must be a function without arguments", "got")


def test_the_loss_itself_for_a_closure():
    """The mistake of the first day."""
    model = network()
    opt = FOSI(sgd(model.parameters()), k=2)
    with pytest.raises(TypeError) as error:
        opt.refresh(loss_of(model, batch(0))())
    assert_says(error, "closure must be a function without arguments", "got tensor(")


# Steps.


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("refreshed", [False, True])
def test_step_before_any_backward(base, refreshed):
    model = network()
    opt = FOSI(base(model.parameters(), lr=0.1), model=model, k=2, warmup=0)
    if refreshed:
        opt.refresh(loss_of(model, batch(0)))
    before, kept = values(model), opt.state_dict()
    with pytest.raises(RuntimeError) as error:
        opt.step()
    assert_says(error, "step() found no gradient", "loss.backward() before")
    assert_same_bits(values(model), before)
    assert_same_bits(opt.state_dict(), kept)


def test_sparse_gradients():
    """Named before anything has moved."""
    table = nn.Embedding(5, 2, sparse=True)
    opt = FOSI(torch.optim.SGD(table.parameters(), lr=0.1), k=2)
    before = values(table)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ValueError) as error:
        opt.step()
    assert_says(error, "torch.sparse_coo", "dense gradients", "sparse=False")
    assert_same_bits(values(table), before)


# Groups added on the way: refused before anything changes.

GROUPS = {
    "maximize": (lambda: {"params": lone(torch.float32), "maximize": True}, ["maximize=True in param_groups[1]"]),
    "complex": (lambda: {"params": lone(torch.complex64)}, ["complex64"]),
    "whole numbers": (lambda: {"params": lone(torch.int64)}, ["int64"]),
    "other momentum": (lambda: {"params": lone(torch.float32), "betas": (0.5, 0.9)}, ["different momentum", "0.5"]),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_that_cannot_be_added(case):
    """An error that leaves the optimizer as it was: training goes on."""
    group, words = GROUPS[case]
    model, control = network(), network()
    options = {"k": 2, "warmup": 0, "refresh_every": 2}
    opt = FOSI(torch.optim.Adam(model.parameters(), lr=0.02), model=model, **options)
    other = FOSI(torch.optim.Adam(control.parameters(), lr=0.02), model=control, **options)
    train(model, opt, range(2))
    with pytest.raises(ValueError) as error:
        opt.add_param_group(group())
    assert_says(error, *words)
    assert len(opt.param_groups) == 1
    train(model, opt, range(2, 5))
    train(control, other, range(5))
    assert_same_bits(values(model), values(control))


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def test_a_function_that_must_not_be_differentiated_twice_is_not_gone_around():
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="once_differentiable"):
        estimate_spectrum(lambda: _Once.apply(w).sum() + (w**4).sum(), [w], k=1)


def test_losses_and_parameters_that_have_nothing_to_do_with_each_other():
    w, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on any of the parameters"):
        estimate_spectrum(lambda: (other**2).sum(), [w], k=1)
    with pytest.raises(ValueError, match="requires_grad is False"):
        estimate_spectrum(lambda: (other**2).sum(), [torch.ones(3)], k=1)
    with pytest.raises(ValueError, match="twice"):
        estimate_spectrum(lambda: (w**2).sum(), [w, w], k=1)
