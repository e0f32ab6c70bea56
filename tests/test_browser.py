"""Each notebook in JupyterLab in Chromium: every cell runs, every widget changes its figure, and a picture is kept."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_SECONDS = 300  # for the server, and for a page with its kernel
RUN_SECONDS = 600  # for the cells of a notebook
ANSWER_SECONDS = 300  # for a widget, on a machine that has other work too
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page, seen or not
}
ON, BACK = "ArrowRight", "ArrowLeft"
ERRORS = '[data-mime-type="application/vnd.jupyter.stderr"]'  # a traceback, and whatever else went to stderr
IS_DONE = f"""
() => document.querySelector('{ERRORS}')
    || [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].every(e => /^\\[\\d+\\]:$/.test(e.textContent))
"""


class Server:
    """JupyterLab on a copy of the notebooks, with a token and folders of its own; stopped at the end in any case."""

    def __init__(self, folder, stack):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.token = secrets.token_hex(16)
        self.log = folder / "server.log"
        for name, setting in SETTINGS.items():
            file = folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(setting))
        shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        # Links lead there.
        shutil.copytree(ROOT / "reports", folder / "reports", ignore=shutil.ignore_patterns("local"))
        own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTERLAB_SETTINGS_DIR": "settings"}
        own |= {"JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython"}
        environment = os.environ | {name: str(folder / place) for name, place in own.items()}
        environment.pop("TRITON_INTERPRET", None)  # set by conftest.py; in a notebook, the notebook does it
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={self.url[17:]}"]
        command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}"]
        command += [f"--ServerApp.root_dir={folder / 'notebooks'}"]
        # Should this process be killed, nobody is left to stop the server but itself.
        command += [f"--MappingKernelManager.cull_idle_timeout={RUN_SECONDS}"]
        command += [f"--ServerApp.shutdown_no_activity_timeout={RUN_SECONDS}"]
        output = stack.enter_context(self.log.open("w"))
        self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
        stack.callback(self.stop)
        self.wait_until_it_answers()

    def wait_until_it_answers(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                return self.ask("status")
            except OSError:
                time.sleep(0.2)
        pytest.fail(f"JupyterLab does not answer:\n{self.log.read_text()[-2000:]}")

    def ask(self, what, method="GET"):
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{what}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return json.loads(answer.read() or "null")

    def stop_kernels(self):
        for kernel in self.ask("kernels"):
            self.ask(f"kernels/{kernel['id']}", method="DELETE")

    def stop(self):
        self.process.terminate()  # the server ends its kernels first
        try:
            self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory, pytestconfig):
    folder = Path(os.environ.get("HILBERT_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nscreenshots: {folder.resolve()}")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; on Debian or Ubuntu: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # as root there is none
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    with ExitStack() as stack:
        yield Server(tmp_path_factory.mktemp("lab"), stack)


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    yield page
    page.close()
    server.stop_kernels()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_every_widget_changes_its_figure(path, page, server, screenshots):
    page.goto(f"{server.url}/lab/tree/{path.name}?token={server.token}&reset")
    try:
        run_all_cells(page)
        panels = page.locator(".jp-OutputArea-output .widget-vbox:has(img)")
        assert panels.count() == path.read_text().count('"explore(')
        for number, panel in enumerate(panels.all()):
            move_every_widget(page, panel)
            panel.screenshot(path=screenshots / f"{path.stem}-widgets-{number}.png")
    finally:
        page.screenshot(path=screenshots / f"{path.stem}.png")


def run_all_cells(page):
    page.get_by_text(" | Idle").wait_for(timeout=1000 * START_SECONDS)  # a cell run earlier would ask for a kernel
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(IS_DONE, timeout=1000 * RUN_SECONDS)
    failed = page.locator(ERRORS)
    assert failed.count() == 0, failed.first.inner_text()


def move_every_widget(page, panel):
    picture, sliders, lists = panel.locator("img"), panel.locator("[role=slider]"), panel.locator("select")
    assert sliders.count() + lists.count() >= 3
    panel.scroll_into_view_if_needed()
    for slider in sliders.all():
        place, highest = (float(slider.get_attribute(f"aria-value{name}")) for name in ("now", "max"))
        change(page, picture, lambda slider=slider, key=BACK if place == highest else ON: slider.press(key))
    for choice in lists.all():
        other = (choice.evaluate("list => list.selectedIndex") + 1) % choice.locator("option").count()
        change(page, picture, lambda choice=choice, other=other: choice.select_option(index=other))
    state = panel.locator(".widget-label:not([for])").last  # says that it draws, or what was refused
    page.wait_for_function("e => e.textContent === ''", arg=state.element_handle(), timeout=1000 * ANSWER_SECONDS)


def change(page, picture, act):
    """Do something to a widget, and see other pixels."""
    before, source = picture.screenshot(), picture.get_attribute("src")
    act()
    page.wait_for_function(
        "([image, source]) => image.src !== source && image.complete",
        arg=[picture.element_handle(), source],
        timeout=1000 * ANSWER_SECONDS,
    )
    assert picture.screenshot() != before
