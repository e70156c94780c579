"""Runs the benchmarks whose figures the documentation quotes: ``make bench``."""

from __future__ import annotations

from benchmarks import common, memory, momentum_rule, precision, refresh, train_step, update_step
from benchmarks.torch import overhead
from benchmarks.torch import refresh as torch_refresh


def main() -> None:
    """All tables, one after the other."""
    args = common.parser(__doc__).parse_args()
    out = ["--out", str(args.out)] if args.out else []
    print(", ".join(f"{name} {value}" for name, value in common.machine().items()))
    update_step.main(out)
    memory.main(out)
    train_step.main(["--repeats", "3", *out])
    refresh.main(["--models", "softmax,autoencoder,lstm", "--repeats", "1", *out])
    precision.main(["--repeats", "1", *out])
    momentum_rule.main(out)
    overhead.main(out)
    torch_refresh.main(["--models", "cnn", "--batch", "4", "--repeats", "2", *out])


if __name__ == "__main__":
    main()
