"""Runs the benchmarks whose figures the documentation quotes: ``make bench``."""

from __future__ import annotations

from benchmarks import memory, momentum_rule, precision, refresh, train_step, update_step
from benchmarks.common import machine

if __name__ == "__main__":
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    update_step.main([])
    train_step.main([])
    memory.main([])
    refresh.main(["--models", "softmax,autoencoder,lstm", "--repeats", "1"])
    precision.main(["--models", "softmax,autoencoder", "--repeats", "1"])
    momentum_rule.main([])
