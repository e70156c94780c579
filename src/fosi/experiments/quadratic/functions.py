"""The quadratic functions of the paper's studies, ½ θᵀHθ, as eigenvalues and eigenvectors of H."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Functions(NamedTuple):
    """Functions of n parameters: B eigenbases, and C sets of eigenvalues for each of them.

    The C functions of one basis share it, so that all their products with it are one matrix product.

    Attributes:
      bases: (B, n, n); the columns are the eigenvectors.
      eigenvalues: (B, C, n); in the paper's order, λ₁ first.
      starts: (B, C, n); θ₀ in coordinates of the eigenvectors, so that it turns with H.
    """

    bases: Array
    eigenvalues: Array
    starts: Array


def functions(bases: Any, eigenvalues: Any, starts: Any) -> Functions:
    """The functions with these bases (B, n, n); eigenvalues and starts are (n,), (C, n) or (B, C, n)."""
    bases, eigenvalues, starts = (np.asarray(x, np.float64) for x in (bases, eigenvalues, starts))
    shape = np.broadcast_shapes(eigenvalues.shape, starts.shape, (len(bases), 1, bases.shape[-1]))
    return Functions(bases, *(np.broadcast_to(x, shape) for x in (eigenvalues, starts)))


def start(n: int, seed: int) -> Array:
    """θ₀ in coordinates of the eigenvectors: for seed 0 the paper's scripts', for others drawn from N(0, I)."""
    if seed:
        return np.random.default_rng([seed, 1]).normal(size=n)
    return np.where(np.arange(n) == 1, 1.0, 0.5)


def uniform_basis(n: int, seed: int) -> Array:
    """The eigenvectors of a random symmetric matrix with entries from U(0, 1), in ``eigh``'s order.

    So λ₁ belongs to the vector of that matrix's smallest eigenvalue, as in the paper's scripts. It matters to Adam,
    which overshoots most along the vector of the largest one, whose entries are nearly equal.
    """
    upper = np.triu(np.random.default_rng([seed, 0]).uniform(size=(n, n)))
    vectors: Array = np.linalg.eigh(upper + np.triu(upper, 1).T).eigenvectors
    return vectors


def rotated_basis(n: int, zeta: int, seed: int, block: str = "ends") -> Array:
    """The coordinate axes, ζ of which are turned among themselves at random.

    The paper turns "a square block" of the diagonal matrix and does not say which eigenvalues are in it; its scripts
    take both ends of the spectrum, ζ/2 from either. It matters: see ``BLOCKS``.

    Args:
      n: dimension.
      zeta: how many axes are turned.
      seed: of the rotation.
      block: which: one of ``BLOCKS``, for eigenvalues in ascending order.
    """
    if block not in BLOCKS:
        raise ValueError(f"block is {block!r}; give one of {', '.join(BLOCKS)}")
    basis = np.eye(n)
    if zeta:
        smallest = {"ends": zeta // 2, "largest": 0, "smallest": zeta}[block]
        axes = np.r_[:smallest, n - (zeta - smallest) : n]
        q, r = np.linalg.qr(np.random.default_rng([seed, 0]).normal(size=(zeta, zeta)))
        basis[np.ix_(axes, axes)] = q * np.sign(np.diag(r))
    return basis


BLOCKS = ("ends", "largest", "smallest")
"""Which eigenvalues a rotation mixes: those at both ends of the spectrum, the largest, or the smallest ones."""


def one_large(n: int, largest: float) -> Array:
    """λ₁ as given, λᵢ = 1.5^−(i−2) for the others (studies 1 and 5)."""
    return np.r_[largest, 1.5 ** -np.arange(n - 1.0)]


def two_clusters(n: int, large: int = 10) -> Array:
    """Ten eigenvalues evenly in [9, 10], the others evenly in [0.01, 0.1] (study 2)."""
    return np.r_[np.linspace(10, 9, large), np.linspace(0.1, 0.01, n - large)]


def powers(n: int, b: float) -> Array:
    """0.001 bⁱ, i = 1 … n (studies 3 and 4)."""
    return 0.001 * b ** np.arange(1.0, n + 1)
