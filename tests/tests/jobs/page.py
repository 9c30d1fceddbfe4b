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


url, victim, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
complaints = []
elsewhere = []

with sync_playwright() as tools:
    browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.on("console", lambda it: complaints.append(it.text) if it.type in ("error", "warning") else None)
    page.on("pageerror", lambda it: complaints.append(str(it)))
    page.on("request", lambda it: elsewhere.append(it.url) if not it.url.startswith(url) else None)
    page.goto(url)
    until(page, "document.getElementById('connection').textContent === 'live'")
    page.wait_for_selector("#curves-body svg")
    page.screenshot(path=f"{directory}/page-light.png", full_page=True)

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

    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    until(page, "document.getElementById('events-body').innerText.includes('lost its pserver')")
    seconds = time.monotonic() - killed
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
        }
    )
)
