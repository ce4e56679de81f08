"""Pictures of the page: `python -m tests.web.screenshot MODEL FOLDER` writes page.png and page_dark.png.

It serves the model, types a sentence in headless Chromium and clicks a token of the translation.
"""

import argparse
import tempfile
from pathlib import Path

from tests.serving.running_server import running_server
from tests.web.tools import Page, chromium

SENTENCE = "ninety-eight thousand and seventy-six"


def take_screenshot(address: str, path: Path, sentence: str, token: int, dark: bool) -> None:
    """Write a picture of the whole page with one target token chosen."""
    with chromium(dark) as driver:
        page = Page(driver, address)
        page.type(sentence)
        page.all("#tokens .token")[token].click()
        width, height = driver.execute_script("return [innerWidth, document.body.scrollHeight]")
        driver.set_window_size(width, height + 1200 - driver.execute_script("return innerHeight"))
        driver.save_screenshot(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sentence", default=SENTENCE)
    parser.add_argument("--token", type=int, default=1, help="of the translation, counted from 0")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(arguments.model, Path(folder)) as server,
    ):
        for name, dark in (("page.png", False), ("page_dark.png", True)):
            path = arguments.folder / name
            take_screenshot(server.url, path, arguments.sentence, arguments.token, dark)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
