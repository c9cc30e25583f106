# SPDX-License-Identifier: BSD-3-Clause
"""The report in a real browser: drawing, zooming, mouse, touch, keyboard and themes."""

import itertools
import math

import numpy as np
import pytest

from fastclip.report import write_report
from helpers.browser import browser
from helpers.failing_runs import classifier
from helpers.records import INF, NAN, clipped, healthy, seeded, watched

DRAWN = """
const part = view.parts[arguments[0]];
part.element.scrollIntoView({block: 'center'});
view.draw(part);
const canvas = part.element.querySelector('canvas');
const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
const pixels = new Uint32Array(image.data.buffer);
const counts = new Map();
for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
return [canvas.width, canvas.height, counts.size, pixels.length - Math.max(...counts.values())];
"""
RANGES = "return view.parts.filter(p => p.plot).map(p => [p.plot.scales.x.min, p.plot.scales.x.max])"
BOX = """
const box = document.querySelector(arguments[0] + ' .plot').getBoundingClientRect();
const {left} = view.gutters();
return [box.left + left, box.top, view.width(document.querySelector(arguments[0] + ' .plot')), box.height];
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write pages of a training that fails, of eight ranks with a spike and a gap, and of an empty run."""
    directory = tmp_path_factory.mktemp("pages")
    outcome = classifier(nan_at=40)
    write_report({0: list(outcome.monitor.records)}, directory / "failing.html", log=directory / "failing")
    ranks = {r: rank_records(r) for r in range(8)}
    write_report(ranks, directory / "ranks.html", log=directory / "ranks")
    write_report({0: []}, directory / "empty.html")
    return directory


def rank_records(rank, count=6000):
    rng = seeded(rank)
    loss = [2 * math.exp(-s / 2000) + 1 + 0.1 * rank + rng.gauss(0, 0.02) for s in range(count)]
    records = [
        clipped(s, 0.4 + 0.2 * rng.random(), loss=loss[s], lr=[1e-3], step_time=0.1, rank=rank)
        for s in range(count)
    ]
    if rank == 0:
        records[4321].total_norm, records[4400].total_norm, records[4401].total_norm = 77.0, NAN, INF
        records[4400].nan_count = 9
        for record in records[1000:1500]:
            record.loss = None
    return records


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def failing(window, pages):
    window.open(pages / "failing.html")
    return window


@pytest.fixture
def ranks(window, pages):
    window.open(pages / "ranks.html")
    return window


@pytest.fixture(autouse=True)
def no_complaints(window):
    """Check after each test that there was no error, no warning, and no request except for the file."""
    yield
    assert window.messages() == []
    assert [url for url in window.requests() if not url.startswith(("file://", "about:"))] == []


def test_page_draws_every_chart(window, pages):
    for name, count in (("failing", 12), ("ranks", 5)):
        window.open(pages / f"{name}.html")
        parts = window.run("return view.parts.length")
        assert parts >= count
        for part in range(parts):
            width, height, colours, drawn = window.run(DRAWN, part)
            assert width > 900 and height >= 40 and colours > 10 and drawn > 300, (name, part)
        assert len(window.requests()) == 1 or all("html" in url for url in window.requests())


def test_page_requests_nothing_and_is_prevented_from_it(failing):
    blocked = failing.driver.execute_async_script(
        "const done = arguments[0]; const found = [];"
        "document.addEventListener('securitypolicyviolation', (e) => found.push(e.effectiveDirective));"
        "const script = document.createElement('script'); script.textContent = 'window.ran = 1';"
        "document.body.append(script);"
        "const image = new Image(); image.src = 'https://example.invalid/a.png';"
        "fetch('https://example.invalid/')"
        ".catch(() => setTimeout(() => done([found.sort(), window.ran ?? null]), 50));"
    )
    assert blocked == [["connect-src", "img-src", "script-src-elem"], None]
    assert failing.messages(), "the browser reports what it has blocked"
    assert failing.requests() == [] or all(url.startswith("file:") for url in failing.requests())


