"""What both scripts here share: the data, the settings, and what a training must have done."""

from importlib.util import find_spec

import numpy as np

STEPS = 60
LEARNING_RATE, MOMENTUM = 2e-3, 0.9  # stable for the base, hence slow along all but the steepest directions
OPTIONS = {"k": 2, "warmup": 5, "refresh_every": 30}
REFRESHES = 2  # before the updates of steps 5 and 35


def assert_missing(*packages):
    """Fails where one of the packages is installed: the environment would prove nothing then."""
    there = [name for name in packages if find_spec(name) is not None]
    assert not there, f"{', '.join(there)} can be imported: this script must run where that is not so"


def data():
    """A linear regression whose inputs differ in scale: what a first-order method is slow on."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 6)) * np.array([10.0, 5.0, 1.0, 0.7, 0.5, 0.3])
    y = x @ np.array([0.5, -1.0, 1.0, -1.0, 1.0, -1.0])
    return x.astype(np.float32), y.astype(np.float32)


def check_and_report(name, version, base, with_fosi, refreshes):
    """Says in one line what came out, and fails where FOSI did not end at half the base's loss or lower."""
    print(f"{name} {version} alone: loss after {STEPS} steps {base:.3g} with SGD, {with_fosi:.3g} with FOSI around it")
    assert refreshes == REFRESHES, f"{refreshes} refreshes, not {REFRESHES}"
    assert with_fosi < 0.5 * base, f"the loss with FOSI, {with_fosi:.3g}, is not below half of the base's, {base:.3g}"
