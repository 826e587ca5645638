"""The report as a person meets it: opened in a browser, clicked through, looked at for errors, overflow and empty plots."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from conftest import Silent, StopAt
from depthgrow.report.write import write_report
from depthgrow.runner import run_study

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")

# Opens every fold, follows every link, hides and shows a line of every plot, then writes down what it sees.
PROBE = """
<script>
const problems = [];
addEventListener("error", event => problems.push("error: " + event.message));
addEventListener("load", () => setTimeout(() => {
  const all = query => [...document.querySelectorAll(query)];
  all("summary").forEach(summary => summary.click());
  for (const link of all("nav a")) {
    if (!document.querySelector(link.getAttribute("href"))) problems.push("dead link " + link.textContent);
    link.click();
  }
  for (const plot of all("figure .plot")) {
    const name = plot.closest("section").id;
    const shown = plot.offsetParent !== null;
    if (INTERACTIVE !== shown) problems.push(name + " is " + (shown ? "" : "not ") + "interactive");
    if (!shown) continue;
    const drawn = plot.querySelectorAll(".points path, path.js-line, .point path");
    const visible = [...drawn].filter(path => path.getBBox().width + path.getBBox().height > 0);
    if (!visible.length) problems.push(name + " is empty");
    const toggle = plot.querySelector(".legendtoggle");
    for (const kind of toggle ? ["mousedown", "mouseup", "click"] : [])
      toggle.dispatchEvent(new MouseEvent(kind, {bubbles: true}));
  }
  for (const picture of all("figure .picture")) {
    const shown = picture.offsetParent !== null;
    if (INTERACTIVE === shown) problems.push("picture of " + picture.closest("section").id + (shown ? " doubled" : " hidden"));
    if (picture.querySelectorAll("svg path").length < 5) problems.push("an empty picture");
  }
  if (document.documentElement.scrollWidth > innerWidth) problems.push("the page is wider than the window");
  for (const cell of all("td, th, h2, p, dd"))
    if (cell.clientWidth && cell.scrollWidth > cell.clientWidth + 1) problems.push("overflow: " + cell.textContent);
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify({problems, tables: all("table").length, plots: all("figure").length,
    background: getComputedStyle(document.body).backgroundColor, open: all("details[open]").length,
    folds: all("details").length});
  document.body.append(result);
}, 500));
</script>
"""


def look(page, folder, *flags, width=1100):
    """What the probe saw, and the console's complaints."""
    text = page.read_text()
    interactive = "false" if "--no-plots" in flags else "true"
    if "--no-plots" in flags:
        text = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    probed = folder / "probed.html"
    probed.write_text(text.replace("<body>", "<body>" + PROBE.replace("INTERACTIVE", interactive)))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=30000", "--dump-dom"]
    command += [flag for flag in flags if flag != "--no-plots"]
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), console


# A browser is not a Python package: it cannot be asked of everyone who runs the suite.
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_report_in_a_browser(mini, tmp_path):
    pytest.importorskip("plotly")
    arms = (*mini.arms, "pre-freeze", "post-freeze", "pre-grow+forward-norm", "pre-grow+reinit")
    run_study(replace(mini, arms=arms), tmp_path, stop=StopAt(), listener=Silent())
    page = write_report(tmp_path).html
    seen, console = look(page, tmp_path)
    assert (seen["problems"], console) == ([], [])
    assert seen["plots"] == 10
    assert seen["tables"] >= 12
    assert seen["open"] == seen["folds"] > 3
    assert seen["background"] == "rgb(255, 255, 255)"
    dark, _ = look(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert dark["problems"] == []
    assert dark["background"] != seen["background"]
    narrow, _ = look(page, tmp_path, width=500)
    assert narrow["problems"] == []
    still, console = look(page, tmp_path, "--no-plots")
    assert (still["problems"], console) == ([], [])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_probe_sees_what_it_is_there_for(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><body><nav><a href="#nowhere">gone</a></nav><section id="s"><figure><div class="picture"><svg></svg>'
        '</div><div class="plot">nothing</div></figure></section><p style="width:9999px">x</p><script>missing()</script></body>'
    )
    seen, console = look(page, tmp_path)
    found = " ".join(seen["problems"])
    for problem in ("missing is not defined", "dead link gone", "s is empty", "doubled", "empty picture", "wider"):
        assert problem in found
    assert console
