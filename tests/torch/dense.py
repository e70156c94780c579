"""Dense Hessians and Jacobians from derivatives one order lower, and what is expected of a spectrum that knows them."""

import numpy as np
import torch


def by_differences(loss, params, step=1e-5):
    """The Hessian of a closure as central differences of its gradient; float64 parameters, good to 1e-8 or so."""
    params = list(params)
    assert {p.dtype for p in params} == {torch.float64}

    def gradient():
        found = torch.autograd.grad(loss(), params, allow_unused=True)
        whole = [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]
        return torch.cat([g.reshape(-1) for g in whole])

    H = jacobian(gradient, params, step)
    return (H + H.T) / 2


def jacobian(outputs, params, step=1e-6):
    """Of a function without arguments that returns a tensor, by central differences; float64."""
    columns = []
    for p in params:
        flat = p.detach().view(-1)
        for i in range(p.numel()):
            kept, ends = flat[i].item(), []
            for sign in (1, -1):
                flat[i] = kept + sign * step
                ends.append(outputs().detach().reshape(-1).clone())
            flat[i] = kept
            columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns, dim=1).numpy()


def extreme(H, k, ell):
    """The k largest and ell smallest eigenpairs, descending, the vectors as rows."""
    values, vectors = np.linalg.eigh(H)
    wanted = [*range(len(H) - 1, len(H) - 1 - k, -1), *range(ell - 1, -1, -1)]
    return values[wanted], vectors[:, wanted].T


def rows_of(spectrum):
    """The eigenvectors as rows, float64."""
    found = spectrum.eigenvectors
    pieces = found.values() if isinstance(found, dict) else found
    return torch.cat([x.double().reshape(len(x), -1) for x in pieces], dim=1).numpy()


def assert_pairs(spectrum, H, k, ell, tolerance):
    """Values, the equation H v = λ v and orthonormality, the first two relative to the norm of H."""
    scale = np.linalg.norm(H, 2)
    values, rows = spectrum.eigenvalues.double().numpy(), rows_of(spectrum)
    np.testing.assert_allclose(values, extreme(H, k, ell)[0], atol=tolerance * scale, rtol=0)
    np.testing.assert_allclose(rows @ H, values[:, None] * rows, atol=20 * tolerance * scale, rtol=0)
    np.testing.assert_allclose(rows @ rows.T, np.eye(k + ell), atol=4e-6)
