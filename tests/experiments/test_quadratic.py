"""The functions, the programs that minimise them, and what a study leaves behind."""

import itertools
import json

import numpy as np
import pytest

from fosi.experiments.quadratic import condition, rotation, spectrum, study
from fosi.experiments.quadratic.descent import OPTIMIZERS, Method, descent
from fosi.experiments.quadratic.functions import (
    functions,
    one_large,
    powers,
    rotated_basis,
    start,
    two_clusters,
    uniform_basis,
)
from fosi.experiments.records import Journal
from tests import oracle

N, STEPS, PAIRS = 12, 30, 3  # so many products that Lanczos finds the whole spectrum


def family():
    lam = np.stack(
        [np.r_[50.0, 20.0, 9.0, np.linspace(1, 0.1, N - 3)], np.r_[8.0, 6.0, 4.0, np.linspace(1, 0.5, N - 3)]]
    )
    return functions([uniform_basis(N, seed) for seed in (0, 1)], lam, np.stack([start(N, 0), start(N, 7)]))


def literally(method, basis, lam, theta, eta, beta):
    """The paper's algorithm in NumPy."""
    hessian = (basis * lam) @ basis.T
    newton = None
    match method.base:
        case "gd":
            base, rule = oracle.Linear(eta), "gd"
        case "heavy-ball":
            base, rule = oracle.Linear(eta, oracle.HeavyBallMomentum(beta)), "heavy_ball"
            newton = oracle.HeavyBallMomentum(beta)
        case _:
            base, rule = oracle.Adam(eta, beta1=beta), None
            newton = oracle.AdamMomentum(beta)
    if method.with_fosi:
        settings = {"k": method.k, "alpha": method.alpha, "newton": newton, "max_lr_scale": method.c}
        path = oracle.Fosi(base, lr_rule=rule, **settings).optimize(
            theta, lambda t, x: hessian @ x, lambda t, x: hessian, STEPS
        )
    else:
        path = [theta]
        for _ in range(STEPS):
            path.append(path[-1] + base(hessian @ path[-1]))
    return np.array([0.5 * x @ hessian @ x for x in path])


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_curves_are_those_of_the_paper_written_literally(name, backend):
    of, method = family(), Method(name, k=PAIRS)
    eta = np.array([[0.02, 0.1], [0.01, 0.05]])
    beta = np.array([[0.9, 0.8], [0.7, 0.95]])
    values = descent(backend)(method, of, eta, beta, STEPS)
    assert values.shape == (2, 2, STEPS + 1) and values.dtype == np.float64
    for b, c in np.ndindex(2, 2):
        args = of.bases[b], of.eigenvalues[b, c], of.bases[b] @ of.starts[b, c], eta[b, c], beta[b, c]
        np.testing.assert_allclose(values[b, c], literally(method, *args), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("c", [1.0, 1.5, np.inf])
def test_cap_on_the_scaling_is_kept(c):
    of, method = family(), Method("fosi-gd", c=c, k=PAIRS)
    values = descent("jax")(method, of, 0.02, 0.0, STEPS)
    literal = literally(method, of.bases[0], of.eigenvalues[0, 0], of.bases[0] @ of.starts[0, 0], 0.02, 0.0)
    np.testing.assert_allclose(values[0, 0], literal, rtol=1e-6, atol=1e-12)


def test_eigenvalues_are_the_papers():
    assert one_large(4, 7.0).tolist() == pytest.approx([7, 1, 1 / 1.5, 1 / 2.25])
    assert two_clusters(100)[[0, 9, 10, 99]].tolist() == pytest.approx([10, 9, 0.1, 0.01])
    assert powers(100, 1.12)[[0, 99]].tolist() == pytest.approx([0.00112, 0.001 * 1.12**100])


def test_starts_are_the_papers_and_then_drawn():
    assert start(5, 0).tolist() == [0.5, 1.0, 0.5, 0.5, 0.5]
    assert not np.allclose(start(5, 1), start(5, 2)) and np.array_equal(start(5, 1), start(5, 1))


@pytest.mark.parametrize(
    ("block", "turned"), [("ends", [0, 1, 8, 9]), ("largest", [6, 7, 8, 9]), ("smallest", [0, 1, 2, 3])]
)
def test_rotation_turns_the_axes_asked_for(block, turned):
    basis = rotated_basis(10, 4, 0, block)
    np.testing.assert_allclose(basis.T @ basis, np.eye(10), atol=1e-14)
    still = [i for i in range(10) if i not in turned]
    assert np.array_equal(basis[:, still], np.eye(10)[:, still])
    assert (np.abs(basis[np.ix_(turned, turned)]) > 1e-3).sum() > 8
    assert np.array_equal(rotated_basis(10, 0, 0, block), np.eye(10))


def test_rotation_says_how_many_rows_the_diagonal_does_not_dominate():
    for zeta in (0, 30, 90):
        hessian = (rotated_basis(100, zeta, 0) * powers(100, 1.12)) @ rotated_basis(100, zeta, 0).T
        rest = np.abs(hessian).sum(axis=1) - np.abs(np.diag(hessian))
        assert (np.diag(hessian) < rest).sum() == pytest.approx(zeta, abs=1)


SMALL = condition.Settings(n=20, seeds=3, iterations=4)


def _stop_at(done):
    def stop(progress):
        if progress.done == done:
            raise KeyboardInterrupt

    return stop


def without_environment(path):
    records = [r for r in map(json.loads, path.read_text().splitlines()) if r.get("kind") != "environment"]
    return [{name: value for name, value in r.items() if name != "seconds"} for r in records]


def test_interrupted_study_goes_on_where_it_stopped(tmp_path):
    whole = study.run(condition, SMALL, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        study.run(condition, SMALL, tmp_path / "cut", _stop_at(3))
    path = tmp_path / "cut" / "condition.jsonl"
    with path.open("a") as file:  # it was in the middle of a record
        file.write('{"study": "condition", "optimizer": "fosi-gd", "n": 20}\n{"study": "cond')
    again = []
    assert study.run(condition, SMALL, tmp_path / "cut", again.append) == whole
    assert [p.unit for p in again][:-1] == [u.name for u in condition.units(SMALL)][3:]
    assert [p.done for p in again] == [3, 4, 5, 6] and {p.total for p in again} == {6}
    assert without_environment(path) == without_environment(tmp_path / "whole" / "condition.jsonl")


def test_finished_study_is_not_computed_again_nor_its_file_touched(tmp_path, monkeypatch):
    first = study.run(condition, SMALL, tmp_path)
    path = tmp_path / "condition.jsonl"
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(condition, "descent", lambda backend: pytest.fail("computed again"))
    monkeypatch.setattr("fosi.experiments.records._version", lambda package: "another")
    assert study.run(condition, SMALL, tmp_path) == first
    assert path.stat().st_mtime_ns == before


def test_going_on_with_another_version_says_so(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        study.run(condition, SMALL, tmp_path, _stop_at(2))
    monkeypatch.setattr("fosi.experiments.records._version", lambda package: "another")
    study.run(condition, SMALL, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "condition.jsonl").read_text().splitlines()]
    environments = [r for r in records if r.get("kind") == "environment"]
    assert len(environments) == 2 and environments[1]["jax"] == "another" != environments[0]["jax"]
    assert environments[0]["k"] == condition.PAIRS  # what cannot be chosen is recorded as well


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: ['{"a": 1}'], "is not a file of results"),
        (lambda lines: ["notes of my own", "more"], "line 1 is not JSON"),
        (lambda lines: [*lines[:5], "[1, 2]", *lines[5:]], "line 6 is not a JSON object"),
        (lambda lines: [*lines[:5], '{"study', *lines[5:]], "line 6 is not JSON"),
        (lambda lines: lines[:3] + lines[4:], "is damaged: 'seed 0, gd' has 4 records, it was written with 5"),
    ],
)
def test_what_is_not_ours_or_damaged_is_not_written_over(spoil, message, tmp_path):
    study.run(condition, SMALL, tmp_path)
    path = tmp_path / "condition.jsonl"
    path.write_text("\n".join(spoil(path.read_text().splitlines())) + "\n")
    before = path.read_text()
    with pytest.raises(ValueError, match=message):
        study.run(condition, SMALL, tmp_path)
    assert path.read_text() == before


