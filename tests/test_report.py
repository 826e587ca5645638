"""Statistics by hand, tables from files, and reports of studies that are not finished or not finite."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import Silent, StopAt
from depthgrow.files import UserError
from depthgrow.report import summary as summary_module
from depthgrow.report.charts import SEED_OFFSET, Chart, interaction, validation
from depthgrow.report.draw import interactive, picture
from depthgrow.report.load import load_study_files
from depthgrow.report.statistics import FEW_DOCUMENTS, Estimate, across_documents, across_seeds
from depthgrow.report.tables import Table
from depthgrow.report.transitions import _column, transition_metrics, window
from depthgrow.report.verdict import TRIAL, claims, sentence
from depthgrow.report.write import write_report
from depthgrow.runner import run_study


def run(study, root):
    run_study(study, root, stop=StopAt(), listener=Silent())


def test_bootstrap_value_is_the_ratio_of_sums():
    tokens = np.array([1, 3, 6])
    sums = {"a": np.array([2.0, 3.0, 5.0]), "b": np.array([1.0, 1.0, 2.0])}
    assert across_documents(tokens, sums, {"a": 1.0}).value == pytest.approx(1.0)
    assert across_documents(tokens, sums, {"a": 1.0, "b": -1.0}).value == pytest.approx(0.6)


def test_bootstrap_interval_of_equal_documents_is_the_normal_one():
    rng = np.random.default_rng(1)
    tokens = np.full(400, 10)
    losses = 10 * rng.normal(3.0, 0.5, 400)
    estimate = across_documents(tokens, {"a": losses}, {"a": 1.0})
    half = 1.96 * (losses / 10).std(ddof=1) / 20
    assert estimate.half_width == pytest.approx(half, rel=0.05)


def test_pairing_removes_what_documents_have_in_common():
    rng = np.random.default_rng(2)
    tokens = rng.integers(50, 300, 200)
    hard = rng.normal(3.0, 1.0, 200)
    a, b = tokens * hard, tokens * (hard - 0.05 + rng.normal(0, 0.01, 200))
    estimate = across_documents(tokens, {"a": a, "b": b}, {"b": 1.0, "a": -1.0})
    assert estimate.value == pytest.approx(-0.05, abs=0.005)
    assert estimate.half_width < 0.005
    assert across_documents(tokens, {"a": a}, {"a": 1.0}).half_width > 0.05


def test_coverage_of_the_interval_on_synthetic_data():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        tokens = rng.integers(20, 200, 150)
        losses = tokens * rng.normal(-0.03, 0.2, 150)
        estimate = across_documents(tokens, {"d": losses}, {"d": 1.0}, draws=500)
        covered += estimate.low <= -0.03 <= estimate.high
    assert 0.93 <= covered / 1000 <= 0.97


@pytest.mark.parametrize("documents", [2, 4, 8, 24, FEW_DOCUMENTS])
def test_the_interval_over_few_documents_covers_what_it_says(documents):
    """Lengths that differ by a factor of ten, losses with a part that depends on the length, tails heavier than normal."""
    rng = np.random.default_rng(documents)

    def draw(count):
        tokens = np.maximum(5, rng.lognormal(5, 0.6, count)).round()
        rates = -0.03 + 0.02 * (np.log(tokens) - 5) + rng.standard_t(5, count) * 0.2 / np.sqrt(tokens / 100)
        return tokens, tokens * rates

    everyone = draw(400_000)
    truth, covered = everyone[1].sum() / everyone[0].sum(), 0
    for _ in range(1000):
        tokens, losses = draw(documents)
        estimate = across_documents(tokens, {"d": losses}, {"d": 1.0}, draws=500)
        covered += estimate.low <= truth <= estimate.high
    assert 0.915 <= covered / 1000 <= 0.985


def test_the_interval_over_few_documents_by_hand():
    """Equal lengths: the t-interval of the mean. R = 3, deviations -1, 0, 1, s / sqrt(3) = 0.57735, t(0.975, 2) = 4.302653."""
    found = across_documents(np.full(3, 10), {"a": np.array([20.0, 30.0, 40.0])}, {"a": 1.0})
    assert (found.value, found.high - 3, 3 - found.low) == pytest.approx((3, 2.484138, 2.484138), rel=1e-6)
    with pytest.raises(ValueError, match="at least two"):
        across_documents(np.array([10]), {"a": np.array([20.0])}, {"a": 1.0})


def test_an_interval_in_words_shows_both_ends_where_it_leans_and_never_nothing():
    assert Estimate(-0.0312, -0.0432, -0.0192).text() == "-0.031 ± 0.012"
    assert Estimate(-0.0312, -0.0432, -0.0192).size() == "0.031 ± 0.012"
    assert Estimate(-0.031, -0.090, -0.012).text() == "-0.031 [-0.090, -0.012]"
    assert Estimate(-0.031, -0.090, -0.012).size() == "0.031 [+0.012, +0.090]"
    assert Estimate(0.00021, 0.00009, 0.00033).text() == "+0.0002 ± 0.0001"
    assert Estimate(0.0, 0.0, 0.0).text() == "+0.000 ± 0.000"  # the same model twice
    assert Estimate(1.0, 0.0, 2.5).text("") == "1.000 [+0.000, +2.500]"


def test_a_missing_loss_makes_the_comparison_invalid_not_smaller():
    with pytest.raises(ValueError, match="invalid comparison"):
        across_documents(np.array([1, 1]), {"a": np.array([1.0, np.nan])}, {"a": 1.0})


def test_interval_across_seeds_by_hand():
    found = across_seeds([0.01, 0.02, 0.06])
    std = np.std([0.01, 0.02, 0.06], ddof=1)
    assert found.mean == pytest.approx(0.03)
    assert found.high - found.mean == pytest.approx(4.302653 * std / 3**0.5, rel=1e-6)  # t(0.975, 2)
    assert (found.negative, found.positive) == (0, 3)
    half = [12.7062, 4.302653, 3.182446, 2.776445]  # t(0.975, 1 .. 4)
    tight = across_seeds([0.0, 0.004], target=0.005)
    enough = [n for n, t in zip((2, 3, 4, 5), half, strict=True) if t * tight.std / n**0.5 <= 0.005]
    assert tight.needed == enough[0]
    # mean 0.03, std 0.0265: t * std / sqrt(n) is 0.0658 at 3 seeds, 0.0421 at 4, 0.0329 at 5, 0.0278 at 6
    assert found.settles == 6
    assert across_seeds([-0.01, 0.01]).settles == 10_000  # a mean of zero is never told from zero
    with pytest.raises(ValueError, match="at least two"):
        across_seeds([1.0])
    with pytest.raises(ValueError, match="not finite"):
        across_seeds([1.0, float("nan")])


def test_coverage_across_seeds():
    rng = np.random.default_rng(5)
    found = [across_seeds(rng.normal(-0.03, 0.01, 5), target=1.0) for _ in range(1000)]
    assert 0.93 <= np.mean([f.low <= -0.03 <= f.high for f in found]) <= 0.97


def test_seeds_in_the_report(mini, tmp_path):
    study = replace(mini, arms=("pre-single", "post-single", "pre-joint", "post-joint"), seeds=3)
    run(study, tmp_path)
    write_report(tmp_path)
    counted = json.loads((tmp_path / "baselines.json").read_text())
    with (tmp_path / "report" / "tables" / "quantities.csv").open(encoding="utf-8") as stream:
        assert [row[3] for row in csv.reader(stream)][-2:] == [f"{counted[n]['ce']:.4f}" for n in ("bigram", "unigram")]
    assert "hardly trained" in json.loads((tmp_path / "report" / "report.json").read_text())["sentence"]
    (tmp_path / "baselines.json").unlink()  # without it the report does not know that six steps teach nothing
    write_report(tmp_path)
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    record = json.loads((tmp_path / "study.json").read_text())["arms"]

    def ce(arm, seed):
        return json.loads((tmp_path / "nodes" / record[arm][str(seed)][-1] / "done.json").read_text())["final"]["ce"]

    values = [ce("post-single", s) - ce("pre-single", s) for s in (42, 43, 44)]
    assert summary["deltas"]["single"]["across"]["values"] == pytest.approx(values)
    joint = summary["deltas"]["joint"]["across"]
    assert summary["grid"]["ce"]["post-joint"]["seeds"] == [42, 43, 44]
    half = (joint["high"] - joint["low"]) / 2
    assert f"± {half:.3f}" in summary["sentence"]  # the headline is the spread between seeds, not between documents
    assert "across 3 seeds" in summary["sentence"]
    with (tmp_path / "report" / "tables" / "every_seed.csv").open(encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["seed", "pre-joint", "post-joint", "Δ joint", "pre-single", "post-single", "Δ single"]
    assert [row[6] for row in rows[:3]] == [f"{value:+.4f}" for value in values]
    assert [row[5] for row in rows[:3]] == [f"{ce('post-single', s):.4f}" for s in (42, 43, 44)]
    assert float(rows[3][6]) == pytest.approx(max(values) - min(values), abs=1e-4)
    assert summary["deltas"]["single"]["estimate"]["value"] == pytest.approx(np.mean(values), rel=1e-6)
    assert (tmp_path / "report" / "tables" / "across_seeds.csv").exists()


def test_a_share_is_the_ratio_of_two_effects_on_the_same_documents():
    tokens = np.array([1, 3, 6])
    sums = {"plain": np.array([2.0, 3.0, 5.0]), "mid": np.array([1.5, 2.0, 4.0]), "far": np.array([1.0, 1.0, 3.0])}
    effect, gap = {"mid": 1.0, "plain": -1.0}, {"far": 1.0, "plain": -1.0}
    share = across_documents(tokens, sums, effect, over=gap)
    assert (share.value, share.low, share.high) == pytest.approx((0.5, 0.5, 0.5))  # each document carries exactly half
    with pytest.raises(ValueError, match="invalid comparison"):
        across_documents(tokens, sums | {"far": np.array([1.0, np.nan, 3.0])}, effect, over=gap)


def test_transition_metrics_by_hand():
    """A step of height 1 for 30 of 200 steps, w = 10: every number follows by counting."""
    before = [5.0] * 90 + [2.0] * 10
    after = [3.0] * 30 + [0.9] * 170
    found = transition_metrics(before, after)
    assert (found["window"], found["baseline"]) == (10, 2.0)
    assert (found["jump"], found["peak"]) == pytest.approx((1.0, 1.0))
    assert found["auc"] == pytest.approx({"2%": 1.0, "10%": 1.0})
    assert found["recovery"] == 35  # five steps of +1 and five of -1.1
    slow = transition_metrics(before, [3.0] * 15 + [2.5] * 185)
    assert slow["auc"]["10%"] == pytest.approx((15 * 1.0 + 5 * 0.5) / 20)
    assert slow["recovery"] is None
    assert window(50_000) == 200  # the published smoothing


def test_share_noise_floor_controls_and_ledger_in_the_report(mini, tmp_path):
    extra = ("pre-grow+forward-norm", "post-grow+reinit", "post-joint-long", "post-joint-longer", "post-grow-fresh")
    run(replace(mini, arms=(*mini.arms, *extra)), tmp_path)
    write_report(tmp_path)
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    ce = {arm: values["ce"]["estimate"]["value"] for arm, values in summary["arms"].items()}
    (row,) = summary["interventions"]
    effect = ce["pre-grow+forward-norm"] - ce["pre-grow"]
    assert row["effect"]["estimate"]["value"] == pytest.approx(effect, rel=1e-6)
    if row["share"] is not None:
        assert row["share"]["value"] == pytest.approx(effect / (ce["post-grow"] - ce["pre-grow"]), rel=1e-6)
    floor = summary["noise_floor"]["post-grow+reinit"]["estimate"]["value"]
    assert floor == pytest.approx(ce["post-grow+reinit"] - ce["post-grow"], rel=1e-6)
    longer = next(r for r in summary["controls"] if r["arm"] == "post-joint-longer")
    assert longer["estimate"]["value"] == pytest.approx(ce["post-joint-longer"] - ce["post-grow"], rel=1e-6)
    assert longer["paper"] == pytest.approx(2.7428 - 2.7330)
    # counted budgets against the closed form; fresh documents differ in length, documents of one shard do not
    ledger = {r["arm"]: r for r in summary["ledger"]}
    grow, joint = ledger["post-grow"], ledger["post-joint"]
    assert grow["total_tokens"] == 3 * joint["total_tokens"] == 3 * grow["unique_tokens"]
    assert grow["active_layer_tokens"] / (3 * joint["active_layer_tokens"]) == pytest.approx(18 / 27)
    assert ledger["post-joint-longer"]["of_grow"]["total_tokens"] == pytest.approx(1, rel=0.1)
    assert ledger["post-joint-long"]["of_grow"]["active_layer_tokens"] == pytest.approx(1, rel=0.1)
    for name in ("post-joint-longer", "post-grow-fresh"):
        assert ledger[name]["unique_tokens"] == ledger[name]["total_tokens"]
    assert [t["to"] for t in summary["transitions"]["post-grow"]] == [2, 3]
    assert set(summary["transitions"]["post-grow"][1]["grad_norms"]) == {
        "block 0",
        "block 1",
        "block 2",
        "boundary norm",
        "head",
    }
    assert summary["transitions"]["post-grow"][0]["grad_norms"]["block 1"]["before"] is None


def test_latex_escapes_what_latex_reads():
    table = Table("t", "Title", ["a_b", "Δ = 5 %"], [["x & y", "−1"]], "note")
    text = table.latex()
    assert r"a\_b & $\Delta$ = 5 \% \\" in text
    assert r"x \& y & $-$1 \\" in text
    assert text.count(r"\\") == 2


def claim(found, start):
    return next(c["appears"] for c in found if c["claim"].startswith(start))


def contrast(value, half, seeds=3, settles=9):
    """Of several seeds with an interval across them, or of one with one over documents."""
    estimate = {"value": value, "low": value - half, "high": value + half}
    across = {"mean": value, "low": value - half, "high": value + half, "settles": settles} if seeds > 1 else None
    listed = list(range(42, 42 + seeds))
    return {"valid": True, "across": across, "estimate": estimate, "seeds": listed, "reason": None}


def said(deltas, interaction=None, **others):
    """A summary with what the verdict reads."""
    empty = {"ce_per_phase": [], "diagnostics": {}, "grown": [], "arms": {}, "baselines": {}, "diverged": []}
    where = {"verdict": True, "folder": "runs/x", "deltas": deltas, "interaction": interaction}
    return empty | where | others


def inside(last, std, jump):
    """What `claims` reads of one seed: pre-grow's last block, the rise of its std, post's jump against pre's 0.1."""
    pre = {"removal": [3.0, last], "std": [1.0, std], "jump": [0.1]}
    return {"seed": 42, "pre-grow": pre, "post-grow": {"removal": [3.0, 2.0], "std": [0.1, 0.1], "jump": [jump]}}