def test_event_list_opens_a_diagnosis_on_click(failing):
    details = failing.driver.find_element("css selector", "details.event")
    assert not details.get_attribute("open")
    text = "return document.querySelector('details.event .diagnosis').innerText"
    details.find_element("css selector", "summary").click()
    assert details.get_attribute("open")
    assert "Where to look first" in failing.run(text) and "samples 1280" in failing.run(text)


def test_event_list_opens_a_diagnosis_by_keyboard(failing):
    from selenium.webdriver import ActionChains, Keys

    failing.run("document.getElementById('events').focus()")
    for _ in range(12):
        ActionChains(failing.driver).send_keys(Keys.TAB).perform()
        if failing.run("return document.activeElement.matches('details.event > summary')"):
            break
    ActionChains(failing.driver).send_keys(Keys.ENTER).perform()
    assert failing.run("return document.querySelectorAll('details.event[open]').length") == 1


@pytest.mark.parametrize("chart", ["timeline", "norm", "gradients"])
def test_mark_opens_its_event_on_click(failing, chart):
    failing.run(f"document.querySelector('#chart-{chart}').scrollIntoView({{block: 'center'}})")
    failing.settle()
    _, top, _, _ = failing.run(BOX, f"#chart-{chart}")
    x = failing.run(
        f"const e = document.querySelector('#chart-{chart} .plot');"
        "return e.getBoundingClientRect().left + view.toPixel(40, e)"
    )
    kinds = failing.run("return marks.kinds")
    y = top + (4 + 20 * (kinds.index("nonfinite") + 0.5) if chart == "timeline" else 8)
    failing.click(x + 2, y)
    opened = failing.run(
        "const e = document.querySelector('details.event[open]'); return [e.dataset.step, e.innerText]"
    )
    assert opened[0] == "40" and "nonfinite" in opened[1]
    assert failing.run("return document.activeElement.closest('details').open")


def test_chart_opens_the_event_at_the_cursor_on_enter(failing):
    from selenium.webdriver import ActionChains, Keys

    failing.run("document.querySelector('#chart-norm .plot').focus(); view.setCursor(38)")
    ActionChains(failing.driver).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER).perform()
    assert "cursor at 40" in failing.run("return document.getElementById('range').textContent")
    assert failing.run("return document.querySelector('details.event[open]').dataset.step") == "40"


def test_event_list_filters_by_kind(failing):
    shown = (
        "return [...document.querySelectorAll('.events > li')]"
        ".filter(e => !e.hidden).map(e => e.dataset.kind)"
    )
    assert failing.run(shown) == ["bad_batch", "nonfinite"]
    button = failing.driver.find_element("css selector", ".kinds button[data-kind=nonfinite]")
    button.click()
    assert failing.run(shown) == ["nonfinite"] and button.get_attribute("aria-pressed") == "true"
    failing.run("openEvent(marks.rows.find(row => marks.kinds[row[1]] === 'bad_batch'))")
    assert len(failing.run(shown)) == 2, "what is opened is not hidden"


def drag(page, chart, begin, end):
    left, top, width, height = page.run(BOX, f"#chart-{chart}")
    page.drag((left + begin * width, top + height / 2), (left + end * width, top + height / 2))


def test_charts_zoom_on_drag_and_reset_on_double_click(ranks):
    ranks.run("view.drawAll()")
    whole = ranks.run(RANGES)
    assert len(whole) >= 5 and whole.count(whole[0]) == len(whole)
    drag(ranks, "loss", 0.25, 0.5)
    ranks.run("view.drawAll()")
    zoomed = ranks.run(RANGES)
    assert zoomed.count(zoomed[0]) == len(whole)
    assert zoomed[0] == pytest.approx([1500, 3000], abs=40)
    assert ranks.run("return document.getElementById('range').textContent").startswith("steps 1,4")
    left, top, width, height = ranks.run(BOX, "#chart-loss")
    ranks.click(left + width / 2, top + height / 2, count=2)
    ranks.run("view.drawAll()")
    assert ranks.run(RANGES) == whole


