"""Who is first on the tasks that are not the paper's: by hand, and a report whose numbers are the runs'."""

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flax")

from fosi.experiments import figures
from fosi.experiments.tasks import drawing, runs, settings, standings, suite_report, summary
from fosi.experiments.tasks.plan import Plan
from fosi.experiments.tasks.runs import Curve
from fosi.experiments.tasks.training import Point

NAN = float("nan")


def run(path, optimizer, losses, seed=0, pace=1.0, errors=None, rounds=None, shared=False, **more):
    """A run with a round a ``pace`` of seconds, the losses given."""
    plan = Plan("wave", optimizer, seed, mode="quick", rounds=rounds or len(losses), options=more)
    environment = {"device": "test", "shared": shared, "rate": 0.001, "jax": "1"}
    points = [
        Point(10 * i, pace * i, loss, error, 0, 0.0, 1.0, ())
        for i, (loss, error) in enumerate(zip(losses, errors or losses, strict=True), 1)
    ]
    done = {"gradient_seconds": 0.1, "peak_memory": None, "diverged": False, "compile_seconds": 1.0}
    return Curve(path / f"{plan.name}.jsonl", plan, environment, tuple(points), done)


def find(entries, optimizer, words=""):
    (found,) = (entry for entry in entries if (entry.optimizer, entry.settings) == (optimizer, words))
    return found


def test_medians_over_seeds_and_the_metric_where_the_loss_is_lowest(tmp_path):
    curves = [
        run(tmp_path, "adam", [4.0, 1.0, 2.0], 0, errors=[0.9, 0.5, 0.1]),
        run(tmp_path, "adam", [4.0, 3.0, 2.0], 1, errors=[0.9, 0.8, 0.7]),
        run(tmp_path, "adam", [4.0, 3.0, 3.0], 2, errors=[0.9, 0.6, 0.2]),
    ]
    (entry,) = standings.entries(curves)
    assert (entry.loss, entry.metric, entry.seconds) == (2.0, 0.6, 3.0)
    assert entry.typical.plan.seed == 2 and find(standings.entries(curves[:2]), "adam").typical.plan.seed == 0
    # Seeds get to 2.5 after 2 and 3 seconds and never, to 1.5 after 2 and never twice.
    assert entry.seconds_to(2.5) == 3.0 and entry.seconds_to(1.5) is None and entry.seconds_to(4.0) == 1.0


def test_runs_that_were_given_other_seconds_are_not_compared(tmp_path):
    short, long = (run(tmp_path, "adam", [4.0, 1.0]) for _ in range(2))
    long = replace(long, plan=replace(long.plan, rounds=None, seconds=20))
    found = standings.kinds([short, long])
    assert [(kind.words, kind.ending) for kind in found] == [("quick", "-quick"), ("quick, 20 s", "-quick-20s")]
    assert all(len(entries) == 1 for entries in found.values())
    # Whatever rounds they have, they are as long as each other.
    cut = replace(short, plan=replace(long.plan, rounds=2))
    ((_, entries),) = standings.kinds([long, cut]).items()
    assert [entry.settings for entry in entries] == ["", "2 rounds"]


def test_a_ratio_is_of_the_same_seed_to_the_lowest_loss_of_the_peer(tmp_path):
    curves = [run(tmp_path, "adam", [4.0, 2.0, 1.0, 1.5], seed) for seed in (0, 1, 2)]
    curves += [
        run(tmp_path, "fosi-adam", [3.0, 0.9, 0.8, 0.7], 0, pace=0.5),  # after 1 s of the peer's 3
        run(tmp_path, "fosi-adam", [3.0, 2.0, 1.0, 0.9], 1, pace=0.5),  # 1.5 of 3
        run(tmp_path, "fosi-adam", [3.0, 2.0, 1.2, 1.1], 2, pace=0.5),  # never
        run(tmp_path, "fosi-adam", [0.1, 0.1, 0.1, 0.1], 3),  # the peer has no such seed
    ]
    entries = standings.entries(curves)
    ours, peer = find(entries, "fosi-adam"), find(entries, "adam")
    assert ours.ratio(peer) == (0.5, 1, 3, 1 / 3, math.inf)
    # To arrive late is better than never.
    late = [
        run(tmp_path, "fosi-heavy-ball", [3.0] * 4, 0),
        run(tmp_path, "fosi-heavy-ball", [3.0, 3.0, 3.0, 1.0], 1, 9.0),
    ]
    late = find(standings.entries(late), "fosi-heavy-ball")
    assert late.ratio(peer) == (math.inf, 1, 2, 12.0, math.inf) and suite_report.ratio(late, peer) == "never (1 of 2)"
    assert standings.Entry("x", "", {1: late.runs[1]}).ratio(peer) == (12.0, 0, 1, 12.0, 12.0)
    assert peer.ratio(peer) == (1.0, 0, 3, 1.0, 1.0)
    # What is not timed is neither reached at a time nor missed.
    untimed = run(tmp_path, "fosi-heavy-ball", [0.5, 0.5, 0.5, 0.5])
    untimed = standings.Entry("x", "", {0: Curve(**{**vars(untimed), "points": _without_seconds(untimed)})})
    assert untimed.ratio(peer) is None and untimed.seconds_to(1.0) is None and untimed.loss == 0.5