def phases(*deltas, half=0.05):
    rows = [{"delta": contrast(value, half)["estimate"]} for value in deltas]
    return {"ce_per_phase": rows, "diagnostics": {"post-grow": [{"blocks": []}] * len(rows)}}


NAMES = ("Grown", "The interaction", "The ranking", "Pre's last", "Pre's scale", "Post pays")


def test_claims_say_yes_no_or_not_settled():
    def found(delta, half, *seeds):
        grow = contrast(delta, half)
        return claims(
            said({"grow": grow}, contrast(delta, half), grown=list(seeds), **phases(0.1, delta, half=half / 2))
        )

    yes = found(-0.2, 0.1, *[inside(0.2, 3.0, 0.2)] * 3)
    no = found(0.2, 0.1, *[inside(0.5, 1.1, 0.05)] * 3)
    assert [claim(yes, n) for n in NAMES] == ["yes"] * 6
    assert [claim(no, n) for n in NAMES] == ["no"] * 6
    assert claim(found(0.05, 0.01, inside(0.2, 3.0, 1)), "The ranking") == "no"  # smaller is not crossed
    unsure = found(-0.1, 0.2, inside(0.2, 3.0, 0.2), inside(0.5, 3.0, 0.2))
    assert [claim(unsure, n) for n in NAMES[:3]] == ["not settled"] * 3
    assert claim(unsure, "Pre's last") == "not settled: in 1 of 2 seeds"
    assert "about 9 seeds would settle it" in unsure[0]["ours"]
    assert claim(found(-0.2, 0.1, inside(None, 3.0, 0.2)), "Pre's scale") == "one seed: yes"
    with pytest.raises(StopIteration):  # a value that is missing is no block of no worth
        claim(found(-0.2, 0.1, inside(None, 3.0, 0.2)), "Pre's last")


