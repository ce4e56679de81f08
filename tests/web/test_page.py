"""The page in headless Chromium without a network, used as a person uses it."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.shipped_models import model_folder
from hf_vanilla_transformer.web import page_files
from tests.interop.exports import LINES
from tests.paper import paper_softmax
from tests.paper_inside import paper_inside
from tests.serving.running_server import running_server
from tests.web.conftest import EXAMPLES, Site
from tests.web.tools import Page, QuietHandler, chromium, opened, require_npm, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def page(site: Site) -> Iterator[Page]:
    """The loaded page. Afterwards, check its errors and hosts."""
    with opened(site.folder) as page:
        yield page
        assert_no_fault(page)
        assert page.hosts() <= {"127.0.0.1", "data"}


def assert_no_fault(page: Page) -> None:
    assert page.error == ""
    assert page.console() == []


def hide_alternatives(page: Page) -> None:
    page.run("document.querySelector('#alternatives').hidePopover()")


def generated(site: Site, line: str, **settings: Any) -> str:
    source, target = load_tokenizers(site.source)
    tokens = site.model.generate(**source(line, return_tensors="pt"), **settings)[0]
    return target.decode(tokens, skip_special_tokens=True).strip()


def choose_fp32(page: Page) -> None:
    page.select("#dtype").select_by_value("fp32")
    page.wait(lambda: "fp32" in page.find("#facts").text and page.find("#source").is_enabled())


def test_page_translates_while_one_types(page: Page, site: Site) -> None:
    choose_fp32(page)
    assert page.find("#title").text == "English → German"
    assert page.translation == ""
    page.type(LINES[0])
    assert page.translation == generated(site, LINES[0], num_beams=4)
    page.type(" cats")
    assert page.translation == generated(site, f"{LINES[0]} cats", num_beams=4)
    words = "".join(page.contents("#translation .word"))
    assert "".join(words.split()) == "".join(page.translation.split())
    facts = page.find("#facts").text
    assert "MB (fp32)" in facts
    assert "ms a token" in facts
    assert "parameters" in facts
    assert len(page.all("#hypotheses li")) >= 1
    assert len(page.all("#tree rect")) >= len(page.tokens())


def test_page_translates_every_sentence_and_shows_the_one_at_the_caret(
    page: Page, site: Site
) -> None:
    choose_fp32(page)
    first = generated(site, LINES[0], num_beams=4)
    second = generated(site, LINES[2], num_beams=4)
    page.type(f"{LINES[0]}\n\n  {LINES[2]} \n")
    assert page.translation == f"{first}\n\n  {second} \n"

    def shows(line: str) -> bool:
        return "".join(page.contents("#source-tokens .token")[:-1]) == line.replace(" ", "")

    assert shows(LINES[2])
    page.run("const field = document.querySelector('#source'); field.setSelectionRange(2, 2)")
    page.wait(lambda: shows(LINES[0]))
    page.settle()
    assert page.translation == f"{first}\n\n  {second} \n"
    page.find("#translation .sentence").click()  # the other one
    page.wait(lambda: shows(LINES[2]))


def test_translation_is_copied_as_plain_text(page: Page) -> None:
    page.type(f"{LINES[0]}. {LINES[2]}\n{LINES[1]}")
    select = (
        "getSelection().selectAllChildren(document.querySelector('#translation')); "
        "return getSelection().toString()"
    )
    assert page.run(select) == page.translation != ""
    written = "navigator.clipboard.writeText = async (text) => (window.copied = text)"
    page.run(written)
    page.find("#copy").click()
    assert page.run("return window.copied") == page.translation


def test_page_shows_where_a_token_looks(page: Page) -> None:
    page.type(LINES[2])
    assert max(page.weights()) == 0
    assert not page.find("#alternatives").is_displayed()
    places = "return [...document.querySelectorAll('main > :not([popover])')].map((each) => each.offsetTop)"
    before = page.run(places)
    word = page.all("#translation .word")[0]
    for element in (word, page.token(int(word.get_attribute("data-token")))):
        page.point_at(element)
        mean = page.weights()
        assert sum(mean) == pytest.approx(1, abs=0.02)
        assert len(page.all("#tokens .chosen")) == len(page.all("#translation .chosen")) == 1
    page.token(0).click()
    assert page.find("#alternatives").is_displayed()
    assert page.run(places) == before
    hide_alternatives(page)
    head = page.all("#heads button")[3]
    head.click()
    page.point_at(page.token(0))
    assert head.get_attribute("aria-checked") == "true"
    assert page.weights() != mean
    assert sum(page.weights()) == pytest.approx(1, abs=0.02)
    rows = page.all("#weights tbody tr")
    assert len(rows) == len(page.tokens())
    assert len(page.all("#weights thead th")) == len(page.weights())


def numbers_of(page: Page, table: str) -> np.ndarray:
    script = "return [...document.querySelectorAll(arguments[0])].map((row) => \
        [...row.querySelectorAll('td')].map((cell) => cell.textContent))"
    return np.array(page.run(script, table), dtype=float)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_page_shows_the_inside_as_the_paper_has_it(page: Page, site: Site, kind: str) -> None:
    choose_fp32(page)
    page.type(LINES[2])
    assert page.all("#inside-row tr") == []  # computed only on request
    page.find("#inside summary").click()
    page.wait(lambda: page.all("#inside-row tr"))
    source = load_tokenizers(site.source)[0](LINES[2])["input_ids"]
    target = site.model.generate(torch.tensor([source]), num_beams=4)[0, 1:].tolist()
    expected = paper_inside(site.model, source, target)
    stack = expected["encoder" if kind == "encoder" else "decoder"]
    scores = expected["cross"] if kind == "cross" else stack["scores"]  # (L, H, queries, keys)
    page.select("#inside-kind").select_by_value(kind)
    layers, heads, length = scores.shape[:3]
    for token, layer, head in (
        (0, 0, 0),
        (2, 0, heads - 1),
        (length - 1, layers - 1, 0),
    ):
        page.select("#inside-token").select_by_index(token)
        page.find(f"#inside-heads [aria-label='layer {layer + 1}, head {head + 1}']").click()
        row = scores[layer, head, token]
        visible = row[np.isfinite(row)]
        columns = np.stack([visible, paper_softmax(visible)], axis=1)
        # The page rounds scores to three digits, and weights to five.
        assert np.all(np.abs(numbers_of(page, "#inside-row tr") - columns) < [5.1e-4, 1e-5])
        assert (
            np.abs(numbers_of(page, "#inside-norms tr")[:, 0] - stack["norms"][:, token]).max()
            < 1e-5
        )
        vector = numbers_of(page, "#inside-position tr")[1]
        assert np.abs(vector - stack["positions"][token]).max() < 1e-5
        (chosen,) = page.all("#inside-weights .chosen")
        assert chosen == page.all("#inside-weights tbody tr")[token]


def test_inside_follows_clicks_and_keys_and_an_address(page: Page) -> None:
    from selenium.webdriver import Keys

    page.driver.get(f"{page.address}#inside")
    page.type(LINES[0])
    kind, token = (page.select(f"#inside-{name}") for name in ("kind", "token"))
    page.token(1).click()
    assert kind.first_selected_option.get_attribute("value") == "decoder"
    assert token.first_selected_option.text.startswith("2. ")
    hide_alternatives(page)
    page.all("#source-tokens .token")[2].click()
    assert kind.first_selected_option.get_attribute("value") == "encoder"
    assert token.first_selected_option.text.startswith("3. ")
    before = numbers_of(page, "#inside-row tr")
    page.find("#inside-heads [tabindex='0']").send_keys(Keys.ARROW_RIGHT)
    assert page.focused.get_attribute("aria-label") == "layer 1, head 2"
    assert np.abs(numbers_of(page, "#inside-row tr") - before).max() > 1e-3
    page.find("#source").send_keys(" x")
    page.settle()  # the view stays, and follows the text
    assert page.find("#inside-head").text == "Layer 1, head 2"
    assert page.find("#inside-body").is_displayed()


def test_page_goes_on_from_an_alternative(page: Page) -> None:
    page.type(LINES[0])
    before = page.tokens()
    page.token(1).click()
    choices = page.all("#alternatives button")
    assert len(choices) == 5
    assert choices[0].find_element("css selector", "span").text.endswith("%")
    other = next(each for each in choices if each.get_attribute("aria-current") is None)
    chosen = (
        other.find_element("css selector", "bdi").get_attribute("textContent").removeprefix("␣")
    )
    other.click()
    page.settle()
    after = page.tokens()
    assert after[0] == before[0]
    assert after[1] == chosen
    assert len(page.all("#tokens .fixed")) == 2
    assert page.find("#prefix").is_displayed()
    assert page.focused == page.token(1)
    page.find("#release").click()
    page.settle()
    assert page.tokens() == before
    assert not page.find("#prefix").is_displayed()


def test_page_searches_with_as_many_beams_as_asked(page: Page, site: Site) -> None:
    choose_fp32(page)
    page.type(LINES[2])
    wide = len(page.all("#tree rect"))
    beams = page.find("#beams")
    beams.clear()
    beams.send_keys("1\t")
    page.settle()
    assert page.translation == generated(site, LINES[2], num_beams=1)
    assert len(page.all("#tree rect")) == len(page.tokens()) < wide
    assert len(page.all("#hypotheses li")) == 1


def test_page_is_used_with_the_keyboard_alone(page: Page) -> None:
    from selenium.webdriver import ActionChains, Keys

    page.find("#examples button").send_keys(Keys.ENTER)
    page.settle()
    assert page.find("#source").get_attribute("value") == EXAMPLES[0]
    first = page.token(0)
    first.send_keys(Keys.ARROW_RIGHT)
    active = page.focused
    assert active == page.token(1)
    assert "probability" in active.get_attribute("aria-label")
    ActionChains(page.driver).send_keys(Keys.ENTER).perform()
    choice = page.focused
    assert choice in page.all("#alternatives button")
    ActionChains(page.driver).send_keys(Keys.ESCAPE).perform()
    assert not page.find("#alternatives").is_displayed()
    assert page.focused == page.token(1)
    ActionChains(page.driver).send_keys(Keys.ENTER).send_keys(Keys.TAB).send_keys(
        Keys.ENTER
    ).perform()
    page.settle()
    assert page.focused == page.token(1)


@pytest.mark.parametrize(("dark", "width"), [(True, 1200), (False, 360), (True, 360)])
def test_page_fits_dark_and_small_screens(site: Site, dark: bool, width: int) -> None:
    with opened(site.folder, dark=dark, width=width) as page:
        page.type(LINES[2])
        page.find("#inside summary").click()
        page.wait(lambda: page.all("#inside-row tr"))
        page.token(1).click()
        sizes = page.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert sizes == [width, width]
        script = "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        ground, ink = (sum(map(int, colour[4:-1].split(","))) for colour in page.run(script))
        assert (ground < 150 and ink > 600) if dark else (ground > 600 and ink < 150)
        small = "return [...document.querySelectorAll('button, input, select')].filter((each) => \
            each.offsetHeight && each.offsetHeight < 24).length"
        assert page.run(small) == 0  # WCAG 2.2, target size
        assert_no_fault(page)


def test_page_refuses_scripts_in_its_text(page: Page) -> None:
    attack = "<img src=x onerror=document.title='run'> <script>document.title='run'</script>"
    page.type(attack)
    assert page.driver.title == "English → German"
    assert page.all("main img, main script") == []
    made = "try { document.body.innerHTML = '<b>'; return 'made'; } catch (error) { return error.name; }"
    assert page.run(made) == "TypeError"  # trusted types
    assert len(page.console()) == 1  # of that attempt


def test_page_shows_a_hostile_vocabulary_as_text(site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    file = tmp_path / "site" / "model" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    hostile = [
        "<img src=x onerror=document.title='run'>",
        "\u202e\u2067gnorw",
        "A" * 10_000,
    ]
    vocabulary = {token: i for token, i in content["model"]["vocab"].items() if i < 4}
    vocabulary |= {f"{hostile[i % 3]}{i}": i for i in range(4, 320)}
    content |= {
        "decoder": None,
        "model": {**content["model"], "vocab": vocabulary, "merges": []},
    }
    content["pre_tokenizer"] = None
    content["model"]["unk_token"] = "<unk>"
    file.write_text(json.dumps(content), encoding="utf-8")
    with opened(tmp_path / "site", width=360) as page:
        page.type("anything")
        assert len(page.tokens()) > 1
        assert max(map(len, page.tokens())) <= 60
        assert page.driver.title == "English → German"
        assert page.all("main img") == []
        assert page.run("return document.documentElement.scrollWidth") == 360
        assert_no_fault(page)


@pytest.mark.parametrize(
    "name", ["model/onnx/decoder_model_merged_quantized.onnx", "model/tokenizer.json"]
)
def test_page_names_a_damaged_or_missing_file(site: Site, tmp_path: Path, name: str) -> None:
    shutil.copytree(site.folder, tmp_path / "site")
    file = tmp_path / "site" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with opened(tmp_path / "site") as page:
        assert page.error.startswith(name)
        assert page.error.count("\n") == 0
        assert not page.find("#source").is_enabled()
        file.unlink()
        page.load()
        assert page.error == f"{name} is missing (status 404): export the site again."


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
            assert page.error == ""
            assert len(page.tokens()) > 1
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
        assert (
            page.error
            == "This browser has no WebAssembly with SIMD, which the model needs: try a newer one."
        )
        assert page.console() == []
        assert not page.find("#source").is_enabled()


DESCRIPTION = {
    "engine": "server",
    "title": "numbers",
    "source_language": "en",
    "target_language": "he",
    "parameters": 1000,
    "layers": 1,
    "heads": 1,
    "dtype": "float32",
    "bytes": 4000,
    "search": {"num_beams": 2},
    "key_required": True,
    "max_characters": 5000,
    "pages": [
        {"source": "en", "target": "he", "path": "../en-he/"},
        {"source": "he", "target": "en", "path": "../he-en/"},
        {"source": "en", "target": "en_XX_odd", "path": "../en-odd/"},
    ],
}
SHALOM = ["בוקר", " טוב", " חב", "רים", "!", "</s>"]
CHOICES = [
    {"id": 5, "text": "בוקר", "probability": 0.75},
    {"id": 7, "text": " ערב", "probability": 1e-5},
]
ANSWER = {
    "source": [{"id": 4, "text": "good morning"}, {"id": 2, "text": "</s>"}],
    "text": "בוקר טוב חברים!",
    "tokens": [{"id": 5 + i, "text": text} for i, text in enumerate(SHALOM)],
    "probabilities": [0.75, 1.0, 0.5, 0.9, 1.0, 1.0],
    "attention": [[[[0.9, 0.1]] * 6]],
    "alternatives": [CHOICES] * 6,
    "hypotheses": [
        {
            "text": "בוקר טוב חברים!",
            "score": -0.25,
            "tokens": [*range(5, 11)],
            "token_texts": SHALOM,
        },
        {
            "text": "בוקר",
            "score": -0.5,
            "tokens": [5, 10],
            "token_texts": ["בוקר", "</s>"],
        },
    ],
    "parts": [{"source": "good morning", "target": "בוקר טוב חברים!", "is_sentence": True}],
    "sentence": 0,
}
STACK = {
    "norms": [[3.0, 4.0, 5.0, 6.0, 7.0, 8.0]] * 2,
    "positions": [[0.0, 1.0]] * 6,
    "scores": [[[[0.5] * 6] * 6]],
}
INSIDE = {
    "encoder": STACK | {"scores": [[[[1.0, 2.0]] * 2]]},
    "decoder": STACK,
    "cross": [[[[1.0, 0.0]] * 6]],
}


class CannedServer(QuietHandler):
    """A server of the page with a key and one answer. It ends the connection at the text "silence"."""

    asked: list[dict] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        if asked["text"] == "silence":
            return
        status = 200
        body = ANSWER | (
            {"inside": INSIDE} if asked["inside"] and "long" not in asked["text"] else {}
        )
        if self.headers["Authorization"] != "Bearer sesame":
            status = 403
            body = {"error": "Invalid API key"}
        elif asked["text"] == "wrong":
            status = 503
            body = {"error": "The queue is full: try again."}
        self.send_response(status)
        content = json.dumps(body).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server_page(tmp_path: Path) -> Iterator[Page]:
    """The page of that server, with its key."""
    for name, content in page_files(DESCRIPTION).items():
        (tmp_path / "en-he" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "en-he" / name).write_bytes(content)
    with serving(tmp_path, CannedServer) as address, chromium() as driver:
        page = Page(driver, f"{address}en-he/")
        page.find("#key-text").send_keys("sesame\n")
        page.settle()
        yield page


def test_page_of_a_server_shows_what_it_answers(server_page: Page) -> None:
    page = server_page
    page.type("good morning")
    assert page.translation == ANSWER["text"]
    assert page.tokens() == [text.strip() for text in SHALOM]
    assert CannedServer.asked[-1] == {
        "text": "good morning",
        "caret": 12,
        "num_beams": 2,
        "prefix": [],
        "inside": False,
    }
    page.point_at(page.token(0))
    assert page.weights() == [0.9, 0.1]
    assert sorted(each.text for each in page.all("#tree text")) == sorted(
        [*map(str.strip, SHALOM), "</s>"]
    )
    assert page.error == ""
    assert not page.find("#key").is_displayed()
    page.token(0).click()
    _, second = page.all("#alternatives button")
    assert second.text.split()[-2:] == ["0.1", "%"]


def test_right_to_left_text_is_in_order(server_page: Page) -> None:
    page = server_page
    page.type("good morning")
    for selector in ("#translation .word", "#tokens .token"):
        places = [each.rect["x"] for each in page.all(selector)]
        assert len(places) >= 5
        assert places == sorted(places, reverse=True)
    assert page.find("#translation").get_attribute("dir") == "rtl"
    assert page.find("#translation").get_attribute("lang") == "he"
    page.find("#source").clear()
    page.type("בוקר")
    assert page.run("return getComputedStyle(document.querySelector('#source')).direction") == "rtl"


def test_answer_of_an_older_text_is_dimmed(server_page: Page) -> None:
    page = server_page
    page.type("good morning")
    for text, message in (
        ("wrong", "The queue is full: try again."),
        ("silence", "The server does not answer."),
    ):
        page.find("#source").clear()
        page.find("#source").send_keys(text)
        page.wait(lambda message=message: page.error == message)
        assert page.is_stale
        page.run("document.querySelector('#error').textContent = ''")
    page.find("#source").clear()
    page.type("good morning")
    assert page.error == ""
    assert not page.is_stale


def test_inside_of_a_server_and_of_a_sentence_that_is_too_long(
    server_page: Page,
) -> None:
    page = server_page
    page.type("good morning")
    page.find("#inside summary").click()
    page.wait(lambda: CannedServer.asked[-1]["inside"] and page.all("#inside-row tr"))
    page.token(2).click()
    assert numbers_of(page, "#inside-row tr").tolist() == [[0.5, 0.33333]] * 3
    assert [each.text for each in page.all("#inside-row th")] == [
        "<start>",
        *(text.strip() for text in SHALOM[:2]),
    ]
    page.find("#source").send_keys(" long")
    page.settle()
    assert page.find("#inside-missing").is_displayed()
    assert not page.find("#inside-body").is_displayed()


def test_languages_are_chosen_and_swapped(server_page: Page) -> None:
    page = server_page
    page.type("good morning")
    assert [each.text for each in page.all("#target-choice option")] == [
        "Hebrew",
        "en_XX_odd",
    ]
    page.find("#swap").click()
    page.wait(lambda: page.driver.current_url.endswith("/he-en/"))
    stored = page.run("return [sessionStorage.getItem('text'), sessionStorage.getItem('key')]")
    assert stored == [ANSWER["text"], "sesame"]


def test_page_of_a_sequence_model_lists_its_predictions(tmp_path: Path) -> None:
    folder = model_folder("g2p_en")
    with running_server(folder, tmp_path) as server, chromium() as driver:
        page = Page(driver, f"{server.url}/")
        page.type("record")
        page.wait(lambda: page.all("#hypotheses li"))
        request = {
            "q": "record",
            "n_best": int(page.find("#beams").get_attribute("value")),
        }
        predicted = httpx.post(f"{server.url}/predict", json=request).json()["predictions"]
        assert page.translation == predicted[0]["text"]
        listed = [each.text.partition(" score ") for each in page.all("#hypotheses li")]
        assert [text for text, _, _ in listed] == [one["text"] for one in predicted]
        for one, (_, _, facts) in zip(predicted, listed, strict=True):
            score, _, share = facts.partition(" · ")
            assert float(score) == pytest.approx(one["score"], abs=1e-3)
            assert float(share.removesuffix(" %")) / 100 == pytest.approx(
                one["probability"], abs=0.01
            )
        body = driver.find_element("css selector", "body").text
        assert not re.search("translat|languag|sentence", body, re.IGNORECASE)
        page.type("7")
        assert "'7'" in page.find("#note").text
        assert_no_fault(page)


@pytest.mark.parametrize("dark", [False, True])
def test_page_has_no_serious_accessibility_fault(site: Site, dark: bool) -> None:
    script = require_npm() / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        pytest.skip("needs npm's axe-core")
    with opened(site.folder, dark=dark) as page:
        page.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
        page.load()
        for step in ("empty", "typed", "open"):
            if step == "typed":
                page.type(f"{LINES[0]}. {LINES[2]}")
                page.find("#inside summary").click()
                page.wait(lambda: page.all("#inside-row tr"))
            elif step == "open":
                page.token(0).click()
            page.run(script.read_text(encoding="utf-8"))
            found = page.driver.execute_async_script("axe.run().then(arguments[0])")["violations"]
            grave = [each for each in found if each["impact"] in ("serious", "critical")]
            assert grave == [], [
                (each["id"], [node["html"] for node in each["nodes"]]) for each in grave
            ]
