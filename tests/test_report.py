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
from depthgrow.report.load import load_study_files
from depthgrow.report.statistics import Estimate, across_seeds, paired_bootstrap
from depthgrow.report.summary import _claims, sentence
from depthgrow.report.tables import Table
from depthgrow.report.transitions import _column, transition_metrics, window
from depthgrow.report.write import write_report
from depthgrow.runner import run_study


def run(study, root):
    run_study(study, root, stop=StopAt(), listener=Silent())


def test_bootstrap_value_is_the_ratio_of_sums():
    tokens = np.array([1, 3, 6])
    sums = {"a": np.array([2.0, 3.0, 5.0]), "b": np.array([1.0, 1.0, 2.0])}
    assert paired_bootstrap(tokens, sums, {"a": 1.0}).value == pytest.approx(1.0)
    assert paired_bootstrap(tokens, sums, {"a": 1.0, "b": -1.0}).value == pytest.approx(0.6)


def test_bootstrap_interval_of_equal_documents_is_the_normal_one():
    rng = np.random.default_rng(1)
    tokens = np.full(400, 10)
    losses = 10 * rng.normal(3.0, 0.5, 400)
    estimate = paired_bootstrap(tokens, {"a": losses}, {"a": 1.0})
    half = 1.96 * (losses / 10).std(ddof=1) / 20
    assert estimate.half_width == pytest.approx(half, rel=0.05)


def test_pairing_removes_what_documents_have_in_common():
    rng = np.random.default_rng(2)
    tokens = rng.integers(50, 300, 200)
    hard = rng.normal(3.0, 1.0, 200)
    a, b = tokens * hard, tokens * (hard - 0.05 + rng.normal(0, 0.01, 200))
    estimate = paired_bootstrap(tokens, {"a": a, "b": b}, {"b": 1.0, "a": -1.0})
    assert estimate.value == pytest.approx(-0.05, abs=0.005)
    assert estimate.half_width < 0.005
    assert paired_bootstrap(tokens, {"a": a}, {"a": 1.0}).half_width > 0.05


def test_coverage_of_the_interval_on_synthetic_data():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        tokens = rng.integers(20, 200, 150)
        losses = tokens * rng.normal(-0.03, 0.2, 150)
        estimate = paired_bootstrap(tokens, {"d": losses}, {"d": 1.0}, draws=500)
        covered += estimate.low <= -0.03 <= estimate.high
    assert 0.93 <= covered / 1000 <= 0.97


def test_a_missing_loss_makes_the_comparison_invalid_not_smaller():
    with pytest.raises(ValueError, match="invalid comparison"):
        paired_bootstrap(np.array([1, 1]), {"a": np.array([1.0, np.nan])}, {"a": 1.0})


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
    summary = json.loads((tmp_path / "report" / "report.json").read_text())
    record = json.loads((tmp_path / "study.json").read_text())["arms"]

    def ce(arm, seed):
        return json.loads((tmp_path / "nodes" / record[arm][str(seed)][-1] / "done.json").read_text())["final"]["ce"]

    values = [ce("post-single", s) - ce("pre-single", s) for s in (42, 43, 44)]
    assert summary["deltas"]["single"]["across"]["values"] == pytest.approx(values)
    joint = summary["deltas"]["joint"]["across"]
    half = (joint["high"] - joint["low"]) / 2
    assert f"± {half:.3f}" in summary["sentence"]  # the headline is the spread between seeds, not between documents
    assert "across 3 seeds" in summary["sentence"]
    assert summary["deltas"]["single"]["estimate"]["value"] == pytest.approx(np.mean(values), rel=1e-6)
    assert (tmp_path / "report" / "tables" / "across_seeds.csv").exists()


def test_a_share_is_the_ratio_of_two_effects_on_the_same_documents():
    tokens = np.array([1, 3, 6])
    sums = {"plain": np.array([2.0, 3.0, 5.0]), "mid": np.array([1.5, 2.0, 4.0]), "far": np.array([1.0, 1.0, 3.0])}
    effect, gap = {"mid": 1.0, "plain": -1.0}, {"far": 1.0, "plain": -1.0}
    share = paired_bootstrap(tokens, sums, effect, over=gap)
    assert (share.value, share.low, share.high) == pytest.approx((0.5, 0.5, 0.5))  # each document carries exactly half
    with pytest.raises(ValueError, match="invalid comparison"):
        paired_bootstrap(tokens, sums | {"far": np.array([1.0, np.nan, 3.0])}, effect, over=gap)


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


def contrast(value, half):
    estimate = {"value": value, "low": value - half, "high": value + half}
    return {"valid": True, "across": None, "estimate": estimate, "seeds": [42], "reason": None}


def test_claims_say_yes_no_or_not_settled():
    def block(removal, std=1.0):
        return {"removal": {"value": removal}, "rms": {"all": {"std": std}}}

    def summary(delta, half, last, std):
        return {
            "deltas": {"grow": contrast(delta, half)},
            "interaction": contrast(delta, half),
            "ce_per_phase": [
                {"delta": {"value": 0.1, "low": 0.05, "high": 0.15}},
                {"delta": {"value": delta, "low": delta - half, "high": delta + half}},
            ],
            "diagnostics": {
                "pre-grow": [{"blocks": [block(3, 1.0)]}, {"blocks": [block(3, std), block(last, 1)]}],
                "post-grow": [{"blocks": [block(3, 0.1)]}, {"blocks": [block(3, 0.1), block(2, 1)]}],
            },
            "transitions": {"pre-grow": [{"jump": {"value": 0.1}}], "post-grow": [{"jump": {"value": last}}]},
        }

    names = ("Grown", "The interaction", "The ranking", "Pre's last", "Pre's scale", "Post pays")
    yes, no = _claims(summary(-0.2, 0.1, 0.2, 3.0)), _claims(summary(0.2, 0.1, 0.5, 1.1))
    assert [claim(yes, n) for n in names] == ["yes"] * 6
    assert [claim(no, n) for n in names] == ["no"] * 5 + ["yes"]
    assert claim(_claims(summary(0.05, 0.01, 0.2, 3.0)), "The ranking") == "no"  # smaller is not crossed
    unsure = _claims(summary(-0.1, 0.2, 0.2, 3.0))
    assert [claim(unsure, n) for n in names[:3]] == ["not settled"] * 3


def test_headline_says_when_the_sign_has_another_route_and_claims_when_the_ranking_turned_round():
    found = {"deltas": {"grow": contrast(0.3, 0.1)}, "interaction": contrast(-1.0, 0.1)}
    assert "but not by its route" in sentence(found)
    found["deltas"]["grow"] = contrast(-0.3, 0.1)
    assert "but not by its route" not in sentence(found)
    turned = {
        "deltas": {"grow": contrast(0.3, 0.1)},
        "interaction": None,
        "ce_per_phase": [{"delta": contrast(v, 0.1)["estimate"]} for v in (-0.3, 0.3)],
        "diagnostics": {"post-grow": [{"blocks": []}] * 2},
        "transitions": {},
    }
    assert claim(_claims(turned), "The ranking") == "no, the other way"


@pytest.mark.parametrize(("half", "given"), [(0.1, True), (0.5, False)])
def test_a_share_is_given_only_of_a_settled_gap(monkeypatch, half, given):
    monkeypatch.setattr(summary_module, "_contrast", lambda *args, **kwargs: contrast(0.3, half))
    study = SimpleNamespace(arms=["pre-grow", "post-grow", "pre-grow+rescale"])
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
    assert "under grow the comparison is invalid" in written.sentence.lower()
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
