"""The page in headless Chromium without a network, used as a person uses it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.data import load_tokenizers
from hf_vanilla_transformer.web import page_files
from tests.interop.exports import LINES
from tests.web.conftest import EXAMPLES, Site
from tests.web.tools import Page, QuietHandler, opened, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def page(site: Site) -> Iterator[Page]:
    """The loaded page. Afterwards, what no use of it may leave."""
    with opened(site.folder) as page:
        yield page
        assert page.error == "" and page.console() == []
        assert page.hosts() <= {"127.0.0.1", "data"}


def generated(site: Site, line: str, **settings: Any) -> str:
    source, target = load_tokenizers(site.source)
    tokens = site.model.generate(**source(line, return_tensors="pt"), **settings)[0]
    return target.decode(tokens, skip_special_tokens=True).strip()


def choose_fp32(page: Page) -> None:
    from selenium.webdriver.support.ui import Select

    Select(page.find("#dtype")).select_by_value("fp32")
    page.wait(lambda: "fp32" in page.find("#facts").text and page.find("#source").is_enabled())


def test_page_translates_while_one_types(page: Page, site: Site) -> None:
    choose_fp32(page)
    assert page.find("#title").text == "English → German" and page.translation == ""
    page.type(LINES[0])
    assert page.translation == generated(site, LINES[0], num_beams=4)
    page.type(" cats")
    assert page.translation == generated(site, f"{LINES[0]} cats", num_beams=4)
    assert "".join(page.tokens()).removesuffix("</s>").strip() in page.translation
    facts = page.find("#facts").text
    assert "MB (fp32)" in facts and "ms a token" in facts and "parameters" in facts
    assert len(page.all("#hypotheses li")) >= 1 and len(page.all("#tree rect")) >= len(page.tokens())


def test_page_shows_where_a_token_looks(page: Page) -> None:
    page.type(LINES[2])
    assert max(page.weights()) == 0 and not page.find("#alternatives").is_displayed()
    page.point_at(page.all("#tokens .token")[1])
    mean = page.weights()
    assert sum(mean) == pytest.approx(1, abs=0.02) and page.find("#alternatives").is_displayed()
    page.all("#tokens .token")[1].click()  # keeps it while the pointer goes elsewhere
    head = page.all("#heads button")[3]
    head.click()
    assert head.get_attribute("aria-checked") == "true" and page.weights() != mean
    assert sum(page.weights()) == pytest.approx(1, abs=0.02)
    rows = page.all("#weights tbody tr")
    assert len(rows) == len(page.tokens()) and len(page.all("#weights thead th")) == len(page.weights())


def test_page_goes_on_from_an_alternative(page: Page) -> None:
    page.type(LINES[0])
    before = page.tokens()
    page.all("#tokens .token")[1].click()
    choices = page.all("#alternatives button")
    assert len(choices) == 5 and choices[0].find_element("css selector", "span").text.endswith("%")
    other = next(each for each in choices if each.get_attribute("aria-current") is None)
    chosen = other.find_element("css selector", "bdi").get_attribute("textContent")
    other.click()
    page.settle()
    after = page.tokens()
    assert after[0] == before[0] and after[1] == chosen != before[1]
    assert len(page.all("#tokens .fixed")) == 2 and page.find("#prefix").is_displayed()
    page.find("#release").click()
    page.settle()
    assert page.tokens() == before and not page.find("#prefix").is_displayed()


def test_page_searches_with_as_many_beams_as_asked(page: Page, site: Site) -> None:
    choose_fp32(page)
    page.type(LINES[2])
    wide = len(page.all("#tree rect"))
    beams = page.find("#beams")
    beams.clear()
    beams.send_keys("1\t")
    page.settle()
    assert page.translation == generated(site, LINES[2], num_beams=1)
    assert len(page.all("#tree rect")) == len(page.tokens()) < wide and len(page.all("#hypotheses li")) == 1


def test_page_is_used_with_the_keyboard_alone(page: Page) -> None:
    from selenium.webdriver import ActionChains, Keys

    page.find("#examples button").send_keys(Keys.ENTER)
    page.settle()
    assert page.find("#source").get_attribute("value") == EXAMPLES[0]
    first = page.all("#tokens .token")[0]
    first.send_keys(Keys.ARROW_RIGHT)
    active = page.driver.switch_to.active_element
    assert active == page.all("#tokens .token")[1] and "probability" in active.get_attribute("aria-label")
    active.send_keys(Keys.ENTER)
    choice = page.driver.switch_to.active_element
    assert choice in page.all("#alternatives button")
    ActionChains(page.driver).send_keys(Keys.ESCAPE).perform()
    assert not page.find("#alternatives").is_displayed()


@pytest.mark.parametrize(("dark", "width"), [(True, 1200), (False, 360), (True, 360)])
def test_page_fits_dark_and_small_screens(site: Site, dark: bool, width: int) -> None:
    with opened(site.folder, dark=dark, width=width) as page:
        driver = page.driver
        page.type(LINES[2])
        page.all("#tokens .token")[1].click()
        sizes = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert sizes == [width, width]
        script = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        ground, ink = (sum(int(part) for part in colour[4:-1].split(",")) for colour in driver.execute_script(script))
        assert (ground < 150 and ink > 600) if dark else (ground > 600 and ink < 150)
        small = "return [...document.querySelectorAll('button, input, select')].filter((each) => \
            each.offsetHeight && each.offsetHeight < 24).length"
        assert driver.execute_script(small) == 0  # WCAG 2.2, target size
        assert page.error == "" and page.console() == []


def test_page_refuses_scripts_in_its_text(page: Page) -> None:
    attack = "<img src=x onerror=document.title='run'> <script>document.title='run'</script>"
    page.type(attack)
    assert page.driver.title == "English → German" and page.all("main img, main script") == []
    made = "try { document.body.innerHTML = '<b>'; return 'made'; } catch (error) { return error.name; }"
    assert page.driver.execute_script(made) == "TypeError"  # trusted types
    assert len(page.console()) == 1  # of that attempt


def test_page_shows_a_hostile_vocabulary_as_text(site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    file = tmp_path / "site" / "model" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    hostile = ["<img src=x onerror=document.title='run'>", "\u202e\u2067gnorw", "A" * 10_000]
    vocabulary = {token: i for token, i in content["model"]["vocab"].items() if i < 4}
    vocabulary |= {f"{hostile[i % 3]}{i}": i for i in range(4, 320)}
    content |= {"decoder": None, "model": {**content["model"], "vocab": vocabulary, "merges": []}}
    content["pre_tokenizer"] = None
    content["model"]["unk_token"] = "<unk>"
    file.write_text(json.dumps(content), encoding="utf-8")
    with opened(tmp_path / "site", width=360) as page:
        page.type("anything")
        assert len(page.tokens()) > 1 and max(map(len, page.tokens())) <= 60
        assert page.driver.title == "English → German" and page.all("main img") == []
        assert page.driver.execute_script("return document.documentElement.scrollWidth") == 360
        assert page.error == "" and page.console() == []


@pytest.mark.parametrize("name", ["model/onnx/decoder_model_merged_quantized.onnx", "model/tokenizer.json"])
def test_page_names_a_damaged_or_missing_file(site: Site, tmp_path: Path, name: str) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    file = tmp_path / "site" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with opened(tmp_path / "site") as page:
        assert page.error.startswith(name) and page.error.count("\n") == 0
        assert not page.find("#source").is_enabled()
        file.unlink()
        page.load()
        assert page.error == f"{name} is missing (status 404): export the site again."


def test_page_says_that_a_changed_runtime_is_not_run(site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    (tmp_path / "site" / "runtime" / "tokenizers.min.mjs").write_text("this is no script {")
    with opened(tmp_path / "site") as page:
        assert "tokenizers.min.mjs cannot be loaded" in page.error


def test_page_checks_the_hashes_of_another_host(site: Site, tmp_path: Path) -> None:
    # the runtime at a second address stands for the network's. One of its files has been changed there
    runtime = tmp_path / "runtime"
    shutil.copytree(site.folder / "runtime", runtime)
    shutil.copytree(site.folder, tmp_path / "site")
    description = json.loads((site.folder / "site.json").read_text(encoding="utf-8"))
    from hf_vanilla_transformer.web.site import _runtime

    class Shared(QuietHandler):
        def end_headers(self) -> None:
            self.send_header("Access-Control-Allow-Origin", "*")
            super().end_headers()

    with serving(runtime, Shared) as other:
        for name, entry in _runtime(local=False).items():
            description["runtime"][name] = entry | {"url": other + entry["url"].rpartition("/")[2]}
        for name, content in page_files(description).items():
            (tmp_path / "site" / name).write_bytes(content)
        with opened(tmp_path / "site") as page:
            page.type(LINES[0])
            assert page.error == "" and len(page.tokens()) > 1
            for file in ("tokenizers.min.mjs", "ort-wasm-simd-threaded.wasm"):
                original = (runtime / file).read_bytes()
                (runtime / file).write_bytes(original + b"\n")
                page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
                page.load()
                assert file in page.error
                (runtime / file).write_bytes(original)


def test_page_needs_webassembly_with_simd(site: Site) -> None:
    with opened(site.folder) as page:
        # as in a browser without SIMD: this one has no switch for it
        script = "WebAssembly.validate = () => false"
        page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        page.load()
        assert page.error == "This browser has no WebAssembly with SIMD, which the translator needs: try a newer one."
        assert page.console() == [] and not page.find("#source").is_enabled()


def test_page_of_a_server_shows_what_it_answers(tmp_path: Path) -> None:
    description = {
        **{"engine": "server", "title": "numbers", "source_language": None, "target_language": None},
        **{"parameters": 1000, "layers": 1, "heads": 1, "dtype": "float32", "bytes": 4000},
        "search": {"num_beams": 2},
    }
    for name, content in page_files(description).items():
        (tmp_path / name).write_bytes(content)
    answer = {
        "source": [{"id": 4, "text": "one"}, {"id": 2, "text": "</s>"}],
        "text": "eins",
        "tokens": [{"id": 5, "text": "eins"}, {"id": 2, "text": "</s>"}],
        "probabilities": [0.75, 1.0],
        "attention": [[[[0.9, 0.1], [0.2, 0.8]]]],
        "alternatives": [
            [{"id": 5, "text": "eins", "probability": 0.75}],
            [{"id": 2, "text": "</s>", "probability": 1}],
        ],
        "hypotheses": [
            {"text": "eins", "score": -0.25, "tokens": [5, 2], "token_texts": ["eins", "</s>"]},
            {"text": "eins zwei", "score": -0.5, "tokens": [5, 6, 2], "token_texts": ["eins", " zwei", "</s>"]},
        ],
    }

    class Server(QuietHandler):
        asked: list[dict] = []

        def do_POST(self) -> None:
            assert self.path == "/page/translate"
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.asked.append(asked)
            wrong = asked["text"] == "wrong"
            body = json.dumps({"error": "The queue is full: try again."} if wrong else answer).encode()
            self.send_response(503 if wrong else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with opened(tmp_path, Server) as page:
        page.type("one")
        assert page.translation == "eins" and page.tokens() == ["eins", "</s>"]
        assert Server.asked[-1] == {"text": "one", "num_beams": 2, "prefix": []}
        page.point_at(page.all("#tokens .token")[0])
        assert page.weights() == [0.9, 0.1]
        labels = [each.text for each in page.all("#tree text")]
        assert sorted(labels) == ["</s>", "</s>", "eins", "zwei"]  # a tree of the hypotheses
        assert page.error == "" and page.console() == []
        page.find("#source").clear()
        page.type("wrong")
        assert page.error == "The queue is full: try again."
