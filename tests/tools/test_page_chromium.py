"""The pages in a real browser: all of them is on screen and legible, at three widths, in light and in dark, and works as it looks."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hmp
import page_kit
import tune_result_kit

OPTIONS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --window-size=1280,800""".split()
NAMES = ["report", "recorded", "comparison", "captures", "tuning"]
PAPER = {"light": (255, 255, 255), "dark": (20, 23, 28)}

# What a reader misses: an element that ends outside the window, that hides a part of what is in it, or text that is on another element's.
CUT_OFF = """
const shown = [...document.querySelectorAll('body *')].filter(each => each.checkVisibility() && each.getBoundingClientRect().width);
const name = each => `${each.tagName}.${each.className}: ${each.textContent.trim().slice(0, 40)}`;
const outside = shown.filter(each => { const box = each.getBoundingClientRect(); return box.left < -1 || box.right > innerWidth + 1; });
const inline = each => getComputedStyle(each).display === 'inline';
const hiding = shown.filter(each => !inline(each) && !['INPUT', 'SELECT', 'OPTION'].includes(each.tagName)
  && each.scrollWidth > each.clientWidth + 1);
return [...outside, ...hiding].map(name);
"""
# The texts whose contrast with what is behind them is below the 4.5 that WCAG asks for.
PALE = r"""
const numbers = colour => colour.match(/[\d.]+/g).map(Number);
const linear = c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
const light = colour => {
  const [r, g, b] = numbers(colour).map(c => linear(c / 255));
  return .2126 * r + .7152 * g + .0722 * b + .05;
};
const behind = each => {
  while (each && numbers(getComputedStyle(each).backgroundColor)[3] === 0) each = each.parentElement;
  return each ? getComputedStyle(each).backgroundColor : 'rgb(255, 255, 255)';
};
const own = each => [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
const ratio = each => {
  const [ink, paper] = [light(getComputedStyle(each).color), light(behind(each))];
  return Math.max(ink, paper) / Math.min(ink, paper);
};
const texts = [...document.querySelectorAll('body *')].filter(each => each.checkVisibility() && own(each));
const pale = texts.filter(each => ratio(each) < 4.5);
return [texts.length, pale.map(each => `${each.className} ${each.textContent.trim().slice(0, 30)} ${ratio(each)}`)];
"""


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
    results = {
        "report": page_kit.report((*page_kit.ROWS, nasty)),
        "recorded": recorded(),
        "comparison": page_kit.comparison(),
        "captures": page_kit.captures(),
        "tuning": tune_result_kit.crowded(),
    }
    return {name: result.to_html(folder / f"{name}.html") for name, result in results.items()}


def recorded() -> hmp.types.Report:
    """What a step of a small transformer makes, with long names of modules and an entry that no call matches."""
    model = torch.nn.Module()
    model.a_module_with_quite_a_long_name = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model.forward = lambda x: model.a_module_with_quite_a_long_name(x)
    policy = hmp.Policy.load("autocast").move("gelu", "fp32").move("layer_norm", "bf16")
    with hmp.casts(policy), hmp.record() as report:
        model(torch.randn(2, 4, 16)).float().sum().backward()
        with hmp.disable_casts():
            torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    return report


