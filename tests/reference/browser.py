"""`python browser.py tokens|report PAGE PICTURES [AXE]`, with playwright and chromium: works through a page.

That of tokens is the file of `tests/research/test_page.py`: two runs of the same prompts. Prints figures as JSON.
"""

import json
import pathlib
import shutil
import sys
import time

from playwright.sync_api import sync_playwright

kind, page_file, pictures = sys.argv[1:4]
axe = [pathlib.Path(path).read_text() for path in sys.argv[4:]]
figures = {}


def opened(browser, link="", width=1440, scheme="light"):
    """A new page, and the errors that it reports."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: errors.append("a dialog"))
    start = time.perf_counter()
    page.goto(f"file://{page_file}{link}")
    page.wait_for_selector({"tokens": ".t", "report": "h1"}[kind])
    figures.setdefault("first paint, s", round(time.perf_counter() - start, 2))
    return page, errors


def controls(page):
    """Every control, one after the other; what it does is seen in the page."""
    count = lambda of: page.locator(of).count()
    said = lambda of: page.locator(of).inner_text()
    link = lambda: page.evaluate("location.hash")  # `page.url` learns of it later
    responses = count(".response")
    assert responses > 1
    steps = page.locator("#step option").all_inner_texts()
    page.select_option("#step", steps[-1])
    assert f"step={steps[-1]}" in link()
    colours = {}
    for by in page.locator("#by option").evaluate_all("all => all.map(x => x.value)"):
        page.select_option("#by", by)
        colours[by] = page.locator(".t").evaluate_all(
            "all => all.map(x => x.style.backgroundColor)"
        )
        assert said("#meaning")
    assert len({json.dumps(x) for x in colours.values()}) > 3
    assert len({*colours["turn"]}) > 2  # turns, and what was given
    starts, given = page.locator("[data-turn='2']"), page.locator(".t.given")
    assert starts.count() == responses
    style = "(x, [of, name]) => getComputedStyle(x, of)[name]"
    assert "turn" in starts.first.evaluate(style, ["::before", "content"])
    assert given.first.evaluate(style, [None, "fontStyle"]) == "italic"
    assert "in 2 turns" in page.locator(".response h3").all_text_contents()[-1]
    given.first.hover()
    assert "given by the environment" in said("#token")
    page.select_option("#by", "p")
    page.fill("#to", "0.5")
    assert 0 < count(".t.out") < count(".t")
    page.click("#clear")
    assert count(".t.out") == 0
    box = page.locator("#histogram").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.up()
    assert "to=" in link()
    assert count(".t.out") > 0
    page.mouse.click(box["x"] + 5, box["y"] + 20)
    assert count(".t.out") == 0
    page.mouse.move(box["x"] + 5, box["y"] - 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 50, box["y"] + 20)
    page.mouse.up()  # of what began elsewhere, as the choice of a text
    assert count(".t.out") == 0
    for value in ("right", "wrong"):
        page.select_option("#right", value)
        assert count(".response") < responses
    page.click("#clear")
    page.fill("#least", "3")
    few = count(".response")
    page.click("#clear")
    page.fill("#text", "no such text at all")
    assert count(".response") == 0
    page.click("#clear")
    assert few < count(".response") == responses
    page.locator(".t").first.hover()
    assert "probability" in said("#token")
    page.locator(".tokens").first.focus()
    first = said("#token")
    page.keyboard.press("ArrowRight")
    assert said("#token") != first
    page.select_option("#run2", "1")
    assert count(".response") == 2 * responses
    page.keyboard.press("Tab")
    slider = page.locator("[data-curve]").first
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step").input_value() == steps[-2]
    return link()


def framed(page):
    """The page within another, as a notebook shows it: the same tokens, no error."""
    inner = page.context.new_page()
    inner.on("pageerror", lambda error: errors.append(str(error)))
    errors, text = [], pathlib.Path(page_file).read_text()
    inner.set_content("<iframe></iframe>")
    inner.evaluate("text => { document.querySelector('iframe').srcdoc = text; }", text)
    inner.frame_locator("iframe").locator(".t").first.wait_for()
    assert not errors, errors


def of(page):
    """What a page shows."""
    return page.locator("main").inner_text(), page.locator(".t").evaluate_all(
        "all => all.map(x => x.style.backgroundColor)"
    )


def work(browser):
    """All controls of the page of tokens; what they did is in its link."""
    page, errors = opened(browser)
    link = controls(page)
    again, more = opened(browser, link)
    assert of(again) == of(page)
    assert not errors + more, errors + more
    assert page.evaluate("window.acted") is None
    page.evaluate(
        "for (const r of found(state.run2, state.step2).responses) r.prompt = 'another'; draw()"
    )
    shown = page.locator(".response").count()  # none of those beside, which have no place
    assert page.locator("#count").inner_text().startswith(f"{shown} of ")
    framed(page)
    recolour = """() => { const box = document.getElementById("by"), start = performance.now();
        box.value = "entropy" in quantities ? "entropy" : "p"; box.dispatchEvent(new Event("change"));
        document.body.getBoundingClientRect(); return performance.now() - start; }"""
    figures["another colour, ms"] = round(page.evaluate(recolour))


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    if kind == "tokens":
        work(browser)
    else:
        opened(browser, scheme="dark")[0].pdf(path=f"{pictures}.pdf", format="A4")
    for scheme in ("light", "dark"):
        for width in (1440, 390):
            page, errors = opened(browser, width=width, scheme=scheme)
            page.screenshot(path=f"{pictures}-{scheme}-{width}.png", full_page=kind == "report")
            assert not errors, errors
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{wide} pixels in {width}"
            for script in axe:
                page.evaluate(script)
                found = page.evaluate("axe.run()")["violations"]
                serious = [x["id"] for x in found if x["impact"] in ("serious", "critical")]
                assert not serious, json.dumps(found, indent=1)[:3000]
    browser.close()
print(json.dumps(figures))