def test_charts_zoom_move_and_reset_by_buttons_and_keys(ranks):
    from selenium.webdriver import ActionChains, Keys

    whole = ranks.run(RANGES)[0]

    def press(name):
        ranks.driver.find_element("css selector", f"[data-do={name}]").click()
        ranks.settle()
        return ranks.run(RANGES)[0]

    half = press("in")
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    assert press("on")[1] == pytest.approx(whole[1]) and press("back")[0] < half[1]
    assert press("out") == pytest.approx(whole) and press("in") != whole and press("all") == whole
    ranks.run("document.querySelector('#chart-loss .plot').focus(); view.setCursor(3000)")
    ActionChains(ranks.driver).send_keys("+", "+").key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(
        Keys.SHIFT
    ).perform()
    ranks.settle()
    low, high = ranks.run(RANGES)[0]
    assert high - low == pytest.approx((whole[1] - whole[0]) / 4) and low > 2300
    ActionChains(ranks.driver).send_keys("0").perform()
    ranks.settle()
    assert ranks.run(RANGES)[0] == whole


def test_charts_zoom_by_touch_and_still_scroll(window, pages):
    window.open(pages / "ranks.html", 390, 844, touch=True)
    window.run("document.querySelector('#chart-loss').scrollIntoView({block: 'center'})")
    window.settle()
    left, top, width, height = window.run(BOX, "#chart-loss")
    y = top + height / 2
    window.touch((left + 0.2 * width, y), (left + 0.4 * width, y), (left + 0.7 * width, y))
    low, high = window.run("return [view.from, view.to]")
    assert low == pytest.approx(1200, abs=150) and high == pytest.approx(4200, abs=150)
    assert window.run("return getComputedStyle(document.querySelector('.plot')).touchAction") == "pan-y"


def test_chart_draws_every_spike_of_thousands_of_steps(ranks):
    shown = (
        "const part = view.parts.find(p => p.spec && p.spec.key === 'norm');"
        "view.set(arguments[0], arguments[1]);"
        "view.draw(part); const y = part.plot.data[1].filter(Number.isFinite);"
        "return [part.plot.data[0].length, Math.max(...y), part.marks[0].map(m => [m[0], m[1]])]"
    )
    count, highest, odd = ranks.run(shown, 0, 6000)
    assert count < 5000 and highest == 77 and odd == [[4400, "nan"], [4401, "inf"]]
    count, highest, _ = ranks.run(shown, 4310, 4330)
    assert count < 30 and highest == 77
    assert ranks.run(shown, 0, 1000)[1] < 0.7


