"""The web page, in Chromium: what a person with a keyboard, a narrow screen or a dark room sees, and what hostile text cannot do."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

import hardpoint.server.page
from hardpoint.server.ray_app import front_app
from hardpoint.server.run import ServerSettings
from tests.server.conftest import KEY, NO_TLS, TOKEN, Running
from tests.server.test_robust import LONG, running, until

CHROMIUM = shutil.which("chromium")
# Chromium looks for hosts of its maker when it starts, unless it is told not to; its sandbox does not run as root.
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
FILES = Path(hardpoint.server.page.__file__).parent

# The machine may be busy with other tests.
expect.set_options(timeout=30_000)

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; `make chromium` installs it")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return what opens an address in a context of its own; at the end no page has met an error or a host other than its own."""
    problems: list[str] = []
    with ExitStack() as stack:

        def open_it(url: str, key: str | None = None, route: dict[str, Any] | None = None, **context: Any) -> Page:
            made: BrowserContext = stack.enter_context(browser.new_context(**context))
            page = made.new_page()
            page.set_default_timeout(20_000)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda sent: sent.url.startswith((url, "data:")) or problems.append(sent.url))
            page.on("console", lambda said: "Security Policy" in said.text and problems.append(said.text))
            for path, answer in (route or {}).items():
                page.route(f"{url}{path}", answer)
            page.goto(f"{url}/")
            if key is not None:
                give_key(page, key)
            return page

        yield open_it
    assert problems == []


def give_key(page: Page, key: str) -> None:
    expect(page.locator("#key-dialog")).to_be_visible()
    page.keyboard.type(key)
    page.keyboard.press("Enter")


def send(page: Page, text: str, most: int) -> None:
    page.locator("#max-tokens").evaluate("(input, value) => { input.value = value; }", str(most))
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def button(page: Page, text: str) -> Any:
    return page.get_by_role("button", name=text).first


def test_the_page_is_open_and_lets_nothing_else_in(server: Running) -> None:
    control = server.server.control_url
    assert control is not None
    for url, interface in ((server.server.url, "users"), (control, "operators")):
        for path in ("/", "/page.css", "/page.js"):
            answer = httpx.get(url + path, verify=NO_TLS)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"(?<!xmlns=')https?://", answer.text)
        assert f'data-interface="{interface}"' in httpx.get(f"{url}/", verify=NO_TLS).text
        assert httpx.get(f"{url}/metrics", verify=NO_TLS).status_code == 401
    assert server.users.get("/openapi.json").text.count("page.js") == 0


def test_the_front_of_replicas_has_the_page_itself() -> None:
    """A page that is opened starts no replica."""

    async def forward(*_: Any) -> None:
        raise AssertionError("a replica was asked")

    transport = httpx.ASGITransport(front_app(forward, ServerSettings(api_keys=[KEY])))

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return [(await client.get(path)).status_code for path in ("/", "/page.css", "/page.js", "/metrics")]

    assert asyncio.run(statuses()) == [200, 200, 200, 401]


