"""ESE against a dense eigendecomposition: values, vectors, residuals, and what an early end leaves."""

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fosi.torch import Spectrum, estimate_spectrum
from tests.problems import PROBLEMS, network, symmetric
from tests.torch.dense import assert_pairs, by_differences, extreme, rows_of
from tests.torch.models import batch_of, made
from tests.torch.running import as_params, flat, loss_of

# dtype of everything the user holds, dtype of the basis, tolerance: the rounding of the products.
PRECISIONS = {
    "float64": (torch.float64, "float64", 1e-12),
    "float32": (torch.float32, "float32", 2e-6),
    "mixed": (torch.float32, "float64", 2e-6),
    "bfloat16": (torch.bfloat16, "float32", 2e-2),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_pairs_are_those_of_the_dense_hessian(precision, name):
    """Shapes, dtypes, values, vectors and extremes, at the point and on the data as they were held, rounded."""
    dtype, basis, tolerance = PRECISIONS[precision]
    problem = PROBLEMS[name]()
    k, ell, n = problem.k, problem.ell, len(problem.start)
    params = as_params(problem, problem.start, dtype)
    spectrum = estimate_spectrum(loss_of(problem, params), params, k=k, ell=ell, num_matvecs=n, precision=basis)

    assert isinstance(spectrum, Spectrum)
    assert [x.shape for x in spectrum.eigenvectors] == [(k + ell, *p.shape) for p in params]
    numbers = [spectrum.eigenvalues, spectrum.residuals, spectrum.extremes, spectrum.resolution]
    held_in = torch.promote_types(dtype, torch.float32)
    assert {x.dtype for x in [*numbers, *spectrum.eigenvectors]} == {held_in}
    assert spectrum.accepted.dtype == torch.bool and spectrum.accepted.shape == (k + ell,)

    held = {name: torch.tensor(x, dtype=dtype).double().numpy() for name, x in problem.batch.items()}
    H = problem.hessian(flat(params).detach().double().numpy(), held)
    values = np.linalg.eigvalsh(H)
    scale = np.abs(values).max()
    np.testing.assert_allclose(spectrum.extremes, values[[-1, 0]], atol=tolerance * scale)
    # In bfloat16 the smallest of some problems cannot be told from rounding.
    resolved = np.abs(spectrum.eigenvalues.numpy()) > 10 * torch.finfo(dtype).eps * scale
    np.testing.assert_array_equal(spectrum.accepted, resolved)
    assert resolved[:k].all()
    if precision == "bfloat16":  # half the digits of the gaps between them are gone: values only
        found, expected = spectrum.eigenvalues.numpy(), extreme(H, k, ell)[0]
        np.testing.assert_allclose(found[resolved], expected[resolved], atol=tolerance * scale)
        rows = rows_of(spectrum)
        np.testing.assert_allclose(rows @ rows.T, np.eye(k + ell), atol=2e-6)
    else:
        assert_pairs(spectrum, H, k, ell, tolerance)


def half_square(w, H):
    """½ wᵀHw as a closure."""
    return lambda: 0.5 * w @ (H @ w)


def quadratic(eigenvalues, dtype=torch.float32, seed=9):
    """A closure with these eigenvalues, its parameter, and H as it holds it."""
    H = torch.tensor(symmetric(eigenvalues, seed=seed), dtype=dtype)
    w = torch.ones(len(H), dtype=dtype, requires_grad=True)
    return half_square(w, H), w, H.double().numpy()


OUTLIERS = [100.0, -50.0, *np.linspace(-1, 1, 58)]


@pytest.mark.parametrize("num_matvecs", [6, 12])
@pytest.mark.parametrize("precision", ["float64", "float32", "mixed"])
def test_residuals_are_true(precision, num_matvecs):
    """Equal to ‖Hv − λv‖ where that is above rounding, never below it; and they decide what is accepted."""
    dtype, basis, _ = PRECISIONS[precision]
    loss, w, H = quadratic(OUTLIERS, dtype, seed=5)
    estimate = functools.partial(estimate_spectrum, loss, [w], k=4, ell=2, num_matvecs=num_matvecs, precision=basis)
    spectrum, everything = estimate(), estimate(accept="all")
    rows, values = rows_of(spectrum), spectrum.eigenvalues.double().numpy()
    true = np.linalg.norm(rows @ H - values[:, None] * rows, axis=1)
    floor = 4 * torch.finfo(dtype).eps * 100
    np.testing.assert_allclose(spectrum.residuals, true, rtol=1e-5, atol=floor)
    # Something is converged and something is not, or the comparison means little.
    assert true.min() < 0.01 and true.max() > 0.1
    # A pair is accepted exactly where that is so; with "all", all are.
    clear = np.abs(true / np.abs(values) - 0.1) > 1e-3
    np.testing.assert_array_equal(spectrum.accepted[clear], (true <= 0.1 * np.abs(values))[clear])
    assert 0 < spectrum.accepted.sum() < 6
    assert everything.accepted.all()
    for one, other in zip(spectrum[:3], everything[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("k", "ell"), [(3, 0), (0, 3), (2, 2), (6, 6), (1, 11)])
def test_the_largest_come_first_and_the_smallest_last(k, ell):
    eigenvalues = [30.0, 20.0, 15.0, 7.0, 5.0, 4.0, 3.0, 2.0, 1.0, -6.0, -9.0, -12.0]
    loss, w, H = quadratic(eigenvalues)
    spectrum = estimate_spectrum(loss, [w], k=k, ell=ell, num_matvecs=12)
    assert_pairs(spectrum, H, k, ell, 2e-6)
    assert (np.diff(spectrum.eigenvalues) < 0).all()
    np.testing.assert_allclose(spectrum.extremes, [30, -12], atol=1e-4)


def test_more_products_than_parameters_are_not_made():
    loss, w, H = quadratic([3.0, 2.0, 1.0])
    spectrum = estimate_spectrum(loss, [w], k=2, num_matvecs=50)
    assert_pairs(spectrum, H, 2, 0, 2e-6)


@pytest.mark.parametrize(("k", "num_matvecs", "expected"), [(3, None, 12), (2, None, 9), (2, 30, 30)])
def test_one_loss_is_evaluated_once_and_several_once_a_product(k, num_matvecs, expected):
    """By default max(4 (k + ell), ⌈2 ln n⌉) products."""
    w, calls = torch.ones(60, requires_grad=True), []
    scales = torch.arange(1.0, 61.0)

    def loss(name):
        return lambda: calls.append(name) or 0.5 * (scales * w**2).sum()

    estimate_spectrum(loss("a"), [w], k=k, num_matvecs=num_matvecs)
    estimate_spectrum([loss("b")], [w], k=k, num_matvecs=num_matvecs)
    assert calls == ["a", "b"]
    estimate_spectrum([loss("c"), loss("d")], [w], k=k, num_matvecs=num_matvecs)
    assert calls[2:] == ["c", "d"] * expected


def test_seeds():
    """A function of the seed alone, whatever torch's own random state; another one shows before convergence."""
    loss, w, _ = quadratic(OUTLIERS)
    estimate = functools.partial(estimate_spectrum, loss, [w], k=4, num_matvecs=4, accept="all")
    torch.manual_seed(1)
    one = estimate(seed=3)
    torch.manual_seed(2)
    same, other = estimate(seed=3), estimate(seed=4)
    for a, b in zip([*one[:1], *one[1], *one[2:]], [*same[:1], *same[1], *same[2:]], strict=True):
        assert torch.equal(a, b)
    assert (one.eigenvalues - other.eigenvalues).abs().max() > 1e-3


# Eigenvalues; k and ell; what is found, top first; and which positions.
SHORT = {
    "rank one": ([7.0, *np.zeros(9)], 3, 0, [7, 0, 0], [1, 1, 0]),
    "rank one, both ends": ([7.0, *np.zeros(9)], 3, 2, [7, 0, 0, 0, 0], [1, 1, 0, 0, 0]),
    "rank one, few from the top": ([7.0, *np.zeros(9)], 1, 2, [7, 0, 0], [1, 0, 1]),
    "negative rank one": ([-7.0, *np.zeros(9)], 1, 2, [0, 0, -7], [1, 0, 1]),
    "three values": ([*3 * [4.0], *3 * [1.0], *4 * [-2.0]], 2, 2, [4, 1, 0, -2], [1, 1, 0, 1]),
    "multiple of the identity": (10 * [5.0], 2, 2, [5, 0, 0, 0], [1, 0, 0, 0]),
    "no curvature": (10 * [0.0], 2, 1, [0, 0, 0], [1, 0, 0]),
}


@pytest.mark.parametrize("name", SHORT)
def test_what_lanczos_did_not_reach_is_zero_and_not_accepted(name):
    eigenvalues, k, ell, expected, found = SHORT[name]
    found = np.array(found, bool)
    loss, w, _ = quadratic(eigenvalues)
    everything = estimate_spectrum(loss, [w], k=k, ell=ell, num_matvecs=10, accept="all")
    trusted = estimate_spectrum(loss, [w], k=k, ell=ell, num_matvecs=10, precision="float64")
    np.testing.assert_array_equal(everything.accepted, found)
    np.testing.assert_array_equal(trusted.accepted, np.array(expected) != 0)
    for spectrum in (everything, trusted):
        np.testing.assert_allclose(spectrum.eigenvalues, expected, atol=1e-5)
        assert (spectrum.eigenvalues.numpy()[~found] == 0).all()
        assert (spectrum.residuals.numpy()[~found] == 0).all()
        # Found rows are orthonormal, so no pair stands at the top and at the bottom; the others are zero.
        rows = rows_of(spectrum)
        np.testing.assert_allclose(rows @ rows.T, np.diag(found.astype(float)), atol=2e-6)


def test_parameters_as_list_mapping_module_and_generator():
    """The same numbers for all; eigenvectors in order, or by name where the parameters came by name."""
    model, loss = made("batch norm")
    assert not isinstance(model[1].running_mean, nn.Parameter)
    named = dict(model.named_parameters())
    listed, mapped, whole, generated = (
        estimate_spectrum(loss, params, k=2, num_matvecs=20, model=model)
        for params in (list(named.values()), named, model, model.parameters())
    )
    assert isinstance(listed.eigenvectors, list) and isinstance(generated.eigenvectors, list)
    assert list(mapped.eigenvectors) == list(whole.eigenvectors) == list(named)
    for name, vectors, again in zip(named, listed.eigenvectors, generated.eigenvectors, strict=True):
        for other in (again, mapped.eigenvectors[name], whole.eigenvectors[name]):
            assert torch.equal(vectors, other)
    by_hand = {"b": named["0.bias"], "a": named["0.weight"]}
    some = estimate_spectrum(loss, by_hand, k=2, num_matvecs=20, precision="float64", model=model)
    assert {name: x.shape for name, x in some.eigenvectors.items()} == {"b": (2, 5), "a": (2, 5, 4)}
    H = by_differences(loss, by_hand.values())
    assert_pairs(some, H, 2, 0, 1e-8)


@pytest.mark.parametrize("sequence", [False, True])
def test_frozen_and_unused_parameters_take_no_part(sequence):
    """Frozen ones are left out of a module and get zeros in a list; ones the loss does not use get zeros."""
    model, loss = made("tied")
    closure = [loss, loss] if sequence else loss
    model.there.weight.requires_grad_(False)  # the loss does not use it either
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    H = by_differences(loss, [p for p in model.parameters() if p.requires_grad])
    estimate = functools.partial(estimate_spectrum, closure, k=2, ell=1, num_matvecs=20, precision="float64")
    whole = estimate(model)
    assert list(whole.eigenvectors) == ["middle", "there.bias", "back.bias"]
    assert_pairs(whole, H, 2, 1, 1e-8)

    listed = estimate([unused, *model.parameters()])
    np.testing.assert_allclose(listed.eigenvalues, whole.eigenvalues, atol=1e-12)
    for piece, p in zip(listed.eigenvectors, [unused, *model.parameters()], strict=True):
        used = p is not unused and p.requires_grad
        assert (piece.abs().max() > 1e-3) if used else (piece.abs().max() < 1e-12)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_loss_without_curvature_gives_nothing_and_does_not_fail(sequence):
    """Linear in everything, or linear in a parameter and quadratic in another."""
    w, v = torch.ones(5, requires_grad=True), torch.ones(3, requires_grad=True)

    def linear():
        return w.sum() + 2 * v.sum()

    found = estimate_spectrum([linear, linear] if sequence else linear, [w, v], k=2, ell=1)
    assert not found.accepted.any() and (found.eigenvalues == 0).all() and (found.extremes == 0).all()

    def half():
        return w.sum() + 2 * (v**2).sum()

    found = estimate_spectrum([half, half] if sequence else half, [w, v], k=1, num_matvecs=8)
    assert found.accepted.all()
    np.testing.assert_allclose(found.eigenvalues, [4], rtol=1e-6)
    np.testing.assert_allclose(found.eigenvectors[0], 0, atol=1e-6)


def test_several_batches_and_micro_batches_are_one_large_batch():
    """Against the dense Hessian of the union, in halves and in quarters."""
    problem = network()
    params = as_params(problem, problem.start, torch.float64)
    rows = len(problem.batch["y"])
    H = problem.hessian(problem.start, problem.batch)
    for count in (1, 2, 4):
        size = rows // count
        pieces = [{name: x[i * size : (i + 1) * size] for name, x in problem.batch.items()} for i in range(count)]
        closures = [loss_of(problem, params, piece) for piece in pieces]
        spectrum = estimate_spectrum(closures, params, k=3, ell=1, num_matvecs=26, precision="float64")
        assert_pairs(spectrum, H, 3, 1, 1e-10)
    # One piece is something else, so that the mean was seen to matter.
    alone = estimate_spectrum(closures[0], params, k=3, ell=1, num_matvecs=26, precision="float64")
    assert np.abs(alone.eigenvalues.numpy() - extreme(H, 3, 1)[0]).max() > 1e-2 * np.linalg.norm(H, 2)


@pytest.mark.parametrize("name", ["dropout", "attention, dropout"])
def test_dropout_in_a_sequence_of_closures_is_one_symmetric_operator(name):
    """Every product sees the masks that the closures drew for the first, one after the other."""
    model, loss = made(name)
    params, seed = list(model.parameters()), functools.partial(torch.manual_seed, 11)

    def mean():
        seed()
        return (loss() + loss()) / 2

    H = by_differences(mean, params)
    scale, eps = np.linalg.norm(H, 2), torch.finfo(torch.float64).eps
    estimate = functools.partial(estimate_spectrum, k=2, ell=1, num_matvecs=len(H), precision="float64")
    seed()
    spectrum = estimate([loss, loss], params)
    assert_pairs(spectrum, H, 2, 1, 1e-8)
    assert spectrum.resolution < 200 * eps * scale  # where asymmetry would show
    seed()
    assert torch.equal(estimate([loss, loss], params).eigenvalues, spectrum.eigenvalues)
    seed()
    alone = estimate(loss, params)  # with the first mask only: another operator
    assert (alone.eigenvalues - spectrum.eigenvalues).abs().max() > 1e-3 * scale


def test_a_basis_in_float64_is_the_more_orthogonal():
    """Of float32 parameters: what is left is the rounding of the result."""
    loss, w, _ = quadratic([*np.linspace(1e4, 1e3, 20), *np.linspace(1.0, 2.0, 180)])
    errors = {}
    for precision in ("float32", "float64"):
        rows = rows_of(estimate_spectrum(loss, [w], k=20, num_matvecs=120, precision=precision, accept="all"))
        errors[precision] = np.abs(rows @ rows.T - np.eye(20)).max()
    assert errors["float64"] < 1.2e-7 < 4 * errors["float64"] + errors["float32"]
    assert 2 * errors["float64"] < errors["float32"] < 4e-6


def test_parameters_of_several_dtypes_and_layouts():
    """bfloat16, float64, a scalar, one with permuted strides and one with gaps in it, in one spectrum."""
    H = symmetric([50.0, 20.0, 3.0, *np.linspace(0.2, 1, 17), -15.0], seed=8)
    params = [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float64),
        torch.ones(()),
        torch.ones(3, 2).t(),
        torch.ones(3, 5)[:, ::2],
    ]
    assert not params[3].is_contiguous() and not params[4].is_contiguous()
    for p in params:
        p.requires_grad_()
    held = torch.tensor(H)

    def loss():
        w = torch.cat([p.double().reshape(-1) for p in params])
        return 0.5 * w @ (held @ w)

    found = estimate_spectrum(loss, params, k=2, ell=1, num_matvecs=21)
    assert {x.dtype for x in found.eigenvectors} == {torch.float64}
    assert [x.shape for x in found.eigenvectors] == [(3, 2), (3, 3), (3,), (3, 2, 3), (3, 3, 3)]
    assert_pairs(found, H, 2, 1, 1e-2)  # bfloat16 holds two of the directions

    exact = [p.detach().double().requires_grad_() for p in params]
    params = exact
    assert_pairs(estimate_spectrum(loss, exact, k=2, ell=1, num_matvecs=21, precision="float64"), H, 2, 1, 1e-12)


def test_every_parameter_gets_vectors_in_its_own_dtype():
    """A bfloat16 parameter in front, without curvature, costs the float64 one nothing."""
    narrow = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    loss, wide, H = quadratic([50.0, 20.0, -30.0], torch.float64)
    found = estimate_spectrum(lambda: loss() + narrow.sum(), [narrow, wide], k=1, ell=1, num_matvecs=4)
    np.testing.assert_allclose(found.eigenvalues, extreme(H, 1, 1)[0], rtol=1e-5)


def test_channels_last_is_another_layout_of_the_same_numbers():
    model, loss = made("convolutional")
    plain = estimate_spectrum(loss, model, k=2, num_matvecs=30, precision="float64")
    model.to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    found = estimate_spectrum(loss, model, k=2, num_matvecs=30, precision="float64")
    for name, p in model.named_parameters():  # in the parameter's own strides, for copies to be plain ones
        assert found.eigenvectors[name][0].stride() == p.stride()
    # The start vector lies in memory's order, so before convergence the two differ.
    assert plain.residuals.max() < 1e-6
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues, rtol=1e-6, atol=0)
    for a, b in zip(found.eigenvectors.values(), plain.eigenvectors.values(), strict=True):
        signs = torch.sign((a * b).reshape(2, -1).sum(1)).reshape(2, *[1] * (a.dim() - 1))
        torch.testing.assert_close(a * signs, b, rtol=0, atol=1e-4)


