"""Node, Chromium and a file server for the tests of the page. What is missing skips a test with its reason."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
INSTALL = "xargs npm install --no-save --no-package-lock --ignore-scripts --prefix . < tests/web/npm_packages.txt"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CHROMEDRIVER = shutil.which("chromedriver")


def require_npm() -> Path:
    """The folder in which npm has installed the packages of npm_packages.txt."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    if not (ROOT / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip(f"needs `{INSTALL}`")
    return ROOT


def run_node(script: str, *arguments: str, lines: list[str]) -> dict[str, Any]:
    """The output of a script next to this file, as JSON. The lines are its standard input."""
    require_npm()
    command = ["node", str(HERE / script), *arguments]
    done = subprocess.run(
        command, input=json.dumps(lines), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A file server's handler without a log."""

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serving(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """The address at which a folder is served."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def chromium(dark: bool = False, width: int = 1200, js_flags: str = "") -> Iterator[Any]:
    """A headless Chromium without a network but this machine, driven by selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        *(
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--window-size={width},1200",
        *([f"--js-flags={js_flags}"] if js_flags else []),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        if width < 600:
            screen = {
                "width": width,
                "height": 740,
                "deviceScaleFactor": 2,
                "mobile": True,
            }
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        yield driver
    finally:
        driver.quit()


class Page:
    """The page in a browser, used as a person uses it."""

    def __init__(self, driver: Any, address: str):
        self.driver = driver
        self.address = address
        self.load()

    def load(self) -> None:
        self.driver.get(self.address)
        self.wait(lambda: self.find("#source").is_enabled() or self.error)

    def wait(self, condition: Any, seconds: float = 60) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def token(self, number: int) -> Any:
        """A token of the translation."""
        return self.all("#tokens .token")[number]

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of some JavaScript."""
        return self.driver.execute_script(script, *arguments)

    def contents(self, selector: str) -> list[str]:
        """The texts of elements, shown or not."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        )
        return self.run(script, selector)

    def select(self, selector: str) -> Any:
        """A list of choices."""
        from selenium.webdriver.support.ui import Select

        return Select(self.find(selector))

    @property
    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    @property
    def is_stale(self) -> bool:
        """Whether the translation is one of an older text."""
        return "stale" in self.find("#translation").get_attribute("class")

    @property
    def error(self) -> str:
        return self.find("#error").text

    @property
    def translation(self) -> str:
        return self.find("#translation").get_attribute("textContent")

    def tokens(self) -> list[str]:
        return self.contents("#tokens .token")

    def settle(self) -> None:
        """Wait until the typed text is translated."""
        self.run("return new Promise((resume) => setTimeout(resume, 200))")
        self.wait(lambda: self.error or not self.is_stale)

    def type(self, text: str) -> None:
        self.find("#source").send_keys(text)
        self.settle()

    def point_at(self, element: Any) -> None:
        from selenium.webdriver import ActionChains

        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).perform()

    def weights(self) -> list[float]:
        """How much each source token is lit up."""
        script = "return [...document.querySelectorAll('#source-tokens .token')].map((each) => each.style.cssText)"
        return [float(text.split(":")[1].strip(" ;")) for text in self.run(script)]

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def hosts(self) -> set[str]:
        """The hosts of all requests since the last call."""
        from urllib.parse import urlsplit

        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        sent = [
            each["params"]["request"]["url"]
            for each in messages
            if each["method"] == "Network.requestWillBeSent"
        ]
        return {urlsplit(url).hostname or urlsplit(url).scheme for url in sent}


@contextmanager
def opened(
    folder: Path, handler: type[QuietHandler] = QuietHandler, **options: Any
) -> Iterator[Page]:
    """The page of a site in a Chromium with these options."""
    with serving(folder, handler) as address, chromium(**options) as driver:
        yield Page(driver, address)