def _without_seconds(curve):
    return tuple(point._replace(seconds=NAN) for point in curve.points)


def test_every_optimizer_stands_with_its_best_setting_and_some_set_no_target(tmp_path):
    curves = [
        run(tmp_path, "lbfgs", [4.0, 3.0, 2.0], memory_size=10),
        run(tmp_path, "lbfgs", [4.0, 3.0, 1.5], memory_size=100),
        run(tmp_path, "adam", [4.0, 3.0, 3.0]),
        run(tmp_path, "adam", [NAN, NAN, NAN], 1),
        run(tmp_path, "adam", [4.0, 4.0], rounds=2),  # shorter than the others
        run(tmp_path, "adam-lbfgs", [1.7, 1.7], switch_at=5),  # so is this, but its steps are longer
        run(tmp_path, "fosi-adam", [4.0, 3.0, 0.5]),
        run(tmp_path, "kfac", [4.0, 0.7, 1.0]),
    ]
    entries = standings.entries(curves)
    assert [(e.optimizer, e.settings, e.loss) for e in standings.tuned(entries).values()] == [
        ("fosi-adam", "", 0.5),
        ("kfac", "", 0.7),
        ("lbfgs", "memory_size 100", 1.5),
        ("adam-lbfgs", "switch_at 5, 2 rounds", 1.7),
    ]  # half of Adam's seeds have no loss
    assert standings.best_peer(entries, ("kfac",)).optimizer == "lbfgs"
    assert standings.best_peer(entries).optimizer == "kfac"
    assert standings.best_peer([find(entries, "fosi-adam")]) is None
    assert standings.kinds([]) == {}


def test_a_control_sets_no_target_and_stands_beside_the_ratio(tmp_path):
    curves = [
        run(tmp_path, "lbfgs", [4.0, 3.0, 2.0]),
        run(tmp_path, "lbfgs", [4.0, 2.0, 1.0], scaling="geometric"),
        run(tmp_path, "fosi-lbfgs", [2.0, 1.0, 0.5], scaling="geometric"),
    ]
    ((kind, known),) = standings.kinds(curves).items()
    assert list(standings.tuned(known)) == ["fosi-lbfgs", "lbfgs (control)", "lbfgs"]
    assert standings.best_peer(known).loss == 2.0 and standings.best_control(known).loss == 1.0
    assert standings.best_control(known[:1]) is None
    said = suite_report.section("wave", kind, known)[1]
    assert said == (
        "The best peer is lbfgs, loss 2. Seconds to it, of its own: fosi-lbfgs 0.33. The control is lbfgs with the "
        "scaling that FOSI has and no estimates, loss 1, 0.67 to that of lbfgs; seconds to the control's, of its own: "
        "fosi-lbfgs 0.67."
    )


def test_what_has_fosis_coordinates_and_no_estimates_is_a_control(tmp_path):
    curves = [
        run(tmp_path, "lbfgs", [4.0, 3.0, 2.0]),
        run(tmp_path, "lbfgs", [4.0, 2.0, 1.0], layers=50),
        run(tmp_path, "fosi-lbfgs", [2.0, 1.0, 0.5], layers=50),
    ]
    ((kind, known),) = standings.kinds(curves).items()
    assert [entry.control for entry in known] == ["layers" in e.settings and e.optimizer == "lbfgs" for e in known]
    assert standings.best_peer(known).loss == 2.0 and standings.best_control(known).loss == 1.0
    said = suite_report.section("wave", kind, known)[1]
    assert "The control is lbfgs in coordinates of the layers, without FOSI's estimates, loss 1, 0.67 to that" in said