class _Markup(HTMLParser):
    """Finds what the page's policy forbids, and fields without a label."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: list[str] = []
        self.fields: set[str | None] = set()
        self.labels: set[str | None] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in given):
            self.forbidden.append(tag)
        self.forbidden += [name for name in given if name == "style" or name.startswith("on")]
        if tag in ("input", "select", "textarea"):
            self.fields.add(given["id"])
        if tag == "label":
            self.labels.add(given["for"])


def test_markup_has_no_code_and_every_field_a_label() -> None:
    markup = _Markup()
    markup.feed((FILES / "page.html").read_text("utf-8"))
    assert markup.forbidden == []
    assert markup.fields == markup.labels != set()


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast(scheme: int) -> None:
    """At least 4.5 to 1, as WCAG 2.1 (1.4.3) asks for."""
    style = (FILES / "page.css").read_text("utf-8")
    colours = [
        dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]

    def luminance(name: str) -> float:
        digits = colours[scheme][name][1:]
        digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    pairs = [(text, ground) for text in ("text", "quiet") for ground in ("ground", "surface")]
    pairs += [("text", "wash"), ("accent", "wash"), ("on-accent", "accent"), ("bad", "bad-wash"), ("quiet", "track")]
    for text, ground in pairs:
        light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


@in_browser
def test_a_chat_by_keyboard(server: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(server.server.url, "a wrong key")
    expect(page.locator("#key-text")).to_contain_text("does not accept this API key")
    give_key(page, KEY)
    expect(page.locator("#connection")).to_have_text("Connected")
    expect(page.locator("#model")).to_have_value("demo")
    page.locator("#settings-button").press("Enter")
    page.locator("#system").fill("Answer with one word.")
    page.locator("#temperature").fill("0")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "What is the capital of France?", 12)
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Answer with one word."}
    assert (body["temperature"], body["max_tokens"]) == (0, 12)
    expect(page.locator(".facts")).to_have_text(
        re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first token after [\d.]+ m?s")
    )
    whole = server.openai.chat.completions.create(model="demo", messages=body["messages"], temperature=0, max_tokens=12)
    expect(page.locator(".message.assistant .text")).to_have_text(str(whole.choices[0].message.content))
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    # The conversation goes on, and the key is that of the tab.
    page.locator("#prompt").press("Shift+Enter")
    assert page.locator("#prompt").input_value() == "\n"
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "And of Spain?", 2)
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    expect(page.locator(".facts")).to_have_count(2)
    expect(page.locator("#first-token")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    page.reload()
    expect(page.locator("#connection")).to_have_text("Connected")
    expect(page.locator("#key-dialog")).to_be_hidden()
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


@in_browser
def test_escape_stops_an_answer(slow_server: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(slow_server.server.url, KEY)
    expect(page.locator("#model")).to_have_value("demo")
    send(page, "Count.", 900)
    until(lambda: running(slow_server) == 1)
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".facts")).to_contain_text("stopped")
    until(lambda: running(slow_server) == 0)
    expect(button(page, "Send")).to_be_visible()


HOSTILE = """<img src=x onerror='window.broken=1'><script>window.broken=1</script>
```html
</code></pre><b onclick=x>&lt;
```
[x](javascript:alert(1))"""


@in_browser
def test_hostile_text_stays_text(server: Running, open_page: Callable[..., Page]) -> None:
    def answer(route: Route) -> None:
        chunk = {
            "choices": [{"delta": {"content": HOSTILE, "reasoning_content": HOSTILE}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3},
        }
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def models(route: Route) -> None:
        card = {"id": "<i id=bad>", "state": "<u id=bad>", "failure": "<s id=bad>"}
        route.fulfill(json={"data": [card]})

    def metrics(route: Route) -> None:
        labels = 'model_name="<i id=bad>",tag="<b id=bad>\\"}",place="device"'
        route.fulfill(body=f"hardpoint:memory_bytes{{{labels}}} 5e6\n")

    page = open_page(
        server.server.url, route={"/v1/chat/completions": answer, "/v1/models": models, "/metrics": metrics}
    )
    expect(page.locator(".card h3")).to_have_text("<i id=bad>")
    expect(page.locator(".tags")).to_contain_text('<b id=bad>"}')
    expect(page.locator(".card .state")).to_have_text("<u id=bad>")
    send(page, "<img src=y onerror='window.broken=1'>", 5)
    expect(page.locator(".facts")).to_be_visible()
    texts = page.locator(".message.assistant :is(.text, code)").all_text_contents()
    assert texts == [
        "<img src=x onerror='window.broken=1'><script>window.broken=1</script>",
        "</code></pre><b onclick=x>&lt;",
        "[x](javascript:alert(1))",
    ]
    assert page.locator(".message.assistant details p").text_content() == HOSTILE
    # It is folded away once the answer has begun.
    expect(page.locator(".message.assistant details p")).to_be_hidden()
    assert page.locator("#bad, main img, main script, main a, main b").count() == 0
    assert page.evaluate("window.broken") is None


@in_browser
def test_operators_put_a_model_to_sleep_and_wake_it(server: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(str(server.server.control_url), TOKEN)
    state, tags = page.locator(".card .state"), page.locator(".card .tags")
    expect(page.locator("#chat")).to_be_hidden()
    expect(state).to_have_text("running")
    expect(tags).to_contain_text(re.compile(r"weights\d+ MB on device"))
    button(page, "Sleep: demo").press("Enter")
    expect(state).to_have_text("sleeping")
    expect(tags).to_contain_text(re.compile(r"weights\d+ MB on (host|disk)|weights\d+ MB to read again"))
    expect(tags).to_contain_text(re.compile(r"kv cache\d+ MB given back"))
    assert tags.locator(".device").count() == 0
    assert server.model().reason == "an operator asked for it"
    # What was focused is gone, and what undoes it has the focus.
    expect(button(page, "Wake")).to_be_focused()
    page.keyboard.press("Enter")
    expect(state).to_have_text("running")
    button(page, "Sleep and discard").click()
    expect(tags).to_contain_text(re.compile(r"weights\d+ MB given back"))
    button(page, "Wake").click()
    expect(state).to_have_text("weights missing")
    button(page, "Reload weights").click()
    expect(state).to_have_text("running")


@in_browser
def test_a_sleep_that_waits_for_requests_can_be_given_up(server: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(str(server.server.control_url), TOKEN)
    state = page.locator(".card .state")
    # Longer than the clicks take; its end is not waited for.
    with server.openai.completions.create(**LONG | {"max_tokens": 1000}, stream=True) as stream:
        next(iter(stream))
        button(page, "Sleep: demo").click()
        expect(state).to_have_text("draining")
        expect(page.locator(".card progress")).to_be_visible()
        button(page, "Cancel").click()
        expect(state).to_have_text("running")
    until(lambda: running(server) == 0)


@in_browser
def test_operators_are_told_why_a_sleep_failed(slow_server: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(str(slow_server.server.control_url), TOKEN)
    button(page, "Sleep: demo").click()
    expect(page.locator(".card .error")).to_contain_text("cannot sleep at level 1")
    expect(button(page, "Sleep: demo")).to_be_focused()


@in_browser
def test_refusals_are_told_and_can_be_tried_again(server: Running, open_page: Callable[..., Page]) -> None:
    page = open_page(server.server.url, KEY)
    expect(page.locator("#model")).to_have_value("demo")
    server.operators.post("/models/demo/sleep", json={"level": 1})
    send(page, "Hello", 3)
    expect(page.locator(".message .error")).to_contain_text("asleep")
    button(page, "Wake the model and send again").click()
    expect(page.locator(".facts")).to_be_visible()
    expect(page.locator(".message .error")).to_have_count(0)
    page.context.set_offline(True)
    send(page, "Hello again", 3)
    expect(page.locator(".message .error")).to_have_text("The server does not answer.")
    expect(page.locator("#connection")).to_have_text("The server does not answer")
    page.context.set_offline(False)
    button(page, "Send again").click()
    expect(page.locator(".facts")).to_have_count(2)
    expect(page.locator("#connection")).to_have_text("Connected")


@in_browser
def test_a_server_without_metrics_has_a_chat(server: Running, open_page: Callable[..., Page]) -> None:
    """As the front of replicas, whose metrics are not gathered."""

    def missing(route: Route) -> None:
        route.fulfill(status=404, json={"error": {"message": "not here", "code": "unknown_path"}})

    page = open_page(server.server.url, KEY, route={"/metrics": missing})
    expect(page.locator("#connection")).to_have_text("Connected")
    expect(page.locator("#activity-section")).to_be_hidden()
    expect(page.locator(".card .state")).to_have_text("running")
    send(page, "Hello", 3)
    expect(page.locator(".facts")).to_be_visible()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens(server: Running, open_page: Callable[..., Page], scheme: str) -> None:
    narrow = {"viewport": {"width": 360, "height": 640}, "color_scheme": scheme}
    users = open_page(server.server.url, KEY, **narrow)
    operators = open_page(str(server.server.control_url), TOKEN, **narrow)
    expect(users.locator("#chat")).to_be_visible()
    expect(users.locator("#side")).to_be_hidden()
    users.evaluate("newMessage('assistant', 'x'.repeat(500) + '\\n```\\n' + 'y'.repeat(500) + '\\n```')")
    users.locator("#settings-button").click()
    for page, view in ((users, "#chat"), (users, "#side"), (operators, "#side")):
        if page is users and view == "#side":
            page.locator("#show-models").click()
        expect(page.locator(view)).to_be_visible()
        expect(page.locator(".card")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        inside = page.locator(f"{view} :is(button, input, select, textarea):visible").evaluate_all(
            "found => found.every((one) => one.getBoundingClientRect().right <= 360 && one.getBoundingClientRect().left >= 0)"
        )
        assert inside, view
    ground = users.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 382) == (scheme == "light")