def test_study_that_fails_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(condition, "descent", lambda backend: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(RuntimeError):
        list(condition._run(SMALL, 0, Method("gd")))
    with pytest.raises(RuntimeError):
        study.run(condition, SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path):
    study.run(condition, SMALL, tmp_path)
    before = (tmp_path / "condition.jsonl").read_text()
    with pytest.raises(
        ValueError, match=r"condition\.jsonl holds results with seeds 3, not seeds 4: give another folder"
    ):
        study.run(condition, condition.Settings(n=20, seeds=4, iterations=4), tmp_path)
    assert (tmp_path / "condition.jsonl").read_text() == before


def test_records_have_the_documented_fields(tmp_path):
    settings = spectrum.Settings(n=(12,), lambda1=(5.0, 1e4), seeds=2, iterations=3)
    records = study.run(spectrum, settings, tmp_path)
    for r in records:
        assert list(r) == ["study", "optimizer", "n", "lambda1", "eta", "momentum", "c", "iteration", "value", "seed"]
    assert {(r["optimizer"], r["momentum"], r["c"]) for r in records} == {
        ("gd", None, None),
        ("heavy-ball", 0.9, None),
        ("adam", 0.9, None),
        ("fosi-gd", None, "inf"),
        ("fosi-heavy-ball", 0.9, "inf"),
        ("fosi-adam", 0.9, None),
    }
    iterations = {seed: sorted({r["iteration"] for r in study.select(records, seed=seed)}) for seed in (0, 1)}
    assert iterations == {0: [0, 1, 2, 3], 1: [3]}  # curves of the paper's start, end points of the others
    grid = rotation.Settings(n=12, b=(1.1, 1.2), zeta=(0, 4), seeds=1, iterations=2)
    cells = study.run(rotation, grid, tmp_path)
    keys = [(r["optimizer"], r["b"], r["zeta"]) for r in cells]
    assert sorted(keys) == sorted(itertools.product(OPTIMIZERS, grid.b, grid.zeta))


def test_what_diverges_is_recorded_as_such(tmp_path):
    values = descent("jax")(Method("gd"), family(), 1e3, 0.0, 200)
    assert not np.isfinite(values[..., -1]).any()
    made = study.measurements("x", Method("gd"), [(200, values[0, 0, -1])], eta=1e3, momentum=None, seed=0)
    journal = Journal(tmp_path / "x.jsonl", {}, 1)
    journal.append("all", lambda: made)
    assert '"value": null' in (tmp_path / "x.jsonl").read_text()
    assert study.ends(Journal(tmp_path / "x.jsonl").measured, "optimizer") == {("gd",): np.inf}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spectrum.Settings(n=()), "n is empty"),
        (lambda: spectrum.Settings(n=(5,)), "n is 5; give 11 or more"),
        (lambda: spectrum.Settings(lambda1=(0.5,)), "lambda1 is 0.5; give more than 1"),
        (lambda: condition.Settings(backend="numpy"), "backend is 'numpy'; give one of jax, torch"),
        (lambda: condition.Settings(seeds=0), "seeds is 0; give 1 or more"),
        (lambda: rotation.Settings(zeta=(0, 101)), "zeta runs from 0 to 101; it must stay between 0 and n=100"),
        (lambda: rotation.Settings(b=(1.0,)), "b is 1.0; give more than 1"),
        (lambda: rotation.Settings(block="middle"), "block is 'middle'; give one of ends, largest, smallest"),
        (lambda: descent("numpy"), "backend is 'numpy'; give one of jax, torch"),
        (lambda: Method("sgd"), "optimizer is 'sgd'; give one of gd, heavy-ball"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