def test_runs_that_cannot_be_compared_are_kept_apart(tmp_path):
    same = run(tmp_path, "adam", [2.0])
    other = Curve(**{**vars(same), "environment": {**same.environment, "device": "other"}})
    full = Curve(**{**vars(same), "plan": replace(same.plan, mode="full")})
    usual = Curve(**{**vars(same), "plan": replace(same.plan, mode=None, optimizer="fosi-adam")})
    tiny = Curve(**{**vars(same), "plan": replace(same.plan, tiny=True)})
    torch = Curve(**{**vars(same), "plan": replace(same.plan, backend="torch")})
    found = standings.kinds([same, other, full, usual, tiny, torch])
    assert [(kind.words, kind.device, len(known)) for kind, known in found.items()] == [
        ("", "test", 2),
        ("quick", "other", 1),
        ("quick", "test", 1),
        ("quick, torch", "test", 1),
    ]
    assert [kind.words for kind in standings.kinds([tiny])] == ["tiny, quick"]


def test_settings_that_differ_are_entries_of_their_own(tmp_path):
    fixed = run(tmp_path, "fosi-adam", [3.0, 2.0])
    current = Curve(**{**vars(fixed), "plan": replace(fixed.plan, curvature="current", rate_factor=3.0)})
    curves = [fixed, current, run(tmp_path, "lbfgs", [1.0]), run(tmp_path, "lbfgs", [1.0, 0.5, 0.2], rounds=3)]
    found = {(e.optimizer, e.settings): e.loss for e in standings.entries(curves)}
    assert found == {
        ("fosi-adam", ""): 2.0,
        ("fosi-adam", "3× rate, estimates on current"): 2.0,
        ("lbfgs", "1 rounds"): 1.0,
        ("lbfgs", "3 rounds"): 0.2,
    }
    # One lucky seed of a setting does not stand for the optimizer where another setting has more.
    curves = [run(tmp_path, "adam", [3.0], seed) for seed in (0, 1)] + [run(tmp_path, "adam", [1.0], beta=1)]
    assert [e.settings for e in standings.tuned(standings.entries(curves)).values()] == [""]


def test_a_section_says_who_is_first_and_how_soon_fosi_is_there(tmp_path):
    curves = [run(tmp_path, "adam", [4.0, 2.0, 1.0]), run(tmp_path, "fosi-adam", [4.0, 0.05, 0.02], pace=0.5)]
    curves.append(run(tmp_path, "fosi-adam", [4.0, 3.0, 3.0], k=3))
    ((kind, known),) = standings.kinds(curves).items()
    head, said, table, every, settings = suite_report.section("wave", kind, known)
    assert head == "## PINN: u_tt = 4 u_xx, quick, test"
    assert said == "The best peer is adam, loss 1. Seconds to it, of its own: fosi-adam 0.33."
    assert every == "Every setting:"
    assert table.splitlines()[2:] == [
        "| fosi-adam |  | 0.02 | 0.02 | 1.5 | 0.33 | 1 | 1 |",
        "| adam |  | 1 | 1 | 3 | 1.00 | - | 1 |",
    ]
    assert "published" not in table  # those are of the full size
    assert "| fosi-adam | k 3 | 3 | 3 | 3 | never | - | 1 |" in settings
    assert suite_report.write(tmp_path) == []


def test_losses_are_shown_with_as_many_digits_as_tell_them_apart(tmp_path):
    assert suite_report.digits([0.2, 0.1, None]) == 3 and suite_report.digits([0.2, 0.1], 2) == 2
    assert suite_report.digits([0.19977, 0.19989]) == 4 and suite_report.digits([0.199771, 0.199772, 0.199771]) == 6
    assert suite_report.digits([1.0000001, 1.0000002]) == 6 and suite_report.digits([]) == 3
    assert suite_report.digits([1e-5, 0.2000001, 0.2000002]) == 3  # that two stuck ones agree is of no interest
    curves = [run(tmp_path, name, [0.3, loss]) for name, loss in (("adam", 0.19989), ("soap", 0.19977))]
    ((kind, known),) = standings.kinds(curves).items()
    _, said, table = suite_report.section("wave", kind, known)
    assert said.startswith("The best peer is soap, loss 0.1998.")
    assert table.splitlines()[0].startswith("| optimizer | settings | training loss | error |")
    assert [line.split(" | ")[2] for line in table.splitlines()[2:]] == ["0.1998", "0.1999"]


def test_where_kfac_is_first_the_best_of_the_others_is_a_target_too(tmp_path):
    curves = [
        run(tmp_path, "kfac", [4.0, 2.0, 0.5]),
        run(tmp_path, "lbfgs", [4.0, 2.0, 1.0]),
        run(tmp_path, "newton-cg", [4.0, 0.9, 0.9]),
        run(tmp_path, "fosi-lbfgs", [2.0, 1.0, 0.5], pace=0.5),
    ]
    ((kind, known),) = standings.kinds(curves).items()
    (_, said, _) = suite_report.section("deep-ae", kind, known)
    assert said == (
        "The best peer is kfac, loss 0.5. Seconds to it, of its own: fosi-lbfgs 0.50. "
        "The best first-order or quasi-Newton peer is lbfgs, loss 1. Seconds to it, of its own: fosi-lbfgs 0.33."
    )