def test_a_loss_that_is_not_finite_gives_nan_and_nothing_accepted():
    w = torch.zeros(5, requires_grad=True)
    for closure in (lambda: w.sqrt().sum(), [lambda: w.sqrt().sum(), lambda: (w**2).sum()]):
        for accept in ("converged", "all"):
            found = estimate_spectrum(closure, [w], k=2, ell=1, accept=accept)
            assert found.eigenvalues.isnan().all() and found.residuals.isnan().all() and found.extremes.isnan().all()
            assert not found.accepted.any()
            assert (found.eigenvectors[0] == 0).all()


class Crooked(torch.autograd.Function):
    """½ Σ s w², whose second derivative claims to be a matrix that is not quite symmetric, as TF32's is not."""

    @staticmethod
    def forward(ctx, w, scales, matrix):
        ctx.save_for_backward(w, scales, matrix)
        return 0.5 * (scales * w**2).sum()

    @staticmethod
    def backward(ctx, ct):
        return ct * CrookedGradient.apply(*ctx.saved_tensors), None, None


class CrookedGradient(torch.autograd.Function):
    """s w, with the transpose of ``matrix`` for its derivative."""

    @staticmethod
    def forward(ctx, w, scales, matrix):
        ctx.save_for_backward(matrix)
        return scales * w

    @staticmethod
    def backward(ctx, ct):
        return ctx.saved_tensors[0] @ ct, None, None