def test_one_seed_speaks_of_two_models_and_names_the_command():
    summary = said({"grow": contrast(-0.044, 0.007, seeds=1), "joint": contrast(0.01, 0.002, seeds=1)})
    summary |= {"interaction": contrast(-0.054, 0.01, seeds=1), "grown": [inside(0.2, 3.0, 0.2)]} | phases(0.1, -0.044)
    text = sentence(summary)
    assert "under grow this post-norm student ends 0.044 ± 0.007 below this pre-norm one" in text
    assert "under joint this post-norm student ends 0.010 ± 0.002 above" in text
    assert "One seed does not tell placements apart" in text
    assert "`depthgrow study runs/x --seeds 3` adds seeds" in text
    assert "ahead" not in text
    assert "interaction" not in text
    found = claims(summary)
    assert [claim(found, n) for n in NAMES[:3]] == ["not settled"] * 3
    assert [claim(found, n) for n in NAMES[3:]] == ["one seed: yes"] * 3


def test_several_seeds_speak_of_placements_and_say_how_many_would_settle():
    deltas = {"grow": contrast(-0.045, 0.023), "joint": contrast(-0.013, 0.043, settles=17)}
    text = sentence(said(deltas, contrast(-0.032, 0.053, settles=8)))
    assert text.startswith("Under grow post-norm is ahead by 0.045 ± 0.023 nats per token")
    assert "under joint the two cannot be told apart (-0.013 ± 0.043; about 17 seeds would settle it)" in text
    assert "-0.032 ± 0.053, not distinguishable from none; about 8 seeds would settle it" in text
    assert text.endswith("(95 % across 3 seeds).")
    mixed = sentence(said({"grow": contrast(-0.045, 0.02), "joint": contrast(-0.1, 0.02, seeds=1)}))
    assert "under joint there is one seed, which does not tell placements apart" in mixed


