"""TMX and XLIFF: text without markup, languages matched, damaged and malicious XML refused, flat memory."""

import gzip
import tracemalloc

import pytest

from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.corpora.translation_memories import read_memory
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
EN_DE = {"source_lang": "en", "target_lang": "de"}


def unit(**segments):
    variants = "".join(
        f'<tuv xml:lang="{code.replace("_", "-")}"><seg>{text}</seg></tuv>'
        for code, text in segments.items()
    )
    return f"<tu>{variants}</tu>\n"


def write_tmx(folder, *units, head=HEAD, name="x.tmx"):
    path = folder / name
    text = f'{head}<tmx version="1.4"><header srclang="en"/><body>\n{"".join(units)}</body></tmx>'
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return path


def text_of(pairs):
    return [(row["source"], row["target"]) for row in pairs]


@pytest.mark.parametrize("name", ["x.tmx", "x.TMX", "x.tmx.gz"])
def test_tmx_gives_the_pairs_of_two_languages(tmp_path, name):
    units = (
        unit(en="a dog &amp; a cat", fr="un chien", de="ein Hund &#38; eine Katze"),
        unit(de="zwei", en="two"),
    )
    path = write_tmx(tmp_path, *units, unit(en="no German"), unit(en="empty", de=" "), name=name)
    pairs, report = load_pairs(path, **EN_DE)
    assert text_of(pairs) == [("a dog & a cat", "ein Hund & eine Katze"), ("two", "zwei")]
    assert report.first_lines == {"missing target": [3], "empty target": [4]}


def test_tmx_markup_of_the_document_is_removed(tmp_path):
    marked = 'a <bpt i="1">&lt;b&gt;</bpt>big<ept i="1">&lt;/b&gt;</ept> <ph x="1">{0}</ph><hi>dog <it/>runs</hi>.'
    path = write_tmx(tmp_path, unit(en=marked, de="<!-- note -->ein Hund"))
    assert text_of(load_pairs(path, **EN_DE)[0]) == [("a big dog runs.", "ein Hund")]


def test_best_matching_variant_is_taken(tmp_path):
    path = write_tmx(tmp_path, unit(en_US="color", en_GB="colour", de_AT="Farbe", de="Farbton"))
    assert text_of(load_pairs(path, source_lang="en-GB", target_lang="de")[0]) == [
        ("colour", "Farbton")
    ]
    assert text_of(load_pairs(path, source_lang="en", target_lang="de-AT")[0]) == [
        ("color", "Farbe")
    ]


XLIFF_1 = """<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file source-language="en-US" target-language="de" datatype="plaintext" original="x"><body><group>
<trans-unit id="1"><source>a <g id="1">dog</g><x id="2"/></source><target>ein Hund</target>
<alt-trans><target>ein Tier</target></alt-trans></trans-unit>
<trans-unit id="2"><source>untranslated</source></trans-unit></group></body></file></xliff>"""

XLIFF_2 = """<xliff version="2.0" srcLang="en-US" trgLang="de" xmlns="urn:oasis:names:tc:xliff:document:2.0">
<file id="f"><unit id="1"><segment><source>a <pc id="1">dog</pc><ph id="2"/></source><target>ein Hund</target>
</segment><segment><source>untranslated</source></segment></unit></file></xliff>"""