def opened(browser: Any, page: Path, theme: str = "light", width: int = 1400) -> Any:
    """The browser at the page, with nothing kept of the test before."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    browser.get(page.as_uri())
    browser.execute_script("try { localStorage.clear() } catch {}")
    browser.get_log("browser")
    browser.get(page.as_uri())
    return browser


def _is_exponent(text: str) -> bool:
    return text.lstrip("\u2212").isdecimal()


def background(browser: Any) -> str:
    return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))


@pytest.mark.slow
@pytest.mark.parametrize("theme", PAPER)
@pytest.mark.parametrize("name", NAMES)
def test_all_of_a_page_is_on_screen_and_legible(browser: Any, pages: dict[str, Path], name: str, theme: str) -> None:
    for width in (1400, 1000, 390):
        opened(browser, pages[name], theme, width=width)
        assert browser.get_log("browser") == []
        assert browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)") == []
        assert background(browser) == f"rgb{PAPER[theme]}"
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        browser.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert browser.execute_script(CUT_OFF) == [], width
        texts, pale = browser.execute_script(PALE)
        assert texts > 20 and pale == [], width


@pytest.mark.slow
@pytest.mark.parametrize("theme", PAPER)
@pytest.mark.parametrize("name", ["captures", "tuning"])
def test_a_chart_shrinks_with_the_window_and_its_text_is_inside_and_legible(
    browser: Any, pages: dict[str, Path], name: str, theme: str, tmp_path: Path
) -> None:
    opened(browser, pages[name], theme, width=390)
    charts = browser.execute_script("return [...document.querySelectorAll('img.chart')].map(each => [each.src, each.clientWidth])")
    assert charts
    for source, width in charts:
        assert 300 < width <= 390
        file = tmp_path / "chart.svg"
        file.write_bytes(base64.b64decode(source.partition(",")[2]))
        browser.get(file.as_uri())
        texts = browser.execute_script(
            "const all = document.documentElement.getBoundingClientRect(); return [...document.querySelectorAll('text')].map(each => {"
            "const box = each.getBoundingClientRect(), style = getComputedStyle(each);"
            "return [each.textContent, Math.min(box.left - all.left, box.top - all.top, all.right - box.right, all.bottom - box.bottom),"
            "parseFloat(style.fontSize), style.fill]; })"
        )
        scale = width / browser.execute_script("return document.documentElement.viewBox.baseVal.width")
        assert len(texts) > 5
        assert [text for text, room, _, _ in texts if room < -0.5] == []
        assert [text for text, _, size, _ in texts if size * scale < 9 and not _is_exponent(text)] == []
        assert {fill for *_, fill in texts} == {"rgb(89, 99, 110)" if theme == "light" else "rgb(160, 169, 180)"}  # of the page's soft text


@pytest.mark.slow
def test_a_rule_is_explained_where_it_stands_by_a_touch(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["report"], width=390)
    rules = browser.find_elements("css selector", "#ops details.rule")
    rule = next(each for each in rules if each.find_element("tag name", "summary").text == "first input (R7)")
    sentence = rule.find_element("tag name", "span")
    visible = "return arguments[0].checkVisibility() && arguments[0].getBoundingClientRect().height > 0"
    assert not browser.execute_script(visible, sentence)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", rule)
    rule.find_element("tag name", "summary").click()
    assert browser.execute_script(visible, sentence)
    assert "if torch refuses mixed dtypes, its inputs are cast to the dtype of the first" in sentence.text


@pytest.mark.slow
def test_the_button_turns_the_page_dark_and_it_stays_so(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["report"])
    browser.find_element("id", "theme").click()
    assert background(browser) == f"rgb{PAPER['dark']}"
    browser.refresh()
    assert background(browser) == f"rgb{PAPER['dark']}"


@pytest.mark.slow
def test_a_header_sorts_numbers_by_value_and_text_from_a_to_z(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["report"])
    heads = {head.text.rstrip(" \u2195"): head for head in browser.find_elements("css selector", "#table thead th")}
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
    ops = [cell.text.splitlines()[0] for cell in browser.find_elements("css selector", "#table tbody th")]
    assert ops == sorted(ops) and f"op{page_kit.NASTY}" in ops


@pytest.mark.slow
def test_the_filter_shows_the_rows_that_hold_every_word(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["report"])

    def shown(words: str) -> list[str]:
        field.clear()
        field.send_keys(words)
        return sorted(
            row.find_element("tag name", "th").text.splitlines()[0]
            for row in browser.find_elements("css selector", "#table tbody tr:not([hidden])")
        )

    field = browser.find_element("id", "filter")
    assert len(shown(" ")) == len(page_kit.ROWS) + 1
    assert shown("Layer.0 FP32") == ["add", "layer_norm", "linear", "relu", "tanh"]
    assert browser.find_element("id", "shown").text.startswith("5 of ")
    assert shown("model.py:17") == ["max_pool2d"]
    next(option for option in browser.find_elements("css selector", "#rule option") if option.text == "fp32").click()
    assert shown(" ") == ["cross_entropy", "tanh"]
