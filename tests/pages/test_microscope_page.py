"""The microscope as people meet it: in a Chromium, by mouse and keyboard, on a phone and a screen, dark and light."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import chromium, microscope

pytestmark = pytest.mark.skipif(chromium.found() is None, reason=chromium.MISSING)

PAGE = (microscope.FOLDER / "index.html").as_uri()
WIDTHS = (390, 1280)
NAME = "({id, dataset, name, textContent}) => id || dataset.label || dataset.bit || name || textContent"
CONTROLS = "input, select, textarea, .scope button"
TABBED = "(one) => !one.disabled && one.checkVisibility() && (one.type !== 'radio' || one.checked)"
NAMED = {"textbox", "button", "slider", "combobox", "checkbox", "radio", "link", "image", "group"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    program = chromium.found()
    assert program is not None
    with chromium.page(program, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: chromium.Page) -> chromium.Page:
    browser.look(1280)
    browser.open(PAGE)
    browser.run("localStorage.clear()")
    browser.open(PAGE)
    browser.errors.clear()
    return browser


def until(page: chromium.Page, condition: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not page.run(condition):
        assert time.monotonic() < end, f"{condition} is false after {seconds} s"
        time.sleep(0.05)


def text(page: chromium.Page, selector: str) -> str:
    return page.run(f"document.querySelector({json.dumps(selector)}).textContent")


def type_number(page: chromium.Page, number: str) -> None:
    page.run(f'byId("x").value = {json.dumps(number)}; byId("x").dispatchEvent(new Event("input"))')


def focused(page: chromium.Page) -> str:
    """What has the focus: its id, or the name that it is given."""
    return page.run(f"({NAME})(document.activeElement)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_the_screen_and_asks_nobody(browser: chromium.Page, width: int, dark: bool) -> None:
    browser.errors.clear()
    browser.asked.clear()
    browser.look(width, dark=dark)
    browser.open(PAGE)
    until(browser, 'document.querySelector("#histogram svg") !== null')
    assert browser.errors == []
    assert browser.asked
    assert all(address.startswith((PAGE.rpartition("/")[0], "data:")) for address in browser.asked)
    assert browser.wider_by() == 0
    paper, ink = browser.run(
        "((style) => [style.backgroundColor, style.color])(getComputedStyle(document.querySelector('.card')))"
    )
    lightness = [sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) for colour in (paper, ink)]
    assert (lightness[0] < lightness[1]) == dark


def test_a_number_has_its_codes(page: chromium.Page) -> None:
    type_number(page, "17")
    assert "0x58 = 16" in text(page, ".card.e4m3")
    assert "half way" in text(page, ".card.e4m3")
    assert "16 is nearer" in text(page, ".card.e5m2")
    assert "0x84 = 32" in text(page, ".card.e8m0")
    assert "saturated" in text(page, ".card.e2m1")
    type_number(page, "seventeen")
    assert "no number" in text(page, "#x-note")
    assert page.run('byId("x").getAttribute("aria-invalid")') == "true"
    type_number(page, "2^-9")
    assert "0x01" in text(page, ".card.e4m3")


def test_a_bit_that_is_flipped_changes_the_number(page: chromium.Page) -> None:
    type_number(page, "1")
    page.run('document.querySelector("[data-bit=E4M37]").click()')
    assert page.run('byId("x").value') == "-1"
    assert focused(page) == "E4M37"
    page.run(
        "for (let bit = 0; bit < 7; bit++) { const one = document.querySelector(`[data-bit=E4M3${bit}]`);"
        'if (one.textContent === "0") one.click(); }'
    )
    assert "0xFF = NaN" in text(page, ".card.e4m3")  # a code that no cast makes
    assert "0x7F = NaN" in text(page, ".card.e5m2")


def test_the_scale_follows_slider_keys_mouse_and_button(page: chromium.Page) -> None:
    until(page, 'document.querySelector("#histogram svg") !== null')
    page.run('byId("log-scale").focus()')
    page.press("ArrowRight", 39)
    assert float(page.run('byId("log-scale").value')) == 0.25
    page.run('byId("histogram").scrollIntoView({behavior: "instant"})')
    box = page.run('(({x, y, width}) => [x, y, width])(byId("histogram").getBoundingClientRect())')
    page.drag((box[0] + box[2] / 2, box[1] + 60), (box[0] + box[2] * 0.9, box[1] + 60))
    assert float(page.run('byId("log-scale").value')) > 8
    assert "saturated" in text(page, ".figures .bad")
    box = page.run('(({x, y, width}) => [x, y, width])(byId("curve").getBoundingClientRect())')
    page.drag((box[0] + box[2] / 4, box[1] + 60), (box[0] + box[2] / 4, box[1] + 60))  # a click
    assert float(page.run('byId("log-scale").value')) == -10.5
    page.run('byId("amax").click()')
    assert page.run('[...document.querySelectorAll(".figures .bad dt")].every((e) => e.textContent !== "saturated")')
    page.run('byId("power").click()')
    scale = page.run('Number(document.querySelector(".figures dd").textContent)')
    assert math.log2(scale).is_integer()


def test_the_steps_end_at_the_word_of_an_h200(page: chromium.Page) -> None:
    page.run('document.querySelector("[name=stage]").focus()')
    for _ in range(4):
        page.press("ArrowRight", 39)
    assert page.run("document.querySelector('[name=stage]:checked').value") == "4"
    assert page.run('byId("next").disabled')
    for a in ("E4M3", "E5M2"):
        for b in ("E4M3", "E5M2"):
            page.run(f'byId("a-format").value = "{a}"; byId("b-format").value = "{b}"')
            page.run('byId("a-format").dispatchEvent(new Event("change"))')
            for case in page.run('[...byId("case").options].map((option) => option.value)'):
                page.run(f'byId("case").value = "{case}"; byId("case").dispatchEvent(new Event("change"))')
                for _ in range(3):
                    assert "the same 32 bits" in text(page, "#sum"), (a, b, case)
                    page.run('byId("another").click()')
    page.run("document.querySelector('[data-label=\"a 1\"]').select()")
    page.type("100")
    page.press("Tab", 9)
    assert "not asked" in text(page, "#sum")
    assert focused(page) == "b 1"
    assert page.run("document.querySelector('[data-label=\"a 1\"]').value") == "96"  # as E5M2 has it
    for fill in page.run('[...byId("fill").children].map((button) => (button.click(), byId("sum").textContent))'):
        assert "not asked" in fill
    page.run('byId("fill").children[1].click()')
    assert "65536" in text(page, "#sum")  # 2^16, and 31 ones that lie below its last bit
    assert "exact sum65567 (off by 31)" in text(page, "#sum")
    assert page.errors == []


def solve(page: chromium.Page, number: int, answer: str) -> str:
    page.run(
        f'byId("answer-{number}").value = {json.dumps(answer)};'
        f'document.querySelector("#puzzle-{number} .primary").click()'
    )
    until(page, f'/[a-z]/.test(document.querySelector("#puzzle-{number} output").textContent)')
    return text(page, f"#puzzle-{number} output")


def test_answers_are_graded_and_kept(page: chromium.Page) -> None:
    solutions = microscope.SOLUTIONS.read_text("utf-8")
    for number, name in enumerate(page.run("puzzleTexts.map(({name}) => name)"), start=1):
        wanted = name.split()[1]
        sentence = solve(page, number, f'{solutions}\nconst {wanted} = solutions["{name}"];')
        assert sentence.startswith(f"{name}: solved, all "), sentence
        assert text(page, "#progress").startswith(f"{number} of 7")
    assert "is not defined" in solve(page, 1, "function decode(code) { return kode; }")
    assert "SyntaxError" in solve(page, 2, "function encode(x) {")
    assert "there is no function quantise" in solve(page, 3, "function quantize(x, scale) {}")
    page.open(PAGE)
    assert text(page, "#progress").startswith("4 of 7")
    assert page.run('byId("answer-1").value') == "function decode(code) { return kode; }"
    assert page.errors == []


@pytest.mark.slow
def test_a_loop_without_an_end_is_ended(page: chromium.Page) -> None:
    assert "loop without an end" in solve(page, 1, "function decode(code) { for (;;); }")


def test_every_control_is_reached_by_keyboard_and_has_a_name(page: chromium.Page) -> None:
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]

    def part(node: dict[str, Any], key: str) -> Any:
        return node.get(key, {}).get("value")

    seen = [node for node in nodes if part(node, "role") in NAMED and not node.get("ignored")]
    assert {part(node, "role") for node in seen} >= NAMED - {"group"}
    for node in seen:
        if part(node, "role") != "group":
            assert part(node, "name"), node
    wanted = set(page.run(f"[...document.querySelectorAll('{CONTROLS}')].filter({TABBED}).map({NAME})"))
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(300):
        page.press("Tab", 9)
        reached.add(focused(page))
        if wanted <= reached:
            break
    assert wanted <= reached


def test_letters_stand_out_from_their_ground(browser: chromium.Page) -> None:
    """WCAG 2.2's contrast of 4.5 for the colours of text, on both grounds, dark and light."""
    contrast = """(() => {
      const light = (colour) => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const probe = document.querySelector(".scope").appendChild(document.createElement("span"));
      const read = (name) => (probe.style.color = `var(--${name})`, light(getComputedStyle(probe).color));
      const pairs = ["ink", "label", "link", "right", "alarm"].flatMap((letter) => ["paper", "card"].map((ground) => {
        const [a, b] = [read(letter), read(ground)].sort((x, y) => y - x);
        return [letter, ground, (a + 0.05) / (b + 0.05)];
      }));
      probe.remove();
      return pairs;
    })()"""
    for dark in (False, True):
        browser.look(1280, dark=dark)
        browser.open(PAGE)
        for letter, ground, ratio in browser.run(contrast):
            assert ratio >= 4.5, (letter, ground, dark)


def test_the_pictures_can_be_drawn(page: chromium.Page, tmp_path: Path) -> None:
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