@pytest.mark.parametrize("content", [XLIFF_1, XLIFF_2])
@pytest.mark.parametrize("suffix", ["xlf", "xliff"])
def test_xliff_gives_its_pairs_in_either_direction(tmp_path, content, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_text(HEAD + content, encoding="utf-8")
    pairs, report = load_pairs(path, **EN_DE)
    assert text_of(pairs) == [("a dog", "ein Hund")] and report.first_lines == {
        "missing target": [2]
    }
    assert text_of(load_pairs(path, source_lang="de", target_lang="en")[0]) == [
        ("ein Hund", "a dog")
    ]


BILLION = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
MALICIOUS = {
    "internal entity": '<!DOCTYPE tmx [<!ENTITY name "text">]>',
    "external entity": '<!DOCTYPE tmx [<!ENTITY name SYSTEM "file:///etc/passwd">]>',
    "parameter entity": '<!DOCTYPE tmx [<!ENTITY % name SYSTEM "http://127.0.0.1:9/x.dtd"> %name;]>',
    "billion laughs": f'<!DOCTYPE tmx [<!ENTITY l0 "ha">{BILLION}]>',
}


@pytest.mark.parametrize("declaration", MALICIOUS.values(), ids=MALICIOUS)
def test_entities_are_refused(tmp_path, declaration):
    reference = "&l9;" if "l9" in declaration else "&name;" if "%" not in declaration else "text"
    path = write_tmx(tmp_path, unit(en=reference, de="Text"), head=HEAD + declaration)
    with pytest.raises(UserError, match=r"x\.tmx.*entity '\w+'"):
        list(load_pairs(path, **EN_DE)[0])


def test_external_dtd_is_not_read(tmp_path):
    (tmp_path / "tmx14.dtd").write_text('<!ENTITY secret "from the DTD">', encoding="utf-8")
    units = unit(en="two", de="zwei"), unit(en="&secret;", de="geheim")
    path = write_tmx(tmp_path, *units, head=HEAD + f'<!DOCTYPE tmx SYSTEM "{tmp_path}/tmx14.dtd">')
    pairs, report = load_pairs(path, **EN_DE)
    assert text_of(pairs) == [("two", "zwei")]
    assert report.first_lines == {"an entity stands for a part of the text": [2]}


def test_damaged_memories_are_one_line_errors(tmp_path):
    whole = write_tmx(tmp_path, *[unit(en="two", de="zwei")] * 50)
    content = whole.read_bytes()
    cases = {
        b"": "XML",
        content[:-40]: "XML",
        content.replace(b"zwei", b"zwei\x00", 1): "XML",
        content.replace(b"zwei", b"zw\xf6i", 1): "XML",
        content.replace(b"zwei", b"zwei&#x1F;", 1): "line 3",
        b"<html><tu/></html>": "<html>",
        b"<a>" * 100_000: "XML",
        b"<tmx>" * 100_000: "XML",
    }
    for number, (damaged, part) in enumerate(cases.items()):
        path = tmp_path / f"{number}.tmx"
        path.write_bytes(damaged)
        with pytest.raises(UserError) as caught:
            load_pairs(path, **EN_DE)
        assert part in str(caught.value) and "\n" not in str(caught.value)
    assert "'fr'" in error_of(load_pairs, whole, source_lang="en", target_lang="fr")


@pytest.mark.parametrize(
    ("source_lang", "target_lang"), [(None, None), ("en", None), (None, "de"), (None, "de-DE")]
)
@pytest.mark.parametrize("first", ["en", "de"])
def test_memory_of_two_languages_needs_no_flags(tmp_path, first, source_lang, target_lang):
    segments = {"en": "two", "de_DE": "zwei"}
    ordered = {
        code: segments[code]
        for code in sorted(segments, key=lambda code: not code.startswith(first))
    }
    path = write_tmx(
        tmp_path, unit(**ordered), unit(**ordered)
    )  # the header names en as the source
    pairs, _ = load_pairs(path, source_lang=source_lang, target_lang=target_lang)
    assert text_of(pairs) == [("two", "zwei")] * 2
    languages = ("de", "en")  # of a model that translates in the other direction
    assert text_of(load_pairs(path, languages=languages)[0]) == [("zwei", "two")] * 2


def test_memory_of_three_languages_lists_them(tmp_path):
    path = write_tmx(tmp_path, unit(en="two", de="zwei", fr="deux"))
    for given in ({}, {"source_lang": "en"}):
        with pytest.raises(UserError, match="'fr'.*source_lang and target_lang"):
            load_pairs(path, **given)


def test_utf16_memory_is_read(tmp_path):
    path = write_tmx(tmp_path, unit(en="two", de="fünf"))
    path.write_bytes(path.read_text(encoding="utf-8").replace("UTF-8", "UTF-16").encode("utf-16"))
    assert text_of(load_pairs(path, **EN_DE)[0]) == [("two", "fünf")]


@pytest.mark.parametrize("kind", ["tmx", "xliff"])
def test_memory_use_does_not_grow_with_the_file(tmp_path, kind):
    psutil = pytest.importorskip("psutil", reason="the memory of libxml2 is seen by psutil only")
    path = tmp_path / f"x.{kind}"
    segment = "text " * 20
    first, last = HEAD + '<tmx version="1.4"><body>', "</body></tmx>"
    piece = unit(en=segment, de=segment)
    if kind == "xliff":
        first, last = HEAD + '<xliff srcLang="en" trgLang="de"><file id="f">', "</file></xliff>"
        piece = (
            f"<unit><segment><source>{segment}</source><target>{segment}</target></segment></unit>"
        )
    with path.open("w") as file:
        file.write(first)
        for _ in range(40):
            file.write(piece * 500)
        file.write(last)
    process, seen = psutil.Process(), []
    tracemalloc.stop()
    for number, _, _ in read_memory(path, "en", "de"):
        if number % 4_000 == 0:
            seen.append(process.memory_info().rss)
    assert number == 20_000 and path.stat().st_size > 4e6
    assert max(seen) - seen[0] < 5e6  # the tree of the whole file takes over 24 MB


def write_xliff(folder, version, units):
    namespace = f'xmlns="urn:oasis:names:tc:xliff:document:{version}"'
    if version == "1.2":
        body = f'<file source-language="en" target-language="de" original="x"><body>{units}</body></file>'
        text = f'<xliff version="1.2" {namespace}>{body}</xliff>'
    else:
        text = f'<xliff version="2.0" srcLang="en" trgLang="de" {namespace}><file id="f">{units}</file></xliff>'
    path = folder / "x.xlf"
    path.write_text(HEAD + text, encoding="utf-8")
    return path


def unit_1(source, target, unit="", state=""):
    return f"<trans-unit {unit}><source>{source}</source><target {state}>{target}</target></trans-unit>"


def unit_2(source, target, unit="", segment=""):
    return f"<unit {unit}><segment {segment}><source>{source}</source><target>{target}</target></segment></unit>"


@pytest.mark.parametrize(
    ("version", "units"),
    [
        (
            "1.2",
            [
                unit_1("Save", "Save", state='state="new"'),
                unit_1("Open", "Open", state='state="needs-translation"'),
                unit_1("Linux", "Linux", unit='translate="no"'),
                '<group translate="no">'
                + unit_1("UNIX", "UNIX")
                + unit_1("dog", "Hund", 'translate="yes"')
                + "</group>",
                unit_1("two", "zwei", state='state="translated"'),
                unit_1("cat", "Katze", state='state="needs-review-translation"'),
            ],
        ),
        (
            "2.0",
            [
                unit_2("Save", "Save", segment='state="initial"'),
                unit_2("Linux", "Linux", unit='translate="no"'),
                '<group id="g" translate="no">'
                + unit_2("UNIX", "UNIX")
                + unit_2("dog", "Hund", 'translate="yes"')
                + "</group>",
                unit_2("two", "zwei", segment='state="final"'),
                unit_2("cat", "Katze"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("languages", [("en", "de"), ("de", "en")])
def test_units_that_are_not_translated_are_dropped_and_counted(tmp_path, version, units, languages):
    path = write_xliff(tmp_path, version, "".join(units))
    pairs, report = load_pairs(path, source_lang=languages[0], target_lang=languages[1])
    expected = [("dog", "Hund"), ("two", "zwei"), ("cat", "Katze")]
    assert text_of(pairs) == (
        expected if languages == ("en", "de") else [pair[::-1] for pair in expected]
    )
    assert sum(report.dropped.values()) == len(units) + 1 - 3
    assert all(reason.startswith("not translated") for reason in report.dropped)


@pytest.mark.parametrize(
    ("languages", "expected"),
    [
        (("pt", "pt-BR"), ("Portugal", "Brasil")),
        (("pt-BR", "pt"), ("Brasil", "Portugal")),
        (("pt-PT", "pt"), ("Portugal", "Brasil")),
        (("pt", "pt"), ("Brasil", "Portugal")),
    ],
)
def test_no_variant_is_both_sides(tmp_path, languages, expected):
    path = write_tmx(tmp_path, unit(pt_BR="Brasil", pt_PT="Portugal"), unit(pt_BR="one"))
    pairs, report = load_pairs(path, source_lang=languages[0], target_lang=languages[1])
    assert text_of(pairs) == [expected] and sum(report.dropped.values()) == 1


def test_layout_of_a_segment_is_white_space(tmp_path):
    pretty = "\n      first  line\n      goes on\n    "
    path = write_tmx(
        tmp_path,
        unit(en=pretty, de="\n  zwei\n"),
        unit(
            en="first<ph><br/></ph>second", de="un<bpt i='1'/>be<ept i='1'/>kannt<it pos='begin'/>."
        ),
        unit(en=" kept  spaces ", de="so"),
    )
    assert text_of(load_pairs(path, **EN_DE)[0]) == [
        ("first line goes on", "zwei"),
        ("first second", "unbekannt."),
        (" kept  spaces ", "so"),
    ]
