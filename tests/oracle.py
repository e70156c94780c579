"""The paper's Algorithms 1 and 2, literally: NumPy, float64, a dense Hessian and ``numpy.linalg.eigh``.

Nothing here is fast and nothing here is shared with the library. Names and order are the paper's
(appendices A.1 and A.2; section 3.4 for momentum, section 3.6 for the learning rate). Fast code must agree
with this; this is never changed to agree with fast code.
"""

import numpy as np

# Linear combinations of past gradients (section 3.4): "given g, return ḡ".


class NoMomentum:
    def __call__(self, g):
        return g


class HeavyBallMomentum:
    def __init__(self, beta):
        self.beta, self.velocity = beta, 0.0

    def __call__(self, g):
        self.velocity = self.beta * self.velocity + g
        return self.velocity


class NesterovMomentum(HeavyBallMomentum):
    def __call__(self, g):
        self.velocity = self.beta * self.velocity + g
        return g + self.beta * self.velocity


class AdamMomentum:
    """Adam's first moment with its bias correction."""

    def __init__(self, beta):
        self.beta, self.velocity, self.count = beta, 0.0, 0

    def __call__(self, g):
        self.count += 1
        self.velocity = self.beta * self.velocity + (1 - self.beta) * g
        return self.velocity / (1 - self.beta**self.count)


# Base optimizers: "given gradient, return descent direction". eta is a number or a function of the step.


class Linear:
    """−η diag(q) ḡ: GD, Heavy-Ball and Nesterov with q = 1, a fixed diagonal preconditioner otherwise."""

    def __init__(self, eta, momentum=None, q=1.0):
        self.eta, self.momentum, self.q, self.count = eta, momentum or NoMomentum(), q, 0

    def mean(self, g):
        return self.momentum(g)

    def descend(self, g_mean):
        eta = at(self.eta, self.count)
        self.count += 1
        return -eta * self.q * g_mean

    def __call__(self, g):
        return self.descend(self.mean(g))


class Adam:
    def __init__(self, eta, beta1=0.9, beta2=0.999, eps=1e-8):
        self.eta, self.beta1, self.beta2, self.eps = eta, beta1, beta2, eps
        self.m, self.v, self.count = 0.0, 0.0, 0

    def __call__(self, g):
        eta = at(self.eta, self.count)
        self.count += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m_hat = self.m / (1 - self.beta1**self.count)
        v_hat = self.v / (1 - self.beta2**self.count)
        return -eta * m_hat / (np.sqrt(v_hat) + self.eps)


def bfgs(H, pairs):
    """The inverse Hessian that BFGS's textbook recursion makes of a first guess and pairs (s, y), the oldest first."""
    for s, y in pairs:
        rho, identity = 1 / (s @ y), np.eye(len(s))
        H = (identity - rho * np.outer(s, y)) @ H @ (identity - rho * np.outer(y, s)) + rho * np.outer(s, s)
    return H


def at(value, step):
    return value(step) if callable(value) else value


OPTIMAL_RATE = {
    "gd": lambda L, mu: 2 / (L + mu),
    "heavy_ball": lambda L, mu: 4 / (np.sqrt(L) + np.sqrt(mu)) ** 2,
    "nesterov": lambda L, mu: 4 / (3 * L + mu),
}


def ese(H, k, ell):
    """Algorithm 1 without Lanczos: all eigenvalues, descending, and the k largest and ell smallest pairs."""
    values, vectors = np.linalg.eigh(H)
    values, vectors = values[::-1], vectors[:, ::-1]
    n = len(values)
    wanted = [*range(k), *range(n - ell, n)]
    return values, values[wanted], vectors[:, wanted]