def test_nothing_rests_on_an_arm_that_has_hardly_trained():
    arms = {arm: {"ce": {"estimate": {"value": value}}} for arm, value in (("post-joint", 6.17), ("pre-joint", 4.63))}
    arms |= {arm: {"ce": {"estimate": {"value": 5.88}}} for arm in ("pre-grow", "post-grow")}
    deltas = {"grow": contrast(-0.2, 0.1), "joint": contrast(1.5, 0.1)}
    summary = said(deltas, contrast(-1.7, 0.1), arms=arms, baselines={"unigram": {"ce": 6.39}})
    why = "post-joint (6.17) has hardly trained; a unigram model has 6.39"
    assert claim(claims(summary), "The interaction") == f"not settled: {why}"
    assert claim(claims(summary), "Grown") == "yes"  # 0.51 below: trained
    assert f"under joint nothing is settled: {why}" in sentence(summary)
    assert f"The interaction is not settled: {why}" in sentence(summary)
    one = summary | {"deltas": {"joint": contrast(1.5, 0.1, seeds=1)}, "interaction": None}
    assert f"under joint nothing is settled: {why}" in sentence(one)
    arms["pre-grow"]["ce"]["estimate"]["value"] = 5.90
    assert claim(claims(summary), "Grown").startswith("not settled: pre-grow (5.90) has hardly")


