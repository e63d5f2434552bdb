"""Creates the screenshot for docs/how-to/dashboard.md from a job that ran with --log-dir DIR:

    python scripts/dashboard_screenshot.py DIR docs/images/dashboard.png [--dark]

Needs playwright and Chromium. The job is shown in its state before it ended.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from phalanx.dashboard import browser_view, page
from phalanx.launcher.watching.job_follower import read_events
from phalanx.monitoring.job_events import JobEnded, JobEvent, TaskExited
from phalanx.monitoring.job_view import replay

WIDTH, HEIGHT = 1280, 1160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    # Figures of tasks that still run arrive between the exits of the others.
    events = [each for each in read_events(arguments.log_dir) if not is_of_the_end(each)]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        document = Path(folder) / "page.html"
        document.write_text(page.render(browser_view.message(replay(events), control=True)))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if arguments.dark else "light"
        )
        shown.goto(document.as_uri())
        shown.wait_for_timeout(500)
        shown.screenshot(path=arguments.picture)
        browser.close()


def is_of_the_end(event: JobEvent) -> bool:
    return isinstance(event, JobEnded) or (isinstance(event, TaskExited) and not event.code)


if __name__ == "__main__":
    main()
