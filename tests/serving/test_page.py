"""The page in a real browser. Left out where there is no chromium or no playwright."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from http_server import Script, until

from octavo.serving.app import Access

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

SYSTEM = "You are a patient librarian who answers in one short sentence."


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api.expect.set_options(timeout=20_000)  # of a machine that other tests share
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def slow_server(make_server):
    """Answers with an endless text, a few letters at a time."""
    return make_server(model=Script("la " * 300, 0, delay=0.01), num_blocks=256)


@pytest.fixture
def page(browser, slow_server) -> Iterator[object]:
    yield from open_page(browser, slow_server)


def open_page(browser, server, **context) -> Iterator[object]:
    """The page; in the end it has said no error, asked nobody else, and left its server idle."""
    made = browser.new_page(viewport={"width": 1200, "height": 800}, **context)
    said: list[str] = []
    made.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: said.append(str(error)))
    made.on("request", lambda request: said.append(request.url) if "127.0.0.1" not in request.url else None)
    made.goto(server.url)
    yield made
    made.close()
    assert said == []
    until(server.is_idle)


def send(page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def comes(page, expression: str) -> None:
    """Wait for it; the page's own policy forbids the browser's way of waiting, which evaluates text."""
    for _ in range(200):
        if page.evaluate(f"() => {expression}"):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not come: {expression}")


def answer(page):
    return page.locator(".message.assistant").last


def test_the_stream_grows_and_stops(page, slow_server):
    sync_api.expect(page.locator("#model")).to_contain_text("tiny")
    send(page, "hello")
    sync_api.expect(answer(page)).to_contain_text("la la")
    before = len(answer(page).inner_text())
    comes(page, f"document.querySelector('.message.assistant').innerText.length > {before + 6}")
    page.keyboard.press("Escape")
    sync_api.expect(answer(page)).to_contain_text("stopped")
    until(slow_server.is_idle)
    assert slow_server.parts.engine.metrics.finished == {"abort": 1}
    sync_api.expect(page.locator("#send")).to_be_visible()


def test_two_chats_share_the_blocks_of_their_system_prompt(page, slow_server, tmp_path_factory):
    page.click("#settings summary")
    page.fill("#system", SYSTEM)
    send(page, "one")
    sync_api.expect(answer(page)).to_contain_text("la")
    page.keyboard.press("Alt+n")
    assert page.input_value("#system") == SYSTEM
    sync_api.expect(page.locator(".message")).to_have_count(0)
    send(page, "two")
    sync_api.expect(answer(page)).to_contain_text("la")
    comes(page, "Number(document.querySelector('#sheet').dataset.shared) > 3")
    sync_api.expect(page.locator("#n-running")).to_have_text("2")
    assert re.search(r"\d+ of them shared", page.inner_text("#sheet-text"))
    # The last block of the pool is free and looks like the legend says; the first is not and does not.
    colours = page.evaluate(
        """() => {
            const sheet = document.querySelector('#sheet');
            const pen = sheet.getContext('2d');
            const rgb = (x, y) => `rgb(${[...pen.getImageData(x, y, 1, 1).data].slice(0, 3).join(', ')})`;
            const free = getComputedStyle(document.querySelector('.swatch.free')).backgroundColor;
            return [free, rgb(6, sheet.height - 6), rgb(6, 6)];
        }"""
    )
    assert colours[0] == colours[1] != colours[2]
    page.screenshot(path=str(tmp_path_factory.mktemp("page") / "chats.png"))
    page.click("#stop")
    page.keyboard.press("Alt+1")
    sync_api.expect(page.locator(".message.user")).to_have_text("one")
    page.click("#stop")
    sync_api.expect(answer(page)).to_contain_text("stopped")


def test_what_a_mouse_points_at_stays_while_answers_grow(page):
    send(page, "one")
    sync_api.expect(answer(page)).to_contain_text("la")
    page.evaluate(
        """() => {
            window.kept = [...document.querySelectorAll('[role=tab], #new, .message, .message.user .text')];
            getSelection().selectAllChildren(document.querySelector('.message.user .text'));
        }"""
    )
    before = len(answer(page).inner_text())
    comes(page, f"document.querySelector('.message.assistant').innerText.length > {before + 6}")
    assert page.evaluate("window.kept.length == 5 && window.kept.every((element) => element.isConnected)")
    assert page.evaluate("getSelection().toString()") == "one"
    page.click("#new", timeout=5000)
    send(page, "two")
    sync_api.expect(answer(page)).to_contain_text("la")
    page.click("[role=tab] >> nth=0", timeout=5000)
    sync_api.expect(page.locator(".message.user")).to_have_text("one")
    page.click("#stop")
    page.click("[role=tab] >> nth=1")
    page.click("#stop")
    sync_api.expect(answer(page)).to_contain_text("stopped")


def test_an_error_is_shown_in_words(page):
    # Played by the test: the browser itself would report a real refusal as an error of the console.
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, body='data: {"error": {"message": "no such luck"}}\n\n'),
    )
    send(page, "hello")
    sync_api.expect(answer(page)).to_contain_text("no such luck")


def test_what_the_last_answer_read_is_drawn(page):
    """A layer that reads the first span alone, under one that reads all of four: two rows of the canvas."""
    usage = {
        "prompt_tokens": 60,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0},
        "attn_reads": [{"span": 16, "share": [[1, 0, 0, 0], [1, 1, 1, 1]]}],
        "attn_topk": {"kept_keys": 25, "visible_keys": 100, "mean_dropped_mass": 0.125},
    }
    said = {"object": "x", "choices": [{"delta": {"content": "a whale"}}]}
    chunks = [said, {"object": "x", "choices": [], "usage": usage}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    asked = []

    def play(route):
        asked.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", play)
    assert page.locator("#reads-figure").is_hidden()
    page.click("#settings summary")
    page.fill("#temperature", "0.5")
    page.fill("#top-k", "7")
    page.fill("#attn-topk", "64")
    page.fill("#system", SYSTEM)
    send(page, "hello")
    sync_api.expect(page.locator("#reads-text")).to_contain_text("25.0% of the keys")
    assert "0 of 4 spans of 16 by nobody" in page.inner_text("#reads-text")
    sent = {name: asked[0][name] for name in ("attn_explain", "attn_topk", "temperature", "top_k")}
    assert sent == {"attn_explain": True, "attn_topk": 64, "temperature": 0.5, "top_k": 7}
    assert [message["role"] for message in asked[0]["messages"]] == ["system", "user"]
    painted = page.evaluate(
        """() => {
            const canvas = document.querySelector('#reads');
            const pen = canvas.getContext('2d');
            const at = (x, y) => pen.getImageData(x * canvas.width, y * canvas.height, 1, 1).data[3];
            return [at(0.1, 0.2), at(0.9, 0.2), at(0.1, 0.7), at(0.9, 0.7)];
        }"""
    )
    assert painted == [255, 255, 255, 0]
    page.keyboard.press("Alt+n")
    assert page.locator("#reads-figure").is_hidden()
    page.keyboard.press("Alt+1")
    assert page.locator("#reads-figure").is_visible()
    page.fill("#attn-topk", "")
    send(page, "as served")
    comes(page, "document.querySelectorAll('.message.assistant').length == 2")
    assert "attn_topk" not in asked[1]


def test_what_a_real_answer_read_is_drawn(browser, topk_server):
    """As it comes from top-k attention itself; dense attention, asked for in a chat, has nothing."""
    opened = open_page(browser, topk_server)
    page = next(opened)
    page.click("#settings summary")
    page.fill("#max-tokens", "3")
    send(page, "a tale of whales " * 12)
    sync_api.expect(page.locator("#reads-text")).to_contain_text("2 layers upwards")
    assert re.search(r"Kept [1-9][\d.]*% of the keys", page.inner_text("#reads-text"))
    page.fill("#attn-topk", "0")
    send(page, "more")
    sync_api.expect(page.locator("#reads-figure")).to_be_hidden()
    sync_api.expect(answer(page)).to_contain_text("3 tokens")
    next(opened, None)


def test_with_an_api_key_the_browser_asks_for_it_as_a_password(browser, make_server):
    model = Script("la " * 40, 0)
    server = make_server(model=model, access=Access(api_keys=("secret",)), num_blocks=64)
    # Nobody is there to answer, so the browser gives up: it did ask.
    with browser.new_page() as stranger, pytest.raises(sync_api.Error, match="AUTH_CREDENTIALS"):
        stranger.goto(server.url)
    opened = open_page(browser, server, http_credentials={"username": "me", "password": "secret"})
    page = next(opened)
    sync_api.expect(page.locator("#model")).to_contain_text("tiny")
    sync_api.expect(page.locator("#sheet-text")).to_contain_text("64 blocks of 4 tokens")
    send(page, "hello")
    sync_api.expect(answer(page)).to_contain_text("prompt tokens cached")
    next(opened, None)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_phone_has_no_sideways_scrolling(browser, slow_server, scheme):
    phone = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    phone.goto(slow_server.url)
    sync_api.expect(phone.locator("#n-running")).to_have_text("0")
    assert phone.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    phone.close()