def test_the_names_of_seconds_do_not_touch_and_the_title_says_which_runs(tmp_path):
    for pace, wanted in ((1.0, ["2", "5"]), (1000.0, [])):
        curves = [run(tmp_path, "adam", [1.0] * 12), run(tmp_path, "soap", [1.0] * 3, pace=pace)]
        made = drawing.standings(curves[0].plan.of, standings.entries(curves), "quick, 20 s")
        made.draw_without_rendering()
        axis = made.axes[0]
        assert made.get_suptitle() == "PINN: u_tt = 4 u_xx, quick, 20 s"
        assert not any(label.get_text() for label in axis.xaxis.get_minorticklabels())
        shown = [label for label in axis.get_xticklabels() if 0 <= axis.transAxes.inverted().transform(
            label.get_window_extent().get_points()).mean(0)[0] <= 1]  # fmt: skip
        boxes = [label.get_window_extent() for label in shown]
        assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
        assert {*wanted} <= {label.get_text() for label in shown}


def test_seeds_are_drawn_over_the_same_seconds(tmp_path):
    """A run that is faster has more rounds in the same time; both count until the first of them ends."""
    curves = [
        run(tmp_path, "adam", [4.0, 2.0, 1.0]),
        run(tmp_path, "adam", [8.0, 6.0, 4.0, 2.0, 0.5, 0.1], 1, pace=0.5),
    ]
    for left in (drawing.standings(curves[0].plan.of, [standings.Entry("adam", "", {0: a, 1: b})]).axes[0]
                 for a, b in (curves, curves[::-1])):  # fmt: skip
        (line,) = left.lines
        np.testing.assert_allclose(line.get_xdata(), [1.0, 1.5, 2.0, 2.5, 3.0])
        np.testing.assert_allclose(line.get_ydata(), [5.0, 3.5, 2.0, 1.0, 0.55])  # means of two: medians
    untimed = Curve(**{**vars(curves[0]), "points": _without_seconds(curves[0])})
    assert not drawing.standings(untimed.plan.of, [standings.Entry("adam", "", {0: untimed})]).axes[0].lines


def test_every_optimizer_has_a_look_of_its_own():
    looks = [figures.look(name) for name in settings.NAMES]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(settings.NAMES)
    assert [look["label"] for look in looks] == list(settings.NAMES)


def test_names_beside_points_cover_no_other_name():
    made, axis = figures.figure()
    axis.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    names = ["the first", "the second", "a third"]
    figures.name_points(axis, names, [0.5, 0.51, 0.5], [0.5, 0.5, 0.51])
    made.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axis.texts]
    assert [text.get_text() for text in axis.texts] == names
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_report_draws_what_adam_and_fosi_found(tmp_path):
    for name in ("adam", "fosi-adam"):
        plan = Plan("wave", name, tiny=True, rounds=1, options={"k": 3} if name == "fosi-adam" else {})
        runs.run(plan, plan.build(None, False), tmp_path)
    written = suite_report.write(tmp_path)
    folder = tmp_path / "wave"
    assert written[0] == tmp_path / "curvature.md"
    assert {*written[1:]} == {
        folder / f"{name}-tiny.{kind}" for name in ("standings", "solutions") for kind in ("png", "pdf")
    }
    assert "![wave, solutions](./wave/solutions-tiny.png)" in written[0].read_text(encoding="utf-8")
    entries = standings.entries(summary.curves(folder))
    peer = standings.best_peer(entries)
    drawn = suite_report.solutions(folder, entries, peer)
    assert [*drawn] == ["adam", "fosi-adam"]
    for entry in entries:
        one = drawn[entry.optimizer]
        error = np.linalg.norm(one["found"].astype(float) - one["exact"]) / np.linalg.norm(one["exact"].astype(float))
        assert error == pytest.approx(entry.runs[0].points[-1].metric, rel=1e-4)
    missing = find(entries, "adam")
    curve = missing.runs[0]
    (folder / "solutions" / f"{curve.path.stem}.npz").rename(folder / "solutions" / "other.npz")
    assert [*suite_report.solutions(folder, entries, peer)] == ["fosi-adam"]
    two = replace(missing, runs={0: curve, 1: replace(curve, path=curve.path.with_name("other.jsonl"))})
    assert [*suite_report.solutions(folder, [two, *entries], peer)] == ["adam", "fosi-adam"]