def test_chart_draws_the_extremes_of_each_pixel_column(ranks):
    """Against numpy: random series with gaps and values that are not finite, on few and many pixels."""
    rng = np.random.default_rng(0)
    for count, columns, is_log in itertools.product((50, 3000), (40, 300), (False, True)):
        at = np.sort(rng.choice(count, int(0.8 * count), replace=False))
        values = rng.normal(size=len(at)) * 10.0
        odd = rng.choice(len(at), 6, replace=False)
        values[odd] = [NAN, NAN, INF, INF, -INF, -INF]
        spelled = [
            "NaN" if math.isnan(v) else "Infinity" if v == INF else "-Infinity" if v == -INF else v
            for v in values
        ]
        y, marks, x, size = ranks.run(
            "const [at, spelled, count, columns, isLog] = arguments;"
            "const steps = Float64Array.from({length: count}, (_, i) => i);"
            "const series = {at, values: spelled.map(Number), breaks: []};"
            "const slots = makeSlots(steps, -0.5, count - 0.5, columns);"
            "const {y, marks} = fillSlots(series, slots, steps, isLog);"
            "return [Array.from(y, (v) => v === undefined ? 'none' : v), marks, slots.x, slots.size]",
            at.tolist(),
            spelled,
            count,
            columns,
            is_log,
        )
        drawable = np.isfinite(values) & ((values > 0) | (not is_log))
        assert sorted(step for step, _ in marks) == sorted(at[~drawable].tolist())
        column_of = (
            at if size == 1 else np.minimum(columns - 1, np.floor(at / ((count - 1) / columns))).astype(int)
        )
        for column in range(len(x) // size):
            its = values[(column_of == column) & drawable]
            shown = [v for v in y[size * column : size * (column + 1)] if isinstance(v, (int, float))]
            if len(its) == 0:
                continue  # a mark, a gap, or a line that passes
            assert (shown[0], min(shown), max(shown), shown[-1]) == (its[0], its.min(), its.max(), its[-1])


def test_chart_interrupts_the_line_at_a_gap(ranks):
    line = ranks.run(
        "const part = view.parts.find(p => p.spec && p.spec.key === 'loss');"
        "view.set(900, 1600); view.draw(part);"
        "return [part.plot.data[0], part.plot.data[1].map(v => v === undefined ? 'none' : v)]"
    )
    values = dict(zip(*line, strict=True))
    assert all(values[step] is None for step in range(1000, 1500))
    assert all(isinstance(values[step], float) for step in (*range(950, 1000), *range(1500, 1590)))


def test_charts_share_the_cursor(ranks):
    left, top, width, height = ranks.run(BOX, "#chart-loss")
    ranks.mouse("mouseMoved", left + width / 2, top + height / 2, button="none")
    ranks.settle()
    hairs = ranks.run(
        "return [...view.seen].map(p => p.element.querySelector('.hair'))"
        ".map(h => [h.hidden, h.getBoundingClientRect().left])"
    )
    assert len(hairs) >= 2 and all(
        hair == [False, pytest.approx(left + width / 2, abs=1.5)] for hair in hairs
    )
    step = ranks.run("return view.cursor")
    assert step == pytest.approx(3000, abs=10)
    value = ranks.run("return document.querySelectorAll('#chart-loss .legend .value')[3].textContent")
    expected = rank_records(3)[round(step)].loss
    assert float(value) == pytest.approx(expected, abs=2e-3)


def test_legend_shows_and_hides_ranks(ranks):
    legend = ranks.driver.find_elements("css selector", "#chart-loss .legend button")
    names = [button.find_element("tag name", "span").text for button in legend]
    assert names == [f"rank {r}" for r in range(8)]
    shown = (
        "return view.parts.find(p => p.spec && p.spec.key === 'loss').plot.series.slice(1).map(s => s.show)"
    )
    legend[2].click()
    assert (
        ranks.run(shown) == [r != 2 for r in range(8)] and legend[2].get_attribute("aria-pressed") == "false"
    )
    legend[2].click()
    assert all(ranks.run(shown))
    strokes = ranks.run(
        "return [...document.querySelectorAll('#chart-loss .legend line')].map(l => l.getAttribute('stroke'))"
    )
    assert len(set(strokes)) == 8


def test_chart_axis_switches_between_linear_and_logarithmic(ranks):
    button = ranks.driver.find_element("css selector", "#chart-loss button.scale")
    distr = "return view.parts.find(p => p.spec && p.spec.key === 'loss').plot.scales.y.distr"
    assert ranks.run(distr) == 1 and button.get_attribute("aria-pressed") == "false"
    button.click()
    assert ranks.run(distr) == 3 and button.get_attribute("aria-pressed") == "true"


def test_page_fits_the_width_of_a_phone(window, pages):
    for name in ("failing", "ranks", "empty"):
        window.open(pages / f"{name}.html", 390, 844, touch=True)
        window.run(
            "document.querySelectorAll('details').forEach((d) => { d.open = true; }); view?.drawAll()"
            if name != "empty"
            else ""
        )
        assert window.run("return document.documentElement.scrollWidth") == 390, name


def test_charts_follow_the_width_of_the_window(ranks):
    metrics = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    ranks.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    ranks.settle()
    ranks.settle()
    assert (
        ranks.run("return document.querySelector('#chart-loss canvas').getBoundingClientRect().right") < 700
    )
    assert ranks.run("return document.documentElement.scrollWidth") == 700


COLOURS = """
const of = (e, name) => getComputedStyle(e)[name];
const loss = view.parts.find(p => p.spec && p.spec.key === 'loss');
return [of(document.body, 'backgroundColor'), of(document.body, 'color'), loss.styles[0].colour()];
"""


def test_theme_follows_the_system_and_the_button(window, pages):
    window.open(pages / "failing.html", dark=True)
    dark = window.run(COLOURS)
    window.prefer(dark=False)
    window.settle()
    light = window.run(COLOURS)
    assert all(a != b for a, b in zip(dark, light, strict=True))
    button = window.driver.find_element("id", "theme")
    assert button.text == "Dark"
    button.click()
    assert window.run(COLOURS) == dark and button.text == "Light"
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run(COLOURS) == light, "paper is white"
    window.run("dispatchEvent(new Event('afterprint'))")
    assert window.run(COLOURS) == dark


CONTRAST = """
const parse = (text) => {
  const numbers = text.match(/[\\d.]+/g).map(Number);
  return numbers.length < 4 ? [...numbers, 1] : numbers;
};
const linear = (c) => c <= 10.3 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const back = (e) => {
  for (; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour[3] === 1) return colour;
  }
  return [255, 255, 255, 1];
};
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
document.querySelectorAll('details').forEach((d) => { d.open = true; });
const found = [];
for (const e of document.body.querySelectorAll('*')) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length || e.closest('script, style, noscript')) continue;
  const text = light(parse(getComputedStyle(e).color));
  found.push([ratio(text, light(back(e))), e.tagName + '.' + e.className, e.textContent.slice(0, 30)]);
}
const card = light(back(document.querySelector('.chart')));
const box = document.body.appendChild(document.createElement('i'));
for (const name of ['text', 'muted', 'error', 'warning', 'info', 'limit', ...Array(8).keys()]) {
  box.style.color = `var(--${typeof name === 'number' ? 'line-' + name : name})`;
  const least = name === 'text' || name === 'muted' ? 4.5 : 3;
  found.push([ratio(light(parse(getComputedStyle(box).color)), card) * 4.5 / least, 'canvas', name]);
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_theme_has_enough_contrast(window, pages, dark):
    window.open(pages / "failing.html", dark=dark)
    found = window.run(CONTRAST)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_heat_map_colours_grow_lighter(failing):
    ramp = failing.run(
        "return Array.from({length: 101}, (_, i) => rampColour(i / 100).match(/\\d+/g).map(Number))"
    )
    linear = np.array(ramp) / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    assert (np.diff(linear @ [0.2126, 0.7152, 0.0722]) > 0).all()
    assert failing.run("return rampColour(NaN)") == "rgb(26 18 62)"


def test_axis_ticks_are_few_and_round(failing):
    ticks = failing.run(
        "return [linearTicks(0, 1999, 8), logTicks(0.2, 30, 6), logTicks(1e-8, 1e5, 6),"
        "logTicks(0.41, 0.46, 5), countTicks(3, 5), countTicks(5e5, 5)]"
    )
    assert ticks[0] == [0, 500, 1000, 1500] and ticks[1] == [0.2, 0.5, 1, 2, 5, 10, 20]
    assert ticks[2] == [1e-8, 1e-5, 1e-2, 10, 1e4] and ticks[3] == [0.42, 0.44, 0.46]
    assert ticks[4] == [0, 1, 2] and ticks[5][0] == 0 and len(ticks[5]) <= 5
    texts = failing.run("return [0.000012, 1234.567, 0.5, -2, 1e7, NaN, Infinity, 0].map(shownNumber)")
    assert texts == ["1.2e\u22125", "1,235", "0.5", "\u22122", "1e7", "NaN", "Inf", "0"]


def test_page_of_a_run_without_steps_has_no_errors(window, pages):
    window.open(pages / "empty.html")
    assert "No step has been logged yet." in window.run("return document.body.innerText")


def test_page_draws_a_single_step_with_hostile_names(window, tmp_path):
    evil = (
        "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    )
    record = healthy(
        seeded(), 0, worst=[{"name": evil, "norm": NAN}], update_ratio={evil: 0.0}, losses={evil: 1.0}
    )
    write_report({0: watched([record])}, tmp_path / "one.html", log=tmp_path / "one")
    window.open(tmp_path / "one.html")
    window.run("view.drawAll(); view.zoom(0.1); view.drawAll(); view.pan(1)")
    assert window.run("return document.title") == "one: training report"
    assert evil in window.run("return view.parts.find(p => p.spec && p.spec.key === 'gradients').names")
    assert evil in window.run("return document.querySelector('#chart-losses .legend').textContent")
