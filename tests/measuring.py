"""What a diagnosis must find on a problem whose gradients and dense Hessian are known, in NumPy alone."""

import functools

import numpy as np

from tests.problems import network

BATCHES = [network(data_seed=seed).batch for seed in (4, 5, 6)]
K, ELL = 3, 1
RATE = 0.01
CLOSE = {"rel": 1e-6, "abs": 1e-9}
"""How well products in float64 must agree; the eigenvectors of a pair are good to about the root of that."""


@functools.cache  # one problem, so that what was compiled for it serves every test
def problem():
    return network()


def second_moments():
    return np.random.default_rng(7).uniform(0.01, 2.0, len(problem().start)) ** 2


def wanted(nu=None, eps=1e-8, taken=BATCHES):
    """The fields of a diagnosis by their definitions; ``taken`` are the batches of the Hessian."""
    known = problem()
    theta = known.start
    hessian = np.mean([known.hessian(theta, batch) for batch in taken], axis=0)
    gradients = np.stack([known.gradient(theta, batch) for batch in BATCHES])
    values, vectors = np.linalg.eigh(hessian)
    chosen = [*range(len(values) - 1, len(values) - 1 - K, -1), *range(ELL - 1, -1, -1)]
    basis = vectors[:, chosen]
    inside, left = gradients @ basis @ basis.T, np.eye(len(values)) - basis @ basis.T
    outside = gradients @ left
    mean = gradients.mean(0)
    found = {
        "eigenvalues": values[chosen],
        "smallest": values[0],
        "bulk_edge": values[-1 - K],
        "gradient_inside": np.sum(inside.mean(0) ** 2) / np.sum(mean**2),
    }
    for name, part in (("inside", inside), ("outside", outside)):
        noise = np.sum(np.var(part, axis=0, ddof=1))
        found[f"noise_{name}"] = noise
        found[f"signal_{name}"] = np.sum(part.mean(0) ** 2) - noise / len(part)
    # Adam alone sees whole gradients; inside FOSI only what is outside the subspace.
    moments = [np.mean(g**2, axis=0) if nu is None else nu for g in (gradients, outside)]
    root, after = (np.diag((np.sqrt(x) + eps) ** -0.5) for x in moments)
    divided = {
        "sharpness": np.linalg.eigvalsh(root @ hessian @ root)[-1],
        "sharpness_left": np.linalg.eigvalsh(after @ left @ hessian @ left @ after)[-1],
    }
    return found, divided


def points():
    """Places near the start, as a training may pass."""
    return problem().start + 0.1 * np.random.default_rng(8).normal(size=(5, len(problem().start)))


def wanted_growth(nu, since, eps):
    """How many times as far Adam goes outside with FOSI where this part of ν is of gradients since, along `points`."""
    known = problem()
    hessian = np.mean([known.hessian(known.start, batch) for batch in BATCHES], axis=0)
    _, vectors = np.linalg.eigh(hessian)
    basis = vectors[:, [*range(-K, 0), *range(ELL)]]
    gradients = np.stack([known.gradient(x, BATCHES[i % len(BATCHES)]) for i, x in enumerate(points())])
    outside = gradients - gradients @ basis @ basis.T
    whole, left = np.mean(gradients**2, axis=0), np.mean(outside**2, axis=0)
    ours, alone = (np.sum(left / (np.sqrt((1 - since) * nu + since * x) + eps)) for x in (left, whole))
    return ours / alone
