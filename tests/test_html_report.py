"""The report as pages, in a real headless Chromium: numbers, links, filters, themes, phones, screen readers, print."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from made_up_results import READING, library_of, made_up, passport_of
from playwright.sync_api import sync_playwright

from generated.library import Library
from leaderboard.board import Board
from leaderboard.html import wording, write
from leaderboard.records import Interval, ResultsError, append
from reference_kernels.tasks import load_suite

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; apt-get install chromium")
BASELINES = {
    "gemm": 1.0, "torch.compile": 0.8, "torch.compile:max-autotune": 0.85, "eager": 0.4,
    "liger": 0.7, "flashinfer": 0.6,
}  # fmt: skip


def full_board() -> Board:
    """The library's kernels at the suite's sizes in two sessions, with made-up samples."""
    chance, suite, records = random.Random(1), load_suite(), []
    passports = list(Library().passports())

    def rounds(us: float) -> list[float]:
        return [float(f"{chance.gauss(us, 0.004 * us):.4g}") for _ in range(40)]

    for session in ("s1", "s2"):
        for task in suite.tasks.values():
            for shape in task.timed:
                us = 2e6 * math.prod(shape) / 6.6e14
                baselines = {n: rounds(us / share) for n, share in BASELINES.items()}
                if "rope" not in task.name:
                    baselines["expert"] = rounds(us * chance.uniform(0.95, 1.03))
                twin = rounds(us)
                for p in sorted((p for p in passports if p.task == task.name), key=lambda p: p.author == "composer"):
                    own = task.name == "gemm_swiglu_bwd" and p.author == "composer"
                    records.append(
                        made_up(
                            rounds(1.02 * us) if own else twin, task.name, p.author, session, shape, baselines,
                            covers={"expert": ["z"]} if "cross_entropy" in task.name else None,
                            kernel=p.kernel, source_sha256=p.source_sha256, left_out={"coda": "not installed"},
                            object_sha256=p.source_sha256 if own else task.name,
                            same_object_as=None if own or p.author != "composer" else "claude:unspecified",
                        )
                    )  # fmt: skip
    return Board(records, passports)


def small_board(*records, hidden=(), problems=()) -> Board:
    return Board(list(records), [passport_of(r.task, r.author) for r in records], list(problems), list(hidden))


@pytest.fixture(scope="session")
def board() -> Board:
    return full_board()


@pytest.fixture(scope="session")
def report(board, tmp_path_factory) -> Path:
    return write(board, tmp_path_factory.mktemp("full") / "report").parent


@pytest.fixture(scope="module")  # its event loop must be gone before other files run theirs
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium; apt-get install chromium")
    with sync_playwright() as p:
        running = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Watched:
    """A page that notes everything that goes wrong on it."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        self.page, self.trouble = self.context.new_page(), []
        self.page.on("console", lambda m: self.trouble.append(f"console: {m.text}"))
        self.page.on("pageerror", lambda e: self.trouble.append(f"error: {e}"))
        self.page.on("dialog", lambda d: (self.trouble.append(f"dialog: {d.message}"), d.dismiss()))
        self.page.on("requestfailed", lambda r: self.trouble.append(f"failed: {r.url}"))
        self.page.on("request", self._stays)

    def _stays(self, request) -> None:
        if not request.url.startswith(("file:", "data:", "about:")):
            self.trouble.append(f"leaves: {request.url}")

    def open(self, path: Path, fragment: str = ""):
        self.page.goto("about:blank")
        self.page.goto(path.as_uri() + fragment)
        return self.page


@pytest.fixture
def watched(browser):
    opened = []

    def make(**options) -> Watched:
        opened.append(Watched(browser, **options))
        return opened[-1]

    yield make
    for w in opened:
        w.context.close()
        assert w.trouble == []


def violations(page) -> list[tuple[str, str, str]]:
    """What axe-core finds: rule, impact, first element. It may not fetch the style sheet again: files have no XHR."""
    found = Axe().run(page, options={"resultTypes": ["violations"], "preload": False}).response["violations"]
    return [(v["id"], v["impact"], v["nodes"][0]["html"][:200]) for v in found]