class Fosi:
    """Algorithm 2.

    ``newton`` is the Newton part's own momentum; it must be the same linear combination as the base's.
    ``rule`` says what happens to momentum at a refresh, of which the paper says nothing (within one spectrum
    all agree):

      - ``"literal"``: n-vector velocities of g₁ and of g₂ that live on unchanged;
      - ``"projected"``: that of g₁ is projected onto the new V: v₁ ← V Vᵀ v₁; the base keeps its own state;
      - ``"whole"``: one velocity, the base's, of the whole gradient; both parts read it through the V in use.

    ``inside`` marks the coordinates whose Hessian is taken (all where None); the others are the base's alone.
    """

    def __init__(
        self,
        base,
        *,
        k,
        ell=0,
        alpha=0.01,
        warmup=0,
        every=np.inf,
        eps=1e-8,
        newton=None,
        rule="literal",
        lr_rule=None,
        max_lr_scale=3.0,
        inside=None,
        weight_decay=0.0,
    ):
        assert rule in ("literal", "projected", "whole")
        assert rule != "whole" or newton is None
        self.base_opt_step, self.k, self.ell, self.alpha = base, k, ell, alpha
        self.T, self.W, self.eps = every, warmup, eps
        self.newton, self.rule = newton or NoMomentum(), rule
        self.lr_rule, self.max_lr_scale = lr_rule, max_lr_scale
        self.inside, self.weight_decay = inside, weight_decay
        self.u, self.V, self.scale = 0.0, None, 1.0
        self.estimates = []  # (t, all eigenvalues, V) of every ESE call, for tests to look at

    def update_step(self, t, theta, g):
        V, u, alpha = self.V, self.u, at(self.alpha, t)
        if self.rule == "whole":
            g_mean = self.base_opt_step.mean(g)
            g1 = V @ (V.T @ g_mean)
            g2 = g_mean - V @ (V.T @ g_mean)
            db = self.scale * self.base_opt_step.descend(g2)
        else:
            g1 = self.newton(V @ (V.T @ g))
            g2 = g - V @ (V.T @ g)
            db = self.scale * self.base_opt_step(g2)
        d1 = -alpha * V @ ((V.T @ g1) * u)
        d2 = db - V @ (V.T @ db)
        decay = at(self.base_opt_step.eta, t) * self.weight_decay * theta
        return theta + d1 + d2 - decay

    def refresh(self, t, H):
        inside = np.ones(len(H), bool) if self.inside is None else self.inside
        values, lam, V = ese(H[np.ix_(inside, inside)], self.k, self.ell)
        self.V = np.zeros((len(H), self.k + self.ell))
        self.V[inside] = V
        self.u = 1 / np.maximum(np.abs(lam), self.eps)
        self.scale = np.where(inside, self.learning_rate_scale(values), 1.0)
        if self.rule == "projected" and not isinstance(self.newton, NoMomentum):
            self.newton.velocity = self.V @ (self.V.T @ (np.zeros(len(H)) + self.newton.velocity))
        self.estimates.append((t, values, self.V))

    def learning_rate_scale(self, values):
        """Section 3.6: η₂*/η* from λ₁, λₙ and λₖ, λₙ₋ₗ₊₁; negative curvature counts as none."""
        if self.lr_rule is None:
            return 1.0
        best = OPTIMAL_RATE[self.lr_rule]
        lam_k = values[self.k - 1] if self.k else values[0]
        lam_ell = values[-self.ell] if self.ell else values[-1]
        whole = best(max(values[0], 0.0), max(values[-1], 0.0))
        rest = best(max(lam_k, 0.0), max(lam_ell, 0.0))
        return min(max(rest / whole, 1.0), self.max_lr_scale)

    def optimize(self, theta, gradient, hessian, steps):
        """θ₀ … θ_steps as rows; ``gradient`` and ``hessian`` are functions of (t, θ)."""
        path = [np.array(theta, np.float64)]
        self.V = np.zeros((len(theta), self.k + self.ell))
        for t in range(steps):
            g = gradient(t, path[-1])
            if t >= self.W and (t - self.W) % self.T == 0:
                self.refresh(t, hessian(t, path[-1]))
            path.append(self.update_step(t, path[-1], g))
        return np.stack(path)