def test_noise_of_the_basis_is_not_taken_for_curvature():
    """float64 parameters, a float32 basis, one curved direction of two: the other is the basis' rounding."""
    seen = []
    for seed in range(40):
        loss, w, _ = quadratic([7.0, 0.0], torch.float64, seed)
        found = estimate_spectrum(loss, [w], k=2, num_matvecs=2, precision="float32", seed=seed)
        assert found.accepted.tolist() == [True, False]
        seen.append(abs(found.eigenvalues[1].item()))
    assert max(seen) > 1e-9  # there is noise to be taken for something


def test_no_residual_is_claimed_below_the_error_of_the_products():
    """Where Lanczos is exact (m = n) only the products' error is left: their dtype's, or what asymmetry shows."""
    scales = torch.tensor([8.0, 4.0, 2.0, 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.ones(4, dtype=dtype, requires_grad=True)
        found = estimate_spectrum(lambda w=w: 0.5 * (scales.to(w.dtype) * w**2).sum(), [w], k=2, num_matvecs=4)
        eps = torch.finfo(dtype).eps
        np.testing.assert_array_less(0.99 * 8 * eps, found.residuals)
        np.testing.assert_array_less(found.residuals, 20 * 8 * eps)
        assert 9.9 * 8 * eps < found.resolution < 200 * 8 * eps

    skew = 1e-2 * np.triu(np.ones((4, 4)), 1)
    matrix = torch.diag(scales) + torch.tensor(skew - skew.T, dtype=torch.float32)
    w = torch.ones(4, requires_grad=True)
    found = estimate_spectrum(lambda: Crooked.apply(w, scales, matrix), [w], k=2, num_matvecs=4)
    np.testing.assert_array_less(1e-3, found.residuals)
    assert found.resolution > 1e-2


class PlainNorm(nn.Module):
    """Batch or layer norm in elementary operations.

    Forward-over-reverse mode, which curvlinops uses, is wrong for torch's own (2.13; pytorch issues 196699 and 196700):
    its Hessians are off by a tenth and more and not symmetric.
    """

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias, self.eps, self.batch = norm.weight, norm.bias, norm.eps, hasattr(norm, "momentum")

    def forward(self, x):
        over = [i for i in range(x.dim()) if i != 1] if self.batch else [-1]
        shape = [-1, *[1] * (x.dim() - 2)] if self.batch else [-1]
        centred = x - x.mean(over, keepdim=True)
        scaled = centred / (centred.square().mean(over, keepdim=True) + self.eps).sqrt()
        return scaled * self.weight.reshape(shape) + self.bias.reshape(shape)


def by_curvlinops(name):
    """The dense Hessian in float64 as curvlinops has it, with the help it needs."""
    model = made(name)[0]
    for parent in list(model.modules()):
        for child, module in list(parent.named_children()):
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                setattr(parent, child, PlainNorm(module))
    params = list(model.parameters())
    columns = torch.eye(sum(p.numel() for p in params), dtype=torch.float64)
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")  # it and torch.func use torch.jit
        from curvlinops import HessianLinearOperator

        batches, loss = [batch_of(name)], nn.CrossEntropyLoss()
        operator = HessianLinearOperator(model, loss, params, batches, check_deterministic=False)
        return (operator @ columns).detach().numpy()


@pytest.mark.parametrize("name", ["convolutional", "attention", "multi-head", "encoder", "lstm"])
def test_against_curvlinops(name):
    """Whose products are made in another mode; ours need no help with the layers, in float32 either."""
    H = by_curvlinops(name)
    assert len(H) == sum(p.numel() for p in made(name)[0].parameters())
    np.testing.assert_allclose(H, H.T, atol=1e-12 * np.linalg.norm(H, 2))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, loss = made(name, dtype)
        spectrum = estimate_spectrum(loss, model, k=3, ell=2, num_matvecs=100, precision=str(dtype).split(".")[1])
        assert spectrum.accepted.all()
        assert_pairs(spectrum, H, 3, 2, tolerance)
