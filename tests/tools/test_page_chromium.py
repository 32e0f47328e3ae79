"""The page in a real browser: it says nothing on the console, asks for nothing, sorts, filters, turns dark, and prints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import page_kit
import tune_result_kit

OPTIONS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --window-size=1280,800""".split()
WIDTH, HEIGHT = 1280, 800
NAMES = ["report", "comparison", "tuning"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium of its own. Where there is none the tests are skipped, or fail if HMP_NEED_CHROMIUM says that they must run."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        lacking = "chromium" if chromium is None else "chromedriver"
        if os.environ.get("HMP_NEED_CHROMIUM"):
            pytest.fail(f"HMP_NEED_CHROMIUM is set, and there is no {lacking}: apt-get install chromium chromium-driver")
        pytest.skip(f"no {lacking} on the PATH: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    nasty = page_kit.row(f"op{page_kit.NASTY}", "bf16", ("float32", "bfloat16", "bfloat16"), f"net.{page_kit.NASTY}", 1, cast_seconds=2e-6)
    report = page_kit.report((*page_kit.ROWS, nasty)).to_html(folder / "report.html")
    comparison = page_kit.comparison().to_html(folder / "comparison.html")
    tuning = tune_result_kit.crowded().to_html(folder / "tuning.html")
    return {"report": report, "comparison": comparison, "tuning": tuning}


def opened(browser: Any, page: Path, theme: str = "light", media: str = "screen") -> Any:
    """The browser at the page, with nothing kept of the test before."""
    sized(browser, WIDTH, HEIGHT)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(page.as_uri())
    browser.execute_script("try { localStorage.clear() } catch {}")
    browser.get_log("browser")
    browser.get(page.as_uri())
    return browser


def sized(browser: Any, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def background(browser: Any) -> str:
    return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_page_looks_right_in_light_and_dark_and_is_not_wider_than_the_window(
    browser: Any, pages: dict[str, Path], name: str, tmp_path: Path
) -> None:
    shots = []
    for theme, colour in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
        opened(browser, pages[name], theme)
        assert browser.get_log("browser") == []
        assert browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)") == []
        assert background(browser) == colour
        shots.append(tmp_path / f"{theme}.png")
        assert browser.save_screenshot(str(shots[-1]))
        for width in (390, 720, 721, WIDTH):
            opened(browser, pages[name], theme)
            sized(browser, width, HEIGHT)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            assert browser.execute_script("return document.querySelector('.top').offsetHeight") <= HEIGHT / 8
    light, dark = (shot.read_bytes() for shot in shots)
    assert min(len(light), len(dark)) > 20_000 and light != dark


@pytest.mark.slow
def test_a_header_sorts_numbers_by_value_and_text_from_a_to_z(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["report"])
    heads = {head.text: head for head in browser.find_elements("css selector", "#table thead th")}
    at = list(heads).index("in casts") + 1

    def column() -> list[float]:
        cells = browser.find_elements("css selector", f"#table tbody td:nth-child({at})")
        return [float(cell.get_attribute("data-v")) for cell in cells]

    button = heads["in casts"].find_element("tag name", "button")
    button.click()
    assert column() == sorted(column(), reverse=True)
    assert column()[0] == 0.05 and 2e-6 in column()  # 50 ms before 2 µs
    button.send_keys("\ue007")  # Enter
    assert column() == sorted(column()) and heads["in casts"].get_attribute("aria-sort") == "ascending"
    heads["op"].find_element("tag name", "button").click()
    ops = [cell.text for cell in browser.find_elements("css selector", "#table tbody th")]
    assert ops == sorted(ops) and f"op{page_kit.NASTY}" in ops


@pytest.mark.slow
def test_the_filter_shows_the_rows_that_hold_every_word(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["report"])

    def shown(words: str) -> list[str]:
        field.clear()
        field.send_keys(words)
        return sorted(
            row.find_element("tag name", "th").text for row in browser.find_elements("css selector", "#table tbody tr:not([hidden])")
        )

    field = browser.find_element("id", "filter")
    assert len(shown(" ")) == len(page_kit.ROWS) + 1
    assert shown("Layer.0 FP32") == ["add", "layer_norm", "linear", "relu", "tanh"]
    assert browser.find_element("id", "shown").text.startswith("5 of ")
    assert shown("model.py:17") == ["max_pool2d"]
    next(option for option in browser.find_elements("css selector", "#rule option") if option.text == "fp32").click()
    assert shown(" ") == ["cross_entropy", "tanh"]
