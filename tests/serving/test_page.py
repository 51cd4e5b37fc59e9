"""The page at `/`, in Chromium: a conversation as a person would have it."""

from __future__ import annotations

import shutil

import pytest
from playwright import sync_api

from easytorch.generation.engine import Engine, SamplingParams
from easytorch.serving.app import create_app
from tests.serving.conftest import serving

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: scripts/install_chromium.sh")
KEY = "a secret"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--no-proxy-server"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(model, tokenizer):
    with serving(create_app("<b>small</b>", engine=Engine(model, tokenizer, max_memory=1 << 21), api_key=KEY)) as (
        url,
        _,
    ):
        yield url


@pytest.fixture
def page(browser, address):
    opened = browser.new_page()
    opened.set_default_timeout(120_000)
    complaints = []
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(address)
    opened.complaints = complaints
    yield opened
    opened.close()


def test_a_conversation(page, model, tokenizer):
    sync_api.expect(page.locator("#error")).to_contain_text("the API key is missing or wrong")
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    sync_api.expect(page.locator("#model")).to_have_text("<b>small</b>")  # text, not markup
    sync_api.expect(page.locator("#error")).to_have_text("")
    page.complaints.clear()  # the browser reports the answer 401
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "8")

    engine = Engine(model, tokenizer, max_memory=1 << 21)

    def expected(text: str) -> str:
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        *_, last = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=8))
        return last.outputs[0].text

    page.fill("#prompt", "the <i>class</i>")
    page.press("#prompt", "Enter")
    first = expected("user: the <i>class</i>\nassistant:")
    sync_api.expect(page.locator(".usage")).to_have_count(1)
    assert page.locator(".user").text_content() == "the <i>class</i>"
    assert page.locator(".assistant").text_content() == first
    page.fill("#prompt", "binds")
    page.click("#send")
    sync_api.expect(page.locator(".usage")).to_have_count(2)
    second = expected(f"user: the <i>class</i>\nassistant: {first}\nuser: binds\nassistant:")
    assert page.locator(".assistant").nth(1).text_content() == second
    page.click("#clear")
    assert page.locator(".message").count() == 0
    page.select_option("#mode", "completion")
    page.fill("#prompt", "the class")
    page.click("#send")
    sync_api.expect(page.locator(".usage")).to_have_count(1)
    assert page.locator(".assistant").text_content() == expected("the class")
    assert page.complaints == []


def test_a_refusal_is_shown_and_the_page_goes_on(page):
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    sync_api.expect(page.locator("#model")).to_have_text("<b>small</b>")
    page.fill("#max-tokens", "5000")
    page.fill("#prompt", "the class")
    page.press("#prompt", "Enter")
    sync_api.expect(page.locator("#error")).to_contain_text("max_tokens=5000 follow, which is more than the 128")
    assert page.locator(".assistant").count() == 0 and page.is_enabled("#send")


def test_nothing_comes_from_elsewhere(browser, address):
    opened = browser.new_page()
    asked = []
    opened.on("request", lambda request: asked.append(request.url))
    response = opened.goto(address)
    opened.wait_for_load_state("networkidle")
    assert asked and all(url.startswith(address) for url in asked)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    opened.close()