class Page(HTMLParser):
    """Links, ids and tags of one file."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.ids, self.tags = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        self.tags.append((tag, a))
        self.ids += [a["id"]] if "id" in a else []
        self.links += [a[n] for n in ("href", "src") if a.get(n) and tag != "use"]


def kinds(report: Path) -> list[Path]:
    return [report / "index.html", report / "task/gemm_swiglu_bwd.html", report / "evidence/s2.html"]


def visible_rows(page) -> list[list[str]]:
    return page.evaluate(
        "[...document.querySelectorAll('#rows tbody tr')].filter(r => !r.hidden && r.offsetParent)"
        ".map(r => [...r.cells].map(c => c.textContent.trim().replace(/[ \\n]+/g, ' ')))"
    )


# --- the files ------------------------------------------------------------------------------------------


def test_the_full_suite_is_fast_and_light(board, tmp_path):
    start = time.process_time()  # one process, hardly any waiting: on an idle machine this is the wall clock's time
    directory = write(board, tmp_path / "r").parent
    assert time.process_time() - start < 20
    assert sum(p.stat().st_size for p in directory.rglob("*")) < 5e6
    assert len(list(directory.glob("task/*.html"))) == len(load_suite().tasks)


def test_the_same_board_gives_the_same_bytes(tmp_path):
    """In processes that order their sets differently."""
    records = [made_up(baselines={"expert": 251.0, "liger": 300.0, "eager": 400.0}), made_up(author="claude:x")]
    library_of(tmp_path / "lib", records)
    append(tmp_path / "lib" / "results.jsonl", records)
    code = (
        "import sys; from pathlib import Path; from leaderboard import board, html\n"
        "library = Path(sys.argv[1]); html.write(board.load_board(library), Path(sys.argv[2]), library=library)"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", code, str(tmp_path / "lib"), str(tmp_path / seed)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=120)
    files = sorted(p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*") if p.is_file())
    assert len(files) == 6
    assert [f for f in files if (tmp_path / "1" / f).read_bytes() != (tmp_path / "2" / f).read_bytes()] == []


def test_every_link_leads_somewhere(report):
    pages = {p: Page(p) for p in report.rglob("*.html")}
    broken, followed = [], 0
    for path, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), path
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme == "data" or parts.fragment.startswith("/"):
                continue
            assert not parts.scheme and not parts.netloc, link
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            followed += 1
            if not target.is_file() or parts.fragment and unquote(parts.fragment) not in pages[target].ids:
                broken.append((path.name, link))
    assert broken == [] and followed > 500


def test_a_former_report_is_replaced_and_nothing_else(tmp_path):
    directory = tmp_path / "r"
    write(small_board(made_up(), made_up(task="gemm_rope")), directory)
    assert (directory / "task/gemm_rope.html").exists()
    write(small_board(made_up()), directory)
    assert not (directory / "task/gemm_rope.html").exists() and (directory / "task/gemm_rmsnorm.html").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r"]  # nothing is left beside it
    (directory / "task/mine.txt").write_text("keep")
    with pytest.raises(ResultsError, match=r"task/mine\.txt"):
        write(small_board(made_up()), directory)
    assert (directory / "task/mine.txt").read_text() == "keep"
    with pytest.raises(ResultsError, match="not a directory"):
        write(small_board(made_up()), directory / "index.html")


def test_a_report_that_fails_midway_leaves_the_former_one(tmp_path, monkeypatch):
    directory = tmp_path / "r"
    write(small_board(made_up()), directory)
    before = (directory / "index.html").read_bytes()
    monkeypatch.setattr("leaderboard.html.pages.plots.roofline", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(small_board(made_up(300.0)), directory)
    assert (directory / "index.html").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["r"]


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot write the report"):
        write(small_board(made_up()), tmp_path / "file" / "r")


def test_the_sources_come_from_the_given_library(tmp_path):
    records = [made_up(task="gemm_rmsnorm", author="composer")]
    library_of(tmp_path / "lib", records)
    write(small_board(*records), tmp_path / "r", library=tmp_path / "lib")
    assert "# gemm_rmsnorm by composer" in (tmp_path / "r/task/gemm_rmsnorm.html").read_text()
    write(small_board(*records), tmp_path / "elsewhere")
    assert "cannot read" in (tmp_path / "elsewhere/task/gemm_rmsnorm.html").read_text()


# --- wording --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        (1.03, 1.2, "faster"), (1.01, 1.2, "unclear"), (0.99, 1.01, "level"), (0.9, 1.0, "unclear"),
        (0.9, 0.95, "slower"),
    ],
)  # fmt: skip
def test_a_verdict_needs_the_whole_interval_beyond_the_minimum_effect(low, high, verdict):
    assert wording.verdict(Interval(median=math.sqrt(low * high), low=low, high=high)) == verdict


@pytest.mark.parametrize(
    "reading, text",
    [
        ("0x0", "none"), ("0x4", "power cap (software)"), ("0x44", "power cap (software), thermal (hardware)"),
        ("0x1000", "0x1000"), (None, "not read"), ("odd", "odd"),
    ],
)  # fmt: skip
def test_throttle_readings_are_decoded(reading, text):
    assert wording.throttle(reading) == text


def test_names_for_files_stay_inside_and_apart():
    names = ["a/b", "a-b", "../a-b", "a b", "", ".", "..", "é" * 300]
    slugs = [wording.slug(n) for n in names]
    assert len(set(slugs)) == len(names) and all(re.fullmatch(r"[\w.-]{1,80}", s) and s[0] != "." for s in slugs)


# --- numbers --------------------------------------------------------------------------------------------


def plain(text: str) -> float:
    return float(text.replace("−", "-").replace("\N{NARROW NO-BREAK SPACE}", "").rstrip("%"))


def floats(text: str) -> list[float]:
    """Every number in a cell, whatever stands around it."""
    joined = text.replace("−", "-").replace("\N{NARROW NO-BREAK SPACE}", "")
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", joined)]


@needs_browser
def test_every_row_says_what_its_record_says(watched, report, board):
    page = watched().open(report / "index.html")
    heads = [re.sub(r"\s*[↕↑↓]", "", h) for h in page.locator("#rows thead th").all_inner_texts()]
    rows = [dict(zip(heads, row, strict=True)) for row in visible_rows(page)]
    newest = {(r.task, wording.size(r.shape), r.author): r for r in board.records if r.session == "s2"}
    assert len(rows) == len(newest) == 96
    for row in rows:
        r = newest[row["task"], row["M×N×K"], row["author"]]
        assert floats(row["µs"])[0] == pytest.approx(statistics.median(r.samples_us["total"]), abs=0.051)
        tax = statistics.median(k - g for k, g in zip(r.samples_us["kernel"], r.samples_us["gemm"]))
        assert floats(row["tax, µs"])[0] == pytest.approx(tax, abs=0.051)
        assert floats(row["of floor"])[0] == pytest.approx(100 * r.floor_us / r.kernel_us, abs=0.51)
        for name in ("expert", *BASELINES):
            if name not in r.baselines:
                assert row[f"vs {name}"] == "–"
                continue
            ratios = sorted(b / t for b, t in zip(r.samples_us[name], r.samples_us["total"]))
            said = floats(row[f"vs {name}"])
            assert said[0] == pytest.approx(statistics.geometric_mean(ratios[19:21]), abs=6e-4)
            assert said[1:] == [round(r.baselines[name].ratio.low, 3), round(r.baselines[name].ratio.high, 3)]
            assert ("*" in row[f"vs {name}"]) == (name == "expert" and "cross_entropy" in r.task)


@needs_browser
def test_the_summary_follows_from_the_records(watched, report, board):
    page = watched().open(report / "index.html")
    llm = [r for r in board.records if r.session == "s2" and r.author.startswith("claude")]
    whole = [r.baselines["expert"].ratio for r in llm if "expert" in r.baselines and "cross_entropy" not in r.task]
    some = [r.baselines["expert"].ratio for r in llm if "expert" in r.baselines and "cross_entropy" in r.task]
    headline = page.locator(".headline").inner_text()
    floor = statistics.geometric_mean(r.share_of_floor for r in llm)
    assert floats(headline.split("reach")[1])[0] == pytest.approx(100 * floor, abs=0.51)
    against = statistics.geometric_mean(x.median for x in whole)
    assert floats(headline.split("quack")[1])[0] == pytest.approx(against, abs=6e-4)
    rows = page.locator("table.glance").first.locator("tbody tr").all_inner_texts()
    told = {row.split("\t")[0].split("\n")[0].strip(): row for row in rows}
    for name, ratios in (("expert", whole), ("expert*", some)):
        row = next(v for k, v in told.items() if k.split(" ")[0] == name)
        counts = {v: int(n) for n, v in re.findall(r"(\d+) (faster|slower|level|unclear)", row)}
        assert sum(counts.values()) == len(ratios)
        assert counts.get("slower", 0) == sum(x.high < 1 / 1.02 for x in ratios)
        assert counts.get("faster", 0) == sum(x.low > 1.02 for x in ratios)
    assert "45 same code" in told["composer"]


@needs_browser
def test_counts_lead_to_exactly_their_rows(watched, report):
    page = watched().open(report / "index.html")
    links = page.locator("a.count").all()
    found = [(a.get_attribute("href"), int(re.search(r"\d+", a.inner_text())[0])) for a in links]
    assert len(found) > 15
    for href, count in found:
        page.goto(f"{(report / 'index.html').as_uri()}{href}")
        assert len(visible_rows(page)) == count, href


@needs_browser
def test_a_number_leads_to_its_record(watched, report, board):
    page = watched().open(report / "index.html")
    page.locator("#rows tbody tr").nth(3).locator("td.num a").first.click()
    page.wait_for_url("**/evidence/*")
    article = page.locator(":target")
    article.locator("summary").last.click()
    stated = json.loads(article.locator("pre").last.inner_text())
    record = next(r for r in board.records if (r.kernel, list(r.shape), r.session) == (
        stated["kernel"], stated["shape"], stated["session"]
    ))  # fmt: skip
    complete = json.loads(record.model_dump_json())
    assert stated == complete or record.same_object_as and stated == {
        k: v for k, v in complete.items() if k not in ("samples_us", "baselines")
    }


# --- the browser ----------------------------------------------------------------------------------------


@needs_browser
def test_no_page_has_errors_or_needs_the_network(watched, report):
    w = watched()
    for path in sorted(report.rglob("*.html")):
        w.open(path)
        assert w.page.locator("h1").count() == 1 and w.page.title()


@needs_browser
def test_sorting(watched, report):
    page = watched().open(report / "index.html")
    header = page.locator("#rows th[data-key=us]")
    header.locator("button").click()
    times = [plain(row[3].split(" IQR")[0]) for row in visible_rows(page)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert header.get_attribute("aria-sort") == "descending" and "sort=us%2Cdescending" in page.url
    header.locator("button").focus()
    page.keyboard.press("Enter")
    assert [plain(row[3].split(" IQR")[0]) for row in visible_rows(page)] == times[::-1]
    assert header.get_attribute("aria-sort") == "ascending"
    page.locator("#rows th[data-key=expert] button").click()
    cells = [row[6] for row in visible_rows(page)]
    have = [floats(c)[0] for c in cells if c != "–"]
    assert have == sorted(have, reverse=True) and cells[len(have) :] == ["–"] * (len(cells) - len(have))
    assert page.locator("#rows th[aria-sort]").count() == 1


@needs_browser
def test_filtering_is_told_kept_in_the_address_and_undone(watched, report):
    page = watched().open(report / "index.html")
    page.get_by_role("combobox", name="task", exact=True).select_option("gemm_swiglu_bwd")
    page.get_by_role("combobox", name="author", exact=True).select_option("LLM")
    rows = visible_rows(page)
    assert len(rows) == 3 and {(r[0], r[2]) for r in rows} == {("gemm_swiglu_bwd", "claude:unspecified")}
    assert page.locator("#live").inner_text() == "3 of 96 rows"
    assert page.url.endswith("#/task=gemm_swiglu_bwd&author=LLM")
    page.get_by_label("search").fill("8192×8192")
    assert len(visible_rows(page)) == 1
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("document.querySelector('#live').textContent === '96 of 96 rows'")
    assert len(visible_rows(page)) == 96 and "#" not in page.url


@needs_browser
def test_a_deep_link_restores_filters_and_order(watched, report):
    fragment = "#/size=4096%C3%974096%C3%974096&author=composer&sort=tax,ascending"
    page = watched().open(report / "index.html", fragment)
    rows = visible_rows(page)
    assert rows and {(r[1], r[2]) for r in rows} == {("4096×4096×4096", "composer")}
    taxes = [floats(r[4])[0] for r in rows]
    assert taxes == sorted(taxes)
    assert page.get_by_role("combobox", name="author", exact=True).input_value() == "composer"
    page = watched().open(report / "index.html", "#/task=gone&sort=nonsense,sideways")
    assert len(visible_rows(page)) == 96
    assert page.locator("#live").inner_text() == "96 of 96 rows; the link asks for what is not here: task gone"


@needs_browser
def test_an_anchor_marks_its_row(watched, report):
    page = watched().open(report / "index.html")
    href = page.locator("#rows a.self").nth(5).get_attribute("href")
    plain_colour = page.locator(href).evaluate("e => getComputedStyle(e).backgroundColor")
    page = watched().open(report / "index.html", href)
    assert page.locator(href).evaluate("e => getComputedStyle(e).backgroundColor") != plain_colour


@needs_browser
def test_copying_the_link_says_what_happened(watched, report):
    page = watched().open(report / "index.html", "#/task=gemm_rope")
    page.get_by_role("button", name="Copy link").click()
    page.wait_for_function("/link/.test(document.querySelector('#live').textContent)")


COLOURS = """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
  getComputedStyle(document.querySelector('svg.plot text')).fill]"""


@needs_browser
def test_themes_follow_the_system_and_the_button(watched, report):
    light = watched(color_scheme="light").open(report / "index.html").evaluate(COLOURS)
    w = watched(color_scheme="dark")
    dark = w.open(report / "index.html").evaluate(COLOURS)
    assert all(a != b for a, b in zip(light, dark))
    button = w.page.locator("button.theme")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert w.page.evaluate(COLOURS) == light and button.get_attribute("aria-pressed") == "false"
    assert w.open(report / "task/gemm_rope.html").evaluate(COLOURS)[0] == light[0]  # the choice is kept


@needs_browser
def test_blocked_storage_breaks_nothing(watched, report):
    w = watched()
    w.context.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('x', 'SecurityError'); }});"
    )
    page = w.open(report / "index.html")
    before = page.evaluate(COLOURS)
    page.locator("button.theme").click()
    assert page.evaluate(COLOURS) != before


@needs_browser
def test_a_phone_never_scrolls_sideways(watched, report):
    w = watched(viewport={"width": 360, "height": 740})
    for path in kinds(report):
        w.open(path)
        assert w.page.evaluate("document.documentElement.scrollWidth") <= 360, path
        w.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert w.page.evaluate("document.documentElement.scrollWidth") <= 360, path


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(watched, report, scheme):
    w = watched(color_scheme=scheme)
    for path in kinds(report):
        w.open(path)
        w.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert violations(w.page) == [], path


@needs_browser
def test_everything_is_there_without_javascript(watched, report):
    page = watched(java_script_enabled=False).open(report / "index.html")
    assert page.locator("#rows tbody tr:visible").count() == 96
    assert page.locator("form.filters").is_hidden() and page.locator("button.theme").is_hidden()
    assert page.locator("svg.plot:visible").count() == 2


@needs_browser
def test_print(watched, report, tmp_path):
    w = watched(color_scheme="dark")
    page = w.open(report / "task/gemm_swiglu_bwd.html")
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2
    page.emulate_media(media="print")
    assert page.evaluate(COLOURS)[0] == "rgb(255, 255, 255)" and page.locator("header nav").is_hidden()
    assert page.locator(".box").first.evaluate("e => getComputedStyle(e).overflow") == "visible"


def test_every_drawing_is_described_with_numbers(report):
    for path in kinds(report)[:2]:
        text = path.read_text()
        drawings = re.findall(r"<svg.*?</svg>", text, re.S)
        assert drawings and "<image" not in text and "<img" not in text
        for svg in drawings:
            named = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', svg)
            assert f'<title id="{named[1]}">' in svg
            assert re.search(rf'<desc id="{named[2]}">[^<]*\d', svg)
            assert "#0" not in re.sub(r'"#\S+"|url\(#\S+\)', "", svg)  # every colour is the page's


# --- other boards ---------------------------------------------------------------------------------------


@needs_browser
def test_nothing_a_file_says_becomes_markup(watched, tmp_path):
    evil = '<script>alert(1)</script><img src=x onerror=alert(2)>"\''
    records = [
        made_up(author=f"claude:{evil}", session="../../s", left_out={evil: evil}, command=evil, device=evil),
        made_up(task="../../t/" + evil, author="human:a|b\nc"),
    ]
    board = small_board(*records, hidden=[(made_up(session="x"), evil)], problems=[evil])
    directory = write(board, tmp_path / "r").parent
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r"]
    for path in directory.rglob("*.html"):
        scripts = [a for tag, a in Page(path).tags if tag == "script"]
        assert len(scripts) == 2 and not [a for tag, a in Page(path).tags if tag == "img" or "onerror" in a]
        page = watched().open(path)
        assert "alert(1)" not in page.evaluate("[...document.scripts].map(s => s.text).join()")
    page = watched().open(directory / "index.html")
    page.get_by_role("combobox", name="author", exact=True).select_option(f"claude:{evil}")
    assert len(visible_rows(page)) == 1 and evil in page.locator("#hidden").inner_text()


@needs_browser
def test_an_empty_board_says_what_to_run(watched, tmp_path):
    hidden = [(made_up(), "it has no receipt")]
    page = watched().open(write(small_board(hidden=hidden), tmp_path / "r"))
    text = page.locator("main").inner_text()
    assert "coda-agent measure --all" in text and "it has no receipt" in text
    assert violations(page) == []
    text = watched().open(write(small_board(), tmp_path / "r")).locator("main").inner_text()
    assert "No results yet" in text


@needs_browser
def test_devices_stay_apart(watched, tmp_path):
    here, there = made_up(250.0), made_up(200.0, session="s2", device="NVIDIA H100 NVL")
    page = watched().open(write(small_board(here, there), tmp_path / "r"))
    assert page.locator(".headline").count() == 2 and page.locator("svg.plot").count() == 2
    page.get_by_role("combobox", name="device", exact=True).select_option("NVIDIA H100 NVL")
    assert len(visible_rows(page)) == 1
    page.locator("a.count").first.click()  # the only pair on this device
    page.wait_for_function("document.querySelector('#live').textContent === '1 of 2 rows'")
    page = watched().open(tmp_path / "r/task/gemm_rmsnorm.html")
    page.get_by_role("heading", name="Timing on NVIDIA H200").wait_for()


@needs_browser
def test_a_kernel_by_a_person_is_a_column_of_its_own(watched, tmp_path):
    records = [made_up(250.0, author="claude:x"), made_up(260.0, author="human:ada"), made_up(255.0)]
    page = watched().open(write(small_board(*records), tmp_path / "r"))
    assert "Against kernels submitted by people: 1.040 times as fast" in page.locator(".headline").inner_text()
    captions = page.locator("table.glance caption").all_inner_texts()
    assert [c.split()[0] for c in captions] == ["LLM", "human", "composer"]


@needs_browser
def test_what_is_missing_is_said_where_it_is_missed(watched, tmp_path):
    hot = {"before": READING | {"throttle": "0x44"}, "after": READING}
    r = made_up(left_out={"liger": "not installed: pip install liger-kernel"}, receipt=hot)
    other = made_up(task="gemm_rope", baselines={"liger": 300.0})
    page = watched().open(write(small_board(r, other), tmp_path / "r"))
    assert page.locator("#hidden tr", has_text="liger").inner_text().split("\t")[1:] == [
        "not installed: pip install liger-kernel", "gemm_rmsnorm",
    ]  # fmt: skip
    assert "thermal (hardware)" in page.locator("#conditions").inner_text()
    assert page.locator("td.none[title^='not installed']").count() == 1


@needs_browser
def test_sessions_are_not_drawn_against_each_other(watched, tmp_path):
    old, new = made_up(author="claude:x", session="s1"), made_up(300.0, session="s2")
    page = watched().open(write(small_board(old, new), tmp_path / "r").parent / "task/gemm_rmsnorm.html")
    assert "Not drawn, because timed in another session: claude:x" in page.locator("figcaption").first.inner_text()
    assert "claude:x" not in page.locator("svg.plot").first.text_content()
