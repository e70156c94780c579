"""How crowded a base's limit is: against a dense Hessian, and against the steps that the base itself takes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

pytest.importorskip("flax")

from benchmarks import limits as benchmark
from fosi.experiments.tasks import diagnosing, limits, probing, soap, suite_report
from fosi.experiments.tasks.plan import Plan


def probe(optimizer, steps=7):
    plan = Plan("wave", optimizer, tiny=True)
    return probing.train(plan, plan.build(None, False), steps=steps, known=limits.KNOWN)


def hessian(found):
    flat, back = ravel_pytree(found.run.params)
    (batch,) = found.batches(1)
    return np.asarray(jax.hessian(lambda x: found.loss(back(x), batch)[0])(flat), np.float64)


def largest(matrix, count):
    return np.sort(np.linalg.eigvalsh((matrix + matrix.T) / 2))[::-1][:count]


def test_adam_sees_the_hessian_between_what_it_divides_by(monkeypatch):
    monkeypatch.setattr(limits, "PAIRS", 5)
    monkeypatch.setattr(limits, "PRODUCTS", 60)
    found = probe("adam")
    nu = np.asarray(ravel_pytree(found.second_moments())[0], np.float64)
    factors = 1 / np.sqrt(np.sqrt(nu) + 1e-8)
    seen = limits.measure(found)
    assert seen["limit"] == pytest.approx(38 / found.engine.rate)
    dense = factors[:, None] * hessian(found) * factors
    np.testing.assert_allclose(seen["eigenvalues"][:3], largest(dense, 3), rtol=2e-2)


def test_soap_sees_it_in_its_own_coordinates(monkeypatch):
    monkeypatch.setattr(limits, "PAIRS", 5)
    monkeypatch.setattr(limits, "PRODUCTS", 60)
    found = probe("soap")
    seen = limits.measure(found)
    assert seen["limit"] == pytest.approx(2 * 1.95 / 0.05 / found.engine.rate)
    # What SOAP divides by, read off its own steps: a column each, the mean of gradients being one entry of it.
    (state,) = (s for s in jax.tree.leaves(found.run.opt_state, is_leaf=limits._is_soap) if limits._is_soap(s))
    flat, back = ravel_pytree(found.run.params)
    made, count = soap.soap(1.0), int(state.count)
    nothing = jax.tree.map(jnp.zeros_like, found.run.params)

    def step(entry):
        return ravel_pytree(made.update(nothing, state._replace(mu=back(entry)))[0])[0]

    columns = np.asarray(jax.jit(jax.vmap(step))(jnp.eye(len(flat))), np.float64)
    # Such a step has moved the averages once more, by zero.
    older = np.sqrt(0.95 * (1 - 0.95 ** (count - 1)) / (1 - 0.95**count))
    inverse = -columns * (1 - 0.95**count) / 0.95 * older
    dense = np.linalg.eigvals(inverse @ hessian(found))
    np.testing.assert_allclose(seen["eigenvalues"][:3], np.sort(dense.real)[::-1][:3], rtol=2e-2)


def test_gradient_descent_sees_the_hessian_itself(monkeypatch):
    monkeypatch.setattr(limits, "PAIRS", 5)
    monkeypatch.setattr(limits, "PRODUCTS", 60)
    found = probe("heavy-ball")
    assert limits.coordinates(found) is None
    seen = limits.measure(found)
    assert seen["limit"] == pytest.approx(2 * 1.9 / found.engine.rate)
    np.testing.assert_allclose(seen["eigenvalues"][:3], largest(hessian(found), 3), rtol=1e-3)


def test_other_coordinates_are_zero_where_training_stands():
    for optimizer in ("adam", "soap"):
        found = probe(optimizer)
        there = limits.coordinates(found)
        zeros = jax.tree.map(jnp.zeros_like, found.run.params)
        assert float(optax.tree.norm(optax.tree.sub(there(zeros), found.run.params))) == 0
        # A step of one along what the base sees is a step of P^(−½): twice as far is twice as long.
        ones = jax.tree.map(jnp.ones_like, zeros)
        once, twice = (optax.tree.sub(there(optax.tree.scale(x, ones)), found.run.params) for x in (1.0, 2.0))
        np.testing.assert_allclose(optax.tree.norm(twice), 2 * optax.tree.norm(once), rtol=1e-3)


def test_what_divides_by_nothing_yet_is_refused():
    for optimizer, steps in (("adam", 0), ("soap", 1)):
        with pytest.raises(ValueError, match=f"steps is {steps}; give 2 or more: {optimizer} has divided by nothing"):
            limits.measure(probe(optimizer, steps))


def test_what_is_not_left_or_not_known_is_no_number():
    crowd = limits.Crowd(Plan("wave", "adam"), 9, (1.0, 0.5, -0.1), "test")
    assert (crowd.longer(1), crowd.longer(2), crowd.longer(3)) == (2.0, None, None)


def test_a_report_says_how_much_longer_steps_can_be(tmp_path):
    assert limits.section(tmp_path) == ([], [])
    for task, base, factor, last in (("wave", "adam", 1.0, 0.02), ("deep-ae", "soap", 3.0, 0.5)):
        values = np.geomspace(1.0, last, limits.PAIRS) * 100
        line = {
            "command": "limits",
            "step": 400,
            "plan": Plan(task, base, rate_factor=factor).record(),
            "limit": 100.0,
            "eigenvalues": values.tolist(),
            "device": "test",
        }
        (tmp_path / task).mkdir()
        tiny = line | {"plan": Plan(task, base, tiny=True).record()}
        (tmp_path / task / limits.FILE).write_text(json.dumps(line) + "\n" + json.dumps(tiny) + "\n")
    parts, written = limits.section(tmp_path)
    text = "\n".join(parts)
    assert "| wave | adam | 400 | 1 | 0.37 | 0.02 | 2.73 | 50 |" in text
    assert "| deep-ae, 3× rate | soap | 400 | 1 | 0.84 | 0.5 | 1.19 | 2 |" in text
    assert text.count("400") == 2  # what is tiny does not count
    figure = limits.draw(limits.read(tmp_path))
    assert [axis.get_title() for axis in figure.axes] == ["as adam sees it", "as soap sees it"]
    assert [path.name for path in written] == ["limits.png", "limits.pdf"]
    (tmp_path / "limits.png").unlink()
    assert set(written) < set(suite_report.write(tmp_path)) and (tmp_path / "limits.png").stat().st_size > 10_000


def test_the_benchmark_writes_what_a_report_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limits, "PRODUCTS", 45)
    benchmark.main(["--tasks", "wave", "--bases", "adam,soap", "--steps", "3", "--tiny", "--out", str(tmp_path)])
    assert "wave soap after 3:" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "wave" / limits.FILE).read_text().splitlines()]
    assert [line["plan"]["optimizer"] for line in lines] == ["adam", "soap"]
    assert all(len(line["eigenvalues"]) == limits.PAIRS and line["step"] == 3 for line in lines)
    assert limits.read(tmp_path) == []


def test_a_diagnosis_is_still_of_bases_alone():
    plan = Plan("wave", "soap", tiny=True)
    with pytest.raises(ValueError, match="optimizer is 'soap'; give a base"):
        probing.train(plan, plan.build(None, False), steps=1)
    assert diagnosing.spectrum(probe("soap"), 1, k=2, num_matvecs=8).eigenvalues.shape == (2,)
