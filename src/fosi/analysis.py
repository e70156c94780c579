"""FOSI as a preconditioner, in dense matrices: for study, not for training (section 3.3, appendix A.4)."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fosi.schedule import check_pairs

Matrix = NDArray[np.float64]


class ConditionNumbers(NamedTuple):
    """Condition numbers before FOSI and with it.

    Attributes:
      original: λ₁ / λₙ of the Hessian, which the base optimizer faces alone.
      whole: largest over smallest eigenvalue of the effective Hessian P⁻¹H.
      newton: that of the subspace of the k + ℓ extreme eigenvectors, always 1.
      base: that of the complement, λₖ₊₁ / λₙ₋ₗ, which is left to the base optimizer.
      case: which of the three cases of Lemma 4 holds for α: 1 below, 2 within, 3 above [η λₙ₋ₗ, η λₖ₊₁].

    Example:
      >>> condition_numbers([8.0, 4.0, 2.0, 1.0], k=1, ell=1, alpha=1.0, eta=0.25).improved
      True
    """

    original: float
    whole: float
    newton: float
    base: float
    case: Literal[1, 2, 3]

    @property
    def improved(self) -> bool:
        """Whether the effective condition number is no larger than the original one; always so in case 2."""
        return self.whole <= self.original


def inverse_preconditioner(
    eigvals: ArrayLike, eigvecs: ArrayLike, alpha: float, eta: float, q: ArrayLike | None = None
) -> Matrix:
    """Inverse preconditioner P⁻¹ by which one FOSI step is θ − P⁻¹ g.

    P⁻¹ = α V̂ diag(1/|λ̂|) V̂ᵀ + η (I − V̂ V̂ᵀ) diag(q) (I − V̂ V̂ᵀ)

    Args:
      eigvals: the k + ℓ extreme eigenvalues λ̂, shape (r,).
      eigvecs: their orthonormal eigenvectors V̂ as columns, shape (n, r).
      alpha: learning rate of the Newton part.
      eta: learning rate of the base optimizer.
      q: diagonal of the base optimizer's inverse preconditioner, shape (n,); ``None``: ones (Lemma 3).

    Returns:
      The symmetric positive definite matrix P⁻¹, shape (n, n).

    Raises:
      ValueError: if shapes do not fit together, an eigenvalue is 0, or ``alpha``, ``eta`` or an entry of
        ``q`` is not positive and finite.

    Example:
      >>> inverse_preconditioner([4.0], [[1.0], [0.0]], alpha=1.0, eta=0.1)
      array([[0.25, 0.  ],
             [0.  , 0.1 ]])

    References:
      Lemmas 1 and 3 of the paper (appendices A.3 and A.4).
    """
    V = np.asarray(eigvecs, dtype=np.float64)
    if V.ndim != 2 or not 1 <= V.shape[1] <= V.shape[0]:
        raise ValueError(f"eigvecs has shape {V.shape}; it must be (n, r), 1 <= r <= n, one column a vector")
    n, r = V.shape
    lam = _shaped("eigvals", eigvals, (r,))
    if not (np.isfinite(lam) & (lam != 0)).all():
        raise ValueError(f"eigvals={lam} has an entry that cannot be inverted; all must be finite and not 0")
    diagonal = np.ones(n) if q is None else _positive("q", q, (n,))
    alpha, eta = float(_positive("alpha", alpha, ())), float(_positive("eta", eta, ()))
    complement = np.eye(n) - V @ V.T
    result: Matrix = alpha * (V / np.abs(lam)) @ V.T + eta * (complement * diagonal) @ complement
    return result


def effective_hessian(
    hessian: ArrayLike,
    eigvals: ArrayLike,
    eigvecs: ArrayLike,
    alpha: float,
    eta: float,
    q: ArrayLike | None = None,
) -> Matrix:
    """Hessian as the preconditioned step sees it.

    P⁻¹ H, where α is an eigenvalue and V̂ lies in its eigenspace (−α where λ̂ is negative).

    Args:
      hessian: the Hessian H, shape (n, n).
      eigvals: as in `inverse_preconditioner`.
      eigvecs: likewise.
      alpha: likewise.
      eta: likewise.
      q: likewise.

    Returns:
      The matrix P⁻¹ H, shape (n, n); in general not symmetric.

    Raises:
      ValueError: as `inverse_preconditioner`, and if ``hessian`` does not fit the eigenvectors.

    Example:
      >>> effective_hessian([[4.0, 0.0], [0.0, 3.0]], [4.0], [[1.0], [0.0]], alpha=1.0, eta=0.5)
      array([[1. , 0. ],
             [0. , 1.5]])

    References:
      Lemmas 1 and 3 of the paper (appendices A.3 and A.4).
    """
    P_inv = inverse_preconditioner(eigvals, eigvecs, alpha, eta, q)
    result: Matrix = P_inv @ _shaped("hessian", hessian, P_inv.shape)
    return result


def condition_numbers(eigvals: ArrayLike, k: int, ell: int, alpha: float, eta: float) -> ConditionNumbers:
    """Condition numbers with a base optimizer that has no preconditioner of its own, such as GD.

    P⁻¹ H has the eigenvalues α (k + ℓ times) and η λₖ₊₁ … η λₙ₋ₗ, hence by the cases of Lemma 4

      1. α < η λₙ₋ₗ: η λₖ₊₁ / α
      2. η λₙ₋ₗ ≤ α ≤ η λₖ₊₁: λₖ₊₁ / λₙ₋ₗ, never above λ₁ / λₙ
      3. η λₖ₊₁ < α: α / (η λₙ₋ₗ)

    With k + ℓ = n nothing is left to the base: all condition numbers but the original are 1, in case 2.

    Args:
      eigvals: all n eigenvalues of the Hessian, positive, in any order.
      k: how many of the largest the Newton part takes.
      ell: how many of the smallest it takes.
      alpha: learning rate of the Newton part.
      eta: learning rate of the base optimizer.

    Returns:
      The named condition numbers.

    Raises:
      ValueError: if ``eigvals`` is not one-dimensional or not positive (the lemma assumes a convex function),
        k + ell is outside 1 … n, or ``alpha`` or ``eta`` is not positive and finite.
      TypeError: if ``k`` or ``ell`` is not an int.

    Example:
      >>> condition_numbers([8.0, 4.0, 2.0, 1.0], k=1, ell=1, alpha=1.0, eta=0.25)
      ConditionNumbers(original=8.0, whole=2.0, newton=1.0, base=2.0, case=2)

    References:
      Lemma 4 of the paper (appendix A.4).
    """
    lam = np.sort(_positive("eigvals", eigvals, None))[::-1]
    k, ell, n = check_pairs(k, ell, len(lam))
    alpha, eta = float(_positive("alpha", alpha, ())), float(_positive("eta", eta, ()))
    original = float(lam[0] / lam[-1])
    if k + ell == n:
        return ConditionNumbers(original, whole=1.0, newton=1.0, base=1.0, case=2)
    rest_max, rest_min = float(lam[k]), float(lam[n - ell - 1])
    base = rest_max / rest_min
    if alpha < eta * rest_min:
        return ConditionNumbers(original, whole=eta * rest_max / alpha, newton=1.0, base=base, case=1)
    if alpha > eta * rest_max:
        return ConditionNumbers(original, whole=alpha / (eta * rest_min), newton=1.0, base=base, case=3)
    return ConditionNumbers(original, whole=base, newton=1.0, base=base, case=2)


def _shaped(name: str, values: Any, shape: tuple[int, ...] | None) -> Matrix:
    """The values as float64 of that shape; ``None`` stands for one axis of any length but 0."""
    array = np.asarray(values, dtype=np.float64)
    fits = array.ndim == 1 and array.size > 0 if shape is None else array.shape == shape
    if not fits:
        wanted = "(n,) with n >= 1" if shape is None else shape
        raise ValueError(f"{name} has shape {array.shape}; it must be {wanted}")
    return array


def _positive(name: str, values: Any, shape: tuple[int, ...] | None) -> Matrix:
    array = _shaped(name, values, shape)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name}={array} is out of range; it must be positive and finite")
    return array
