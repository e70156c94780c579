"""Trains with DeepXDE on its JAX backend, in a process of its own: DeepXDE chooses its backend once a process.

DeepXDE's steps must be those of a loop written by hand with plain ``fosi_adam``, on the same network and points.
"""

import os
import warnings

warnings.simplefilter("error")
os.environ["DDE_BACKEND"] = "jax"

import deepxde as dde  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from fosi.jax import fosi_adam, without_params  # noqa: E402
from fosi.jax.deepxde import RefreshCallback  # noqa: E402

jax.config.update("jax_disable_most_optimizations", True)  # so few steps are not worth a compiler's time

STEPS, WEIGHTS = 9, [1.0, 20.0]
SETTINGS = {"k": 2, "alpha": 0.1, "eps": 1.0, "warmup": 2, "refresh_every": 4, "num_matvecs": 12, "refresh": "external"}


class Recorder(dde.callbacks.Callback):
    def init(self):
        self.values = []

    def on_batch_end(self):
        self.values.append(self.model.params)


def pde(x, y, unknowns=(1.0,)):
    second, _ = dde.grad.hessian(y, x)
    return second + unknowns[0] * np.pi**2 * jnp.sin(np.pi * x)


dde.config.set_random_seed(0)
# Not symmetric around 0: a gradient would be 0 there but for rounding, which Adam makes whole steps of.
geometry = dde.geometry.Interval(0, 1)
boundary = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on: on)
data = dde.data.PDE(geometry, pde, boundary, 8, 2)
net = dde.nn.FNN([1, 6, 1], "tanh", "Glorot uniform")
model = dde.Model(data, net)
variable = dde.Variable(3.0)
opt = fosi_adam(1e-2, **SETTINGS)
model.compile(without_params(opt), loss_weights=WEIGHTS, external_trainable_variables=variable, verbose=0)
params = model.params
record, refresh = Recorder(), RefreshCallback()
model.train(iterations=4, callbacks=[record, refresh], verbose=0)
model.train(iterations=STEPS - 4, callbacks=[record, refresh], verbose=0)  # goes on counting where it stopped

# The network and the residual once more, by hand; the first two points are the boundary's.
points = jnp.asarray(data.train_x)


def u(net_params, x):
    layers = net_params["params"]
    hidden = jnp.tanh(x @ layers["denses_0"]["kernel"] + layers["denses_0"]["bias"])
    return (hidden @ layers["denses_1"]["kernel"] + layers["denses_1"]["bias"])[0]


def loss_fn(params, points):
    net_params, (factor,) = params
    second = jax.vmap(lambda x: jax.hessian(lambda x: u(net_params, x))(x)[0, 0])(points[2:])
    residual = second + factor * np.pi**2 * jnp.sin(np.pi * points[2:, 0])
    values = jax.vmap(lambda x: u(net_params, x))(points[:2])
    return WEIGHTS[0] * jnp.mean(residual**2) + WEIGHTS[1] * jnp.mean(values**2)


hand = fosi_adam(1e-2, loss_fn, **SETTINGS)
state, schedule = hand.init(params), hand.schedule(params)


@jax.jit
def step(params, state):
    updates, state = hand.update(jax.grad(loss_fn)(params, points), state, params)
    return optax.apply_updates(params, updates), state


for i in range(STEPS):
    if schedule.due(i):
        state = hand.refresh(state, params, batch=points)
    params, state = step(params, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), record.values[i], params)

ours = model.opt_state
assert int(ours.inner.refreshes) == int(state.refreshes) == 2
np.testing.assert_allclose(ours.inner.eigenvalues, state.eigenvalues, rtol=1e-3)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), ours.params, model.params)
assert float(variable.value) != 3.0
print("agrees", i + 1)
