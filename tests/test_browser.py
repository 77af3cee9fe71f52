"""The page of runs in a real browser, Chromium as PyQt6-WebEngine brings it: it renders
without an error, its tables sort and filter, and a text from a file runs nothing.

pip install PyQt6-WebEngine; skipped where it is not installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedjax_cfl.analysis.report import report
from fedjax_cfl.runs import results

pytest.importorskip("PyQt6.QtWebEngineCore", reason="no browser: PyQt6-WebEngine is not installed")
pytestmark = pytest.mark.nightly
DRIVER = """
import json, sys
from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, text, line, source):
        console.append(text)
    def javaScriptAlert(self, origin, text):
        console.append(f"alert {text}")

console, found = [], []
app = QApplication(sys.argv[:1])
view = QWebEngineView()
page = Page(view)
view.setPage(page)
view.resize(int(sys.argv[4]), 900)
loop = QEventLoop()
page.loadFinished.connect(lambda fine: (found.append(fine), loop.quit()))
page.load(QUrl.fromLocalFile(sys.argv[1]))
view.show()
loop.exec()
for script in json.load(open(sys.argv[2])):
    page.runJavaScript(script, lambda value: (found.append(value), loop.quit()))
    loop.exec()
QTimer.singleShot(1000, loop.quit)
loop.exec()
view.grab().save(sys.argv[3])
print(json.dumps([console, found]))
"""
TABLE = "document.querySelector('[data-source=clients-0]')"


def click(heading: str) -> str:
    button = f"[...{TABLE}.querySelectorAll('th button')].find(b => b.textContent === '{heading}')"
    return f"{button}.click(); 1"


def column(number: int) -> str:
    rows = f"[...{TABLE}.querySelectorAll('tbody tr')]"
    return f"{rows}.map(row => row.children[{number}].textContent)"


def ask(text: str) -> str:
    box = f"{TABLE}.querySelector('input')"
    return f"{box}.value = '{text}'; {box}.dispatchEvent(new Event('input')); 1"


def make_run(folder: Path, clients: int) -> Path:
    """A run of many clients with a hostile name."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    names = [f"client {k}" for k in range(clients - 1)] + ["<img src=x onerror=alert(1)>"]
    columns = {
        "client": np.array(names),
        "group": rng.integers(3, size=clients),
        "concept": rng.integers(3, size=clients),
        "accuracy": np.where(rng.random(clients) < 0.1, np.nan, rng.random(clients)),
    }
    results.write_parquet(folder / "clients.parquet", columns)
    row = {"round": 1, "accuracy": 0.5, "bytes_up": 1, "bytes_down": 1, "local_steps": 2}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    summary = {"algorithm": "<script>alert(1)</script>", "dataset": "digits", "seed": 0}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def drive(
    page: Path, scripts: list[str], tmp_path: Path, width: int = 1200, dark: bool = False
) -> tuple[list, list]:
    """Returns (what the console said, the scripts' values after whether it was loaded)."""
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "scripts.json").write_text(json.dumps(scripts))
    places = [str(tmp_path / name) for name in ("driver.py", "scripts.json", "shot.png")]
    command = [sys.executable, places[0], str(page), *places[1:], str(width)]
    flags = "--no-sandbox --headless --disable-gpu"
    flags += " --blink-settings=preferredColorScheme=0" if dark else ""
    own = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags}
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=True, timeout=120
    )
    console, found = json.loads(done.stdout.splitlines()[-1])
    return console, found


def test_a_page_works_in_a_browser(tmp_path):
    run = make_run(tmp_path / "run", 60)
    page = report([run], tmp_path / "page.html")
    table = results.read_clients(run)
    scripts = ["document.title", "document.images.length"]
    scripts += ["[...document.images].every(i => i.complete && i.naturalWidth > 100)"]
    scripts += [click("accuracy"), column(3), click("accuracy"), column(3)]
    scripts += [ask("accuracy<0.3 & group=2"), column(0), ask("onerror"), column(0), ask("")]
    scripts += [ask("acuracy<0.3"), f"{TABLE}.querySelector('span').textContent", ask("")]
    scripts += [f"{TABLE}.querySelectorAll('tbody tr').length"]
    scripts += [f"{TABLE}.querySelectorAll('nav button')[1].click(); {column(3)}.length"]
    console, found = drive(page, scripts, tmp_path)
    assert console == [], "no error, no warning, and no alert"
    loaded, title, images, drawn, _, up, _, down, _, few, _, evil, *others = found
    _, _, wrong, _, first, second = others
    assert (
        loaded and drawn and images == 3 and title.startswith("<script>alert(1)</script>, digits")
    )
    known = np.sort(table["accuracy"][~np.isnan(table["accuracy"])])
    assert [float(text) for text in up] == pytest.approx(known[:25], abs=1e-4)
    assert [float(text) for text in down] == pytest.approx(known[::-1][:25], abs=1e-4)
    fit = (table["accuracy"] < 0.3) & (table["group"] == 2)
    assert sorted(few) == sorted(table["client"][fit].tolist()) and len(few) > 2
    assert wrong.startswith(" 0 of 60 clients: no column acuracy; there are client, group, ")
    assert evil == ["<img src=x onerror=alert(1)>"] and first == 25 and second == 25
    shot = np.asarray(Image.open(tmp_path / "shot.png").convert("L"))
    assert (shot < 128).sum() > 1000, "there is something to see"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_a_page_fits_its_screen_and_its_light(width, dark, tmp_path):
    """Nothing is wider than the window but what scrolls by itself; text and paper differ."""
    page = report([make_run(tmp_path / "run", 60)], tmp_path / "page.html")
    scripts = ["document.documentElement.scrollWidth <= window.innerWidth"]
    scripts += [
        "getComputedStyle(document.body).color",
        "getComputedStyle(document.body).backgroundColor",
    ]
    console, (loaded, fits, ink, paper) = drive(page, scripts, tmp_path, width, dark)
    assert console == [] and loaded and fits
    light = [sum(map(int, colour[4:-1].split(","))) / 3 for colour in (ink, paper)]
    assert (light[0] > 180 and light[1] < 60) if dark else (light[0] < 60 and light[1] == 255)