def test_a_trial_gives_no_verdict():
    summary = said({"grow": contrast(-0.2, 0.1)}) | {"verdict": False}
    assert (sentence(summary), claims(summary)) == (TRIAL, [])


def test_headline_says_when_the_sign_has_another_route_and_claims_when_the_ranking_turned_round():
    found = said({"grow": contrast(0.3, 0.1)}, contrast(-1.0, 0.1))
    assert "but not by its route" in sentence(found)
    found["deltas"]["grow"] = contrast(-0.3, 0.1)
    assert "but not by its route" not in sentence(found)
    turned = said({"grow": contrast(0.3, 0.1)}, **phases(-0.3, 0.3))
    assert claim(claims(turned), "The ranking") == "no, the other way"


def test_every_seed_is_a_point_beside_its_mean_and_baselines_are_level_lines():
    def arm(*values):
        across = {"mean": sum(values) / len(values), "low": 3.0, "high": 5.0}
        return {"across": across, "values": list(values), "estimate": {"value": 4.0}, "valid": True}

    arms = {a: arm(3.9 + i, 4.1 + i) for i, a in enumerate(("pre-joint", "post-joint", "pre-grow", "post-grow"))}
    (panel,) = interaction({"grid": {"ce": arms}})
    dots = {series.label: (series.x, series.y) for series in panel.series if series.kind == "dots"}
    assert dots["pre-norm, each seed"] == ([-SEED_OFFSET] * 2 + [1 - SEED_OFFSET] * 2, [3.9, 4.1, 5.9, 6.1])
    assert dots["post-norm, each seed"] == ([SEED_OFFSET] * 2 + [1 + SEED_OFFSET] * 2, [4.9, 5.1, 6.9, 7.1])
    curve = {"steps": [1, 2], "ce": [5.0, 4.0], "transitions": []}
    found = {
        "curves": {"pre-joint": curve},
        "teacher": {"held_out": {"ce": 3.1}},
        "baselines": {"unigram": {"ce": 6.4}},
    }
    (panel,) = validation(found)
    assert panel.levels == {"teacher": 3.1, "unigram": 6.4}
    plot = interactive(Chart("validation", "", "", [panel]))
    assert {shape["y0"] for shape in plot["layout"]["shapes"]} == {3.1, 6.4}
    assert {text["text"] for text in plot["layout"]["annotations"]} == {"teacher", "unigram"}
    drawn = picture(Chart("validation", "", "", [panel])).axes[0]
    assert {text.get_text() for text in drawn.texts} == {"teacher", "unigram"}


