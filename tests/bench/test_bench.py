"""The load generator against a stand-in, the report's figures, and the report in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_deploy.assets import templates_dir
from dflash_deploy.bench import Sample, Sweep, as_dict, html, measure, percentile
from dflash_deploy.bench.plots import ticks
from dflash_deploy.cli import bench as cli_bench
from dflash_deploy.health import Probe
from tests.health.conftest import Standin, standin

__all__ = ["standin"]  # the fixture

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_percentiles() -> None:
    values = [float(v) for v in np.random.default_rng(3).exponential(1, 101)]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile([], 50) == 0.0 and percentile([2.0], 99) == 2.0


def test_ticks_cover_and_are_round() -> None:
    for top in (0.003, 0.9, 1, 7, 19, 101, 12345):
        marks = ticks(top)
        assert marks[0] == 0 and marks[-1] >= top and 2 <= len(marks) <= 8
    assert ticks(0) == [0.0, 1.0]


def test_a_stream_is_measured(standin: Standin) -> None:
    base = f"http://127.0.0.1:{standin.settings.port}"
    sweep = measure(base, [Probe("a"), Probe("b")], method="chain", concurrency=3, requests=9, max_tokens=16)
    assert len(sweep.good) == 9 and sum(s.tokens for s in sweep.good) == 108
    # Read late, both pieces come at once.
    assert all(0.01 <= s.first < 5 and s.whole >= max(s.first, 0.02) and len(s.gaps) == 1 for s in sweep.good)
    assert sweep.acceptance.length == 3.0 and sweep.tokens_per_s == pytest.approx(108 / sweep.seconds)
    width, rates = sweep.timeline(10)
    assert sum(rates) * width == pytest.approx(108)
    # Chats go as the server's own tokens; where it cannot tell them, as chats, and nothing is known of drafts.
    chat = Probe(({"role": "user", "content": "a"},))
    assert measure(base, [chat], method="chain", concurrency=1, requests=2, max_tokens=16).acceptance.length == 3.0
    standin.mode("old")
    old = measure(base, [chat], method="chain", concurrency=1, requests=2, max_tokens=16)
    assert len(old.good) == 2 and not old.acceptance.steps
    standin.mode("crash")
    broken = measure(base, [Probe("a")], method="chain", concurrency=2, requests=40, max_tokens=16)
    assert not broken.good and len(broken.samples) < 15 and "HTTP 500" in broken.samples[0].error


def made_up() -> dict[str, Any]:
    """Three methods at four concurrencies, with figures that a reader can check in the plots."""
    sweeps = []
    for speed, method in ((10, "none"), (18, "chain"), (25, "tree 16 <b>&")):
        for width in (1, 2, 4, 8):
            pace = 1 / (speed * (1 - 0.02 * width))
            samples = []
            for number in range(2 * width):
                began = (number // width) * 20 * pace
                times = tuple(began + pace * (at + 2) for at in range(20))
                meta = {} if method == "none" else {"spec_verify_ct": 20, "spec_num_correct_drafts": 30}
                meta |= {} if method == "none" else {"spec_correct_drafts_histogram": [4, 6, 6, 4]}
                samples.append(Sample(began, times, 40, meta))
            sweeps.append(Sweep(method, width, tuple(samples), 42 * pace))
    starts = [{"label": "chain", "phases": {"spawn": 8.0, "weights": 3.5, "warm-up": 1.0}}]
    return as_dict({"host": "ct200", "machine": "two cores & no GPU"}, sweeps, starts=starts, sglang_bench={})


def test_report_is_one_file_that_asks_for_nothing() -> None:
    page = html(made_up(), templates_dir())
    assert not re.search(r"https?://|<script|src=|@import|url\(", page)
    assert "tree 16 &lt;b&gt;&amp;" in page and "<b>&" not in page
    for title in (
        "Acceptance per position",
        "Tokens a second by width",
        "Tokens a second by batch",
        "Timeline",
        "Starts",
    ):
        assert f"<h2>{title}</h2>" in page
    assert page.count("<svg") == 7
    html(
        as_dict({"host": "h"}, [Sweep("none", 1, (), 1.0)], starts=[], sglang_bench={"duration": 1.0}), templates_dir()
    )


PROBE = """<script>
addEventListener("load", () => {
  const plots = [...document.querySelectorAll("svg")].map(svg => {
    const frame = svg.getBoundingClientRect(), outside = [...svg.querySelectorAll("text,rect,circle,polyline")]
      .filter(mark => { const box = mark.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1; });
    const texts = [...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect());
    let overlaps = 0;
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++)
      if (texts[i].left < texts[j].right - 1 && texts[j].left < texts[i].right - 1 &&
          texts[i].top < texts[j].bottom - 3 && texts[j].top < texts[i].bottom - 3) overlaps++;
    return {wide: frame.width, high: frame.height, outside: outside.length, overlaps, marks: svg.querySelectorAll("rect,circle,polyline").length};
  });
  document.title = "seen " + JSON.stringify({plots, scrolls: document.documentElement.scrollWidth > innerWidth,
    asked: performance.getEntriesByType("resource").length});
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1200, 420])
def test_report_in_a_browser(tmp_path: Path, width: int) -> None:
    """Chromium lays the page out without a network: every plot is there, nothing sticks out or overlaps."""
    import json

    page = tmp_path / "bench.html"
    # The probe is ours, not the report's: its own policy forbids scripts.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html(made_up(), templates_dir()))
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    shot = tmp_path / "bench.png"
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 500)},3600",
        "--proxy-server=127.0.0.1:9", f"--screenshot={shot}", "--dump-dom", "--virtual-time-budget=3000",
    ]  # fmt: skip
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"<title>seen (.*?)</title>", done.stdout)
    assert found, done.stdout[:500]
    seen = json.loads(found.group(1).replace("&quot;", '"'))
    assert seen["asked"] == 0 and not seen["scrolls"] and len(seen["plots"]) == 7
    for plot in seen["plots"]:
        assert plot["wide"] > 350 and plot["high"] > 40 and plot["marks"] >= 3, plot
        assert plot["outside"] == 0 and plot["overlaps"] == 0, plot
    if keep := os.environ.get("DFLASH_KEEP_SCREENSHOTS"):
        html_only = html(made_up(), templates_dir())
        Path(keep, "bench.html").write_text(html_only)
        if shot.exists():
            shutil.copy(shot, Path(keep) / f"bench-{width}.png")


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("failed", [0, 3])
def test_table_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, failed: int
) -> None:
    """No figure is cut short, though a CPU takes a minute for an answer."""
    data = made_up()
    for sweep in data["sweeps"]:
        sweep |= {"whole_s": {"p50": 43.21, "p99": 65.43}, "first_token_s": {"p50": 2.345, "p99": 3.456}}
    data["sweeps"][1]["failed"] = failed
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cli_bench._table(data)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in shown and "65430" in shown and ("fail" in shown) == bool(failed)
    assert max(map(len, shown.splitlines())) <= width
