"""The paper's experiments on quadratic functions (§5.3 and appendix): six studies, one module each."""

from fosi.experiments.quadratic import condition, illustration, learning_rate, rotation, spectrum, stochastic
from fosi.experiments.quadratic.study import Study

STUDIES: dict[str, Study] = {
    study.NAME: study for study in (spectrum, condition, rotation, learning_rate, stochastic, illustration)
}
"""The studies by name, in the paper's order."""

QUICK = {
    "spectrum": spectrum.Settings(n=(100,), lambda1=(5.0, 200.0), seeds=5),
    "condition": condition.Settings(seeds=3),
    "rotation": rotation.Settings(b=(1.1, 1.12, 1.14, 1.16), zeta=(0, 10, 30, 50, 70, 90, 100), seeds=1),
    "learning-rate": learning_rate.Settings(rates_per_decade=5, momenta=6),
    "stochastic": stochastic.Settings(betas=(0.6, 0.9), seeds=4, iterations=3000),
    "illustration": illustration.Settings(),
}
"""Settings with which the studies take seconds and still show what they are about."""

__all__ = ["QUICK", "STUDIES"]