@pytest.mark.parametrize(("half", "given"), [(0.1, True), (0.5, False)])
def test_a_share_is_given_only_of_a_settled_gap(monkeypatch, half, given):
    monkeypatch.setattr(summary_module, "_contrast", lambda *args, **kwargs: contrast(0.3, half))
    study = SimpleNamespace(arms=["pre-grow", "post-grow", "pre-grow+rescale"], complete_seeds=lambda arm: [42])
    (row,) = summary_module._interventions(study)
    assert (row["share"] is not None, row["no_share"]) == ((True, "–") if given else (False, "no gap to explain"))


def test_zero_is_excluded_only_when_it_is():
    assert Estimate(-1.0, -2.0, -0.1).excludes_zero
    assert not Estimate(-1.0, -2.0, 0.1).excludes_zero


def test_whole_report(mini, tmp_path):
    study = replace(mini, arms=(*mini.arms, "pre-freeze", "post-freeze"))
    run(study, tmp_path)
    written = write_report(tmp_path)
    folder = tmp_path / "report"
    summary = json.loads((folder / "report.json").read_text())
    assert summary["sentence"] == written.sentence
    # numbers are those of the evaluation files
    record = json.loads((tmp_path / "study.json").read_text())["arms"]

    def final_ce(arm):
        key = record[arm]["42"][-1]
        with np.load(tmp_path / "nodes" / key / "eval" / "step-00000006.npz") as arrays:
            return arrays["ce"].sum() / arrays["tokens"].sum()

    ce = {arm: final_ce(arm) for arm in study.arms}
    for arm in study.arms:
        assert summary["arms"][arm]["ce"]["estimate"]["value"] == pytest.approx(ce[arm], rel=1e-9)
    grow, joint = ce["post-grow"] - ce["pre-grow"], ce["post-joint"] - ce["pre-joint"]
    assert summary["deltas"]["grow"]["estimate"]["value"] == pytest.approx(grow, rel=1e-6)
    assert summary["interaction"]["estimate"]["value"] == pytest.approx(grow - joint, rel=1e-6)
    assert [r["layers"] for r in summary["ce_per_phase"]] == [1, 2, 3]
    assert summary["curves"]["pre-grow"]["transitions"] == [6, 12]
    assert summary["curves"]["pre-grow"]["steps"] == [3, 6, 9, 12, 15, 18]
    assert not summary["missing"]
    # tables and figures exist in every form, and the page needs nothing from outside
    with (folder / "tables" / "two_by_two.csv").open() as stream:
        rows = list(csv.reader(stream))
    assert rows[1][0] == "joint"
    assert f"{ce['pre-joint']:.4f}" in rows[1][1]
    assert rows[1][2] == "2.7603"
    assert rows[2][6] == "-0.0328"
    page = (folder / "report.html").read_text()
    for name in ("interaction", "ce_per_phase", "validation", "block_removal", "boundary_rms", "histograms"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 5000
        assert (folder / "figures" / f"{name}.svg").exists()
        assert f'id="figure-{name}"' in page
    assert not re.search(r"(src|href)=\"(https?:)?//", re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    text = (folder / "report.md").read_text()
    assert "-0.0332" in text
    assert "local files" in text
    # written again from the same files, every byte is the same
    first = {
        p.name: p.read_bytes()
        for p in folder.rglob("*")
        if p.suffix in (".html", ".md", ".json", ".csv", ".tex", ".svg")
    }
    write_report(tmp_path)
    assert first == {p.name: p.read_bytes() for p in folder.rglob("*") if p.name in first}


def test_partial_study_says_what_is_missing(mini, tmp_path):
    from depthgrow.runtime import Stopped

    with pytest.raises(Stopped):
        run_study(replace(mini, arms=("pre-joint", "pre-grow")), tmp_path, stop=StopAt(11), listener=Silent())
    written = write_report(tmp_path)
    assert "Nothing to compare yet" in written.sentence
    page = written.html.read_text()
    assert "Not finished yet" in page
    assert "pre-grow seed 42: 0 of 3 phases done" in page or "pre-grow seed 42: 1 of 3 phases done" in page


def test_a_nan_cell_makes_its_comparisons_invalid_in_words(mini, tmp_path):
    run(mini, tmp_path)
    key = json.loads((tmp_path / "study.json").read_text())["arms"]["post-grow"]["42"][-1]
    path = tmp_path / "nodes" / key / "eval" / "step-00000006.npz"
    arrays = dict(np.load(path))
    arrays["ce"][2] = np.nan
    np.savez(path, **arrays)
    written = write_report(tmp_path)
    assert "under grow the comparison is invalid" in written.sentence
    assert "under joint" in written.sentence
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    assert summary["deltas"]["grow"]["valid"] is False
    assert summary["interaction"]["valid"] is False


def test_an_arm_that_diverges_at_once_leaves_a_report_a_listing_and_its_diagnostics(mini, tmp_path, capsys):
    """Losses not finite from the third step of the first phase on: gaps in figures, dashes in tables, no traceback."""
    from depthgrow.cli import main

    run(mini, tmp_path)
    record = json.loads((tmp_path / "study.json").read_text())["arms"]["post-grow"]["42"]
    for key in record:
        node = tmp_path / "nodes" / key
        lines = [json.loads(line) for line in (node / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["kind"] == "eval" or line["step"] > 2:
                line |= {name: None for name in ("loss", "ce", "kl", "grad_norm block 0") if name in line}
        (node / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = json.loads((node / "done.json").read_text())
        done["final"] = dict.fromkeys(done["final"])
        (node / "done.json").write_text(json.dumps(done))
        path = node / "eval" / "step-00000006.npz"
        arrays = dict(np.load(path))
        arrays["ce"][:] = np.nan
        np.savez(path, **arrays)
        found = json.loads((node / "diagnostics.json").read_text())
        found["ce"] = None
        for row in (*found["blocks"], *found["layers"]):
            row |= {"removal": None, "angle": None}
            if "rms" in row:
                row["rms"] = {kind: {"count": 0, "non_finite": values["count"]} for kind, values in row["rms"].items()}
                token = {
                    "text": "x",
                    "token": 1,
                    "document": 0,
                    "position": 3,
                    "channel": 2,
                    "value": None,
                    "rms": None,
                }
                row["outliers"] = [token]
            else:
                row["sink"] = [None] * len(row["sink"])
        (node / "diagnostics.json").write_text(json.dumps(found))
    assert "invalid" in write_report(tmp_path).sentence
    for command in (["ls", str(tmp_path)], ["diagnose", str(tmp_path)]):
        assert main(command) == 0
        assert "–" in capsys.readouterr().out


def test_lost_lines_of_metrics_shift_nothing(mini, tmp_path):
    run(replace(mini, arms=("pre-grow",)), tmp_path)
    key = json.loads((tmp_path / "study.json").read_text())["arms"]["pre-grow"]["42"][1]
    path = tmp_path / "nodes" / key / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line["step"] != 4]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    phase = load_study_files(tmp_path).runs["pre-grow", 42].phases[1]
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    expected = [losses[step] if step != 4 else np.nan for step in range(1, 7)]
    np.testing.assert_array_equal(_column(phase, "loss"), expected)
    path.write_text("")
    write_report(tmp_path)


def test_what_an_unfinished_arm_leaves_open(mini, tmp_path):
    import shutil

    arms = ("pre-grow", "post-grow", "pre-joint", "pre-grow+forward-norm")
    run(replace(mini, arms=arms), tmp_path)
    record = json.loads((tmp_path / "study.json").read_text())["arms"]
    shutil.rmtree(tmp_path / "nodes" / record["pre-grow+forward-norm"]["42"][-1])
    (tmp_path / "report" / "tables").mkdir(parents=True)
    mine = tmp_path / "report" / "tables" / "mine.tex"
    mine.write_text("a table of my own")
    write_report(tmp_path)
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    (row,) = summary["interventions"]
    assert (row["share"], row["no_share"]) == (None, "–")
    assert row["effect"]["reason"] == "pre-grow+forward-norm not finished"
    assert mine.exists()
    shutil.rmtree(tmp_path / "nodes" / record["post-grow"]["42"][-1])
    write_report(tmp_path)
    found = {c["claim"] for c in json.loads((tmp_path / "report" / "report.json").read_text())["claims"]}
    assert not any(text.startswith("The ranking") for text in found)


def test_a_share_within_another_draw_and_the_seeds_of_a_gap(mini, tmp_path):
    extra = ("pre-grow+reinit", "post-grow+reinit", "pre-grow+rescale+reinit")
    run(replace(mini, arms=("pre-grow", "post-grow", *extra)), tmp_path)
    write_report(tmp_path)
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    (row,) = summary["interventions"]
    assert (row["plain"], row["other"]) == ("pre-grow+reinit", "post-grow+reinit")
    assert set(summary["noise_floor"]) == {"pre-grow+reinit", "post-grow+reinit"}
    for values in summary["arms"].values():
        assert values["ppl"] == pytest.approx(np.exp(values["ce"]["estimate"]["value"]), rel=1e-6)


def test_empty_folder_and_damaged_files(mini, tmp_path):
    with pytest.raises(UserError, match="holds no study"):
        write_report(tmp_path)
    run(replace(mini, arms=("pre-single", "post-single")), tmp_path)
    next((tmp_path / "nodes").glob("*/eval/step-00000006.npz")).write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        write_report(tmp_path)
    next((tmp_path / "nodes").glob("*/eval/step-00000006.npz")).write_bytes(b"PK")
    with pytest.raises(UserError, match="cannot be read"):
        write_report(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(UserError, match="no arms"):
        write_report(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        write_report(tmp_path)


def test_a_table_is_of_one_set_of_seeds_so_that_its_rows_subtract(mini, tmp_path):
    study = replace(mini, arms=(*mini.arms, "pre-freeze", "post-freeze"), seeds=2)
    run(study, tmp_path)
    record = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))["arms"]

    def rows():
        write_report(tmp_path)
        with (tmp_path / "report" / "tables" / "two_by_two.csv").open(encoding="utf-8") as stream:
            return list(csv.reader(stream))

    def value(cell):
        return float(cell.split()[0])

    header, joint, grow, freeze, interaction = rows()
    assert header[0] == "2 seeds"
    (tmp_path / "nodes" / record["post-freeze"]["43"][-1] / "done.json").unlink()
    *whole, partial, _ = rows()
    assert (whole, partial[:3]) == (
        [header, joint, grow],
        freeze[:3],
    )  # what another curriculum lacks costs these nothing
    assert partial[3:6:2] == ["invalid: post-freeze not finished at 1 of 2 seeds"] * 2
    (tmp_path / "nodes" / record["post-grow"]["43"][-1] / "done.json").unlink()
    header, joint, grow, freeze, interaction = rows()
    assert header[0] == "1 seed"
    for row in (joint, grow, freeze):
        assert value(row[3]) - value(row[1]) == pytest.approx(value(row[5]), abs=2e-4)
    assert value(grow[5]) - value(joint[5]) == pytest.approx(value(interaction[5]), abs=2e-4)
    summary = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert summary["arms"]["pre-grow"]["seeds"] == [42, 43]
    assert summary["grid"]["ce"]["pre-grow"]["seeds"] == summary["grid"]["seeds"] == [42]
