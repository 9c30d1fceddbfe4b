"""Checks the page of a master in a browser: on a phone, in dark mode, with a keyboard."""

import json
import os
import signal
import sys
import time

from playwright.sync_api import sync_playwright

PATIENCE = 10.0


def until(page, what):
    """Polls from outside: the content security policy of the page forbids evaluating strings in it."""
    start = time.monotonic()
    while not page.evaluate(what):
        if PATIENCE < time.monotonic() - start:
            sys.exit(f"never: {what}")
        time.sleep(0.02)


url, directory, victims = sys.argv[1], sys.argv[2], [int(it) for it in sys.argv[3:]]
complaints = []
elsewhere = []

with sync_playwright() as tools:
    browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.on("console", lambda it: complaints.append(it.text) if it.type in ("error", "warning") else None)
    page.on("pageerror", lambda it: complaints.append(str(it)))
    page.on("request", lambda it: elsewhere.append(it.url) if not it.url.startswith(url) else None)
    page.goto(url)
    until(page, "document.getElementById('connection').textContent === 'live'")
    page.wait_for_selector("#curves-body svg")
    page.screenshot(path=f"{directory}/page-light.png", full_page=True)
    scrolled = page.evaluate(
        "Array.from(document.querySelectorAll('.scroll')).filter(it => it.clientWidth < it.scrollWidth).map(it => it.id)"
    )
    drawn = page.locator("#picture-body .process title").all_text_contents()

    headings = page.locator("h2").all_inner_texts()
    page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.getAttribute('href')")
    first = page.locator("#job-body").inner_text()
    until(page, f"document.getElementById('job-body').innerText !== {json.dumps(first)}")

    page.set_viewport_size({"width": 390, "height": 800})
    too_wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.screenshot(path=f"{directory}/page-dark-phone.png", full_page=True)

    os.kill(victims[0], signal.SIGKILL)
    killed = time.monotonic()
    until(page, "document.getElementById('events-body').innerText.includes('lost its pserver')")
    seconds = time.monotonic() - killed

    until(page, "document.getElementById('events-body').innerText.includes('was taken by pserver')")
    os.kill(victims[1], signal.SIGKILL)
    until(page, "document.querySelector('#picture-body path.wait') !== null")
    waits = page.locator("#job-body .waits").inner_text()
    page.set_viewport_size({"width": 1300, "height": 900})
    page.screenshot(path=f"{directory}/page-blocked.png", full_page=True)
    browser.close()

print(
    json.dumps(
        {
            "complaints": complaints,
            "elsewhere": elsewhere,
            "headings": headings,
            "focused": focused,
            "too_wide": too_wide,
            "dark": dark,
            "seconds": seconds,
            "scrolled": scrolled,
            "drawn": len(drawn),
            "waits": waits,
        }
    )
)
