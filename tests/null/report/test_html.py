"""The report of a search: whole, self-contained, true to the prediction, and safe to open."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from piper_core.errors import ConfigError
from search.cli import main
from search.predict import Prediction, predict_strategy
from search.report.folder import BEST, REPORT, RESULT, TIMELINE
from search.report.html import html_report
from search.report.memory_levels import memory_over_time
from tests.null.export.strategies import data_parallel, pipeline

SMALL = ["--model", "piper-1b", "--gpus", "4", "--global-batch", "8", "--seq-len", "512", "--fix", "pp=2",
         "schedule=1f1b,zb_h1", "tp=1", "recompute=none", "--execute", "0"]  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a search writes."""
    target = tmp_path_factory.mktemp("search") / "out"
    assert main([*SMALL, "--out", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def best() -> Prediction:
    return predict_strategy(pipeline("zbv", 2, 4, 2, row=2, more=[data_parallel(shard_grads=True)]))


def result(best: Prediction, **more: Any) -> dict[str, Any]:
    """A result of two candidates, the second slower and smaller."""
    score = best.score.to_data()
    slower = score | {"step_time_s": score["step_time_s"] * 1.2, "peak_memory_bytes": [1e9, 2e9]}
    common = {"degrees": {"pp": 2, "tp": 1, "dp": 2, "ep": 1, "cp": 1, "virtual_stages": 2}, "zero_stage": 2,
              "schedule": "zbv", "micro_batch": 1, "num_microbatches": 4, "recompute": "none",
              "layers_per_stage": [4, 4, 4, 4]}  # fmt: skip
    odd = {"sequence_parallel": True, "streams": "data", "outer": "pp"}
    return {
        "candidates": [{"id": 0, "predicted": score} | common, {"id": 1, "predicted": slower} | common | odd],
        "pareto": [0, 1], "space": {"size": 10, "pruned": {"time bound": 8}, "simulated": 2}, "proof_gap": 0.0,
    } | more  # fmt: skip


class Tags(HTMLParser):
    """Checks that every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(best: Prediction) -> None:
    page = html_report(result(best), best, "model: x\n")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.addresses == []
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|\bimport\b", page)
    for part in ("Timeline of the best", "Memory over the step", "Where the step goes", "Time against memory",
                 "Candidates", "Directives of the best"):  # fmt: skip
        assert f"<h2>{part}" in page
    assert page.count("<circle") == 2
    assert "sequence parallel, streams data" in page


def test_the_data_are_those_of_the_prediction(best: Prediction) -> None:
    page = html_report(result(best), best, "")
    found = re.search(r'id="data">(.*?)</script>', page)
    assert found
    data = json.loads(found[1])
    drawn = sorted(event[2] for lane in data["lanes"] for event in lane["events"])
    assert drawn == sorted(e.text for _, e in best.simulation.timeline().events() if e.end_s > e.start_s)
    assert data["period"] == best.score.step_time_s
    peaks = [max(size for _, size in row) for row in data["memory"]]
    assert peaks == pytest.approx(best.score.peak_memory_bytes, abs=1)


def test_memory_over_time(best: Prediction) -> None:
    """Times never fall; the peak is the score's; nothing that comes and goes is left at the end."""
    for row, points in enumerate(memory_over_time(best)):
        times = [at for at, _ in points]
        assert times == sorted(times)
        assert max(size for _, size in points) == pytest.approx(best.score.peak_memory_bytes[row])
        assert points[-1][1] == pytest.approx(min(size for _, size in points))


def test_names_are_text(best: Prediction) -> None:
    evil = "</script><script>alert(1)</script>"
    page = html_report(result(best, headline=evil, search={"model": evil, "gpus": 4}), best, evil)
    assert page.count("<script") == 2
    assert "alert(1)" in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize("data", [{}, {"candidates": []}, {"candidates": [1], "pareto": [], "space": {}}])
def test_what_is_no_result(data: dict[str, Any], best: Prediction) -> None:
    with pytest.raises(ConfigError, match="not the result of a search"):
        html_report(data, best, "")


@pytest.mark.parametrize(
    ("path", "value"),
    [(("space", "size"), "many"), (("space", "pruned"), {"time bound": "all"}), (("space", "pruned"), 3),
     (("candidates", 0, "degrees"), {}), (("candidates", 0, "predicted", "step_time_s"), float("nan")),
     (("candidates", 0, "predicted", "step_time_s"), "fast"), (("candidates", 1, "predicted", "peak_memory_bytes"), []),
     (("candidates", 0, "predicted", "breakdown"), None), (("pareto",), 1), (("candidates", 0, "layers_per_stage"), 4)],
)  # fmt: skip
def test_a_result_that_was_changed(path: tuple[Any, ...], value: object, best: Prediction) -> None:
    data = json.loads(json.dumps(result(best)))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(ConfigError, match="not the result of a search"):
        html_report(data, best, "")


def test_what_a_search_writes(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= {BEST, RESULT, REPORT, TIMELINE}
    data = json.loads((folder / RESULT).read_text())
    assert data["search"]["model"] == "piper-1b"
    assert "wins: " in data["headline"]
    assert json.loads((folder / TIMELINE).read_text())["traceEvents"]


def test_report_writes_the_same_page_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "-o", str(tmp_path / "again.html")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'again.html'}\n"
    assert (tmp_path / "again.html").read_text() == (folder / REPORT).read_text()


def test_another_search_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([*SMALL, "--global-batch", "16", "--out", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "holds another search (global_batch 8 there, 16 here)" in err
    assert err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert main([*SMALL, "--out", str(folder), "--json"]) == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "holds no result.json"), ("{", "it is no JSON"), ("[]", "it has no candidates"), ("[" * 5000, "no JSON")],
)
def test_report_of_what_is_no_search(
    text: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / RESULT).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / REPORT).exists()


PROBE = """
<script>
const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
const at = (type, x, y, more) => canvas.dispatchEvent(new PointerEvent(type, { clientX: box.left + x,
  clientY: box.top + y, pointerId: 1, bubbles: true, ...more }));
const said = [];
const here = () => said.push(document.getElementById("tip").textContent);
at("pointermove", 170, 30); here();
for (let i = 0; i < 12; i++) canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, clientX: box.left + 600,
  clientY: box.top + 30, cancelable: true }));
at("pointermove", 600, 30); here();
document.getElementById("whole").click();
at("pointermove", 170, 30); here();
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const colours = new Set();
for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] === 255) colours.add(pixels.slice(i, i + 3).join());
document.body.innerHTML = "<pre id=said>" + JSON.stringify({ said, colours: colours.size }) + "</pre>";
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page in")
def test_in_a_browser(best: Prediction, tmp_path: Path) -> None:
    """The timeline is drawn, says what the pointer is on, and zooms."""
    page = html_report(result(best), best, "model: x\n").replace("</body>", f"{PROBE}</body>")
    (tmp_path / "page.html").write_text(page)
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1400,900", "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'id="said">(.*?)</pre>', done.stdout)
    assert found, done.stdout[-500:]
    seen = json.loads(found[1])
    first, zoomed, again = seen["said"]
    assert re.match(r"\d+F\d+  forward\nrow 0, compute", first)
    assert zoomed != first
    assert again == first
    assert seen["colours"] > 6
