"""A translation that changes every word leaves the structure: nothing of a document is lost, joined or invented."""

import io
import re
import shutil
import subprocess
import zipfile

import pytest

from hf_vanilla_transformer.documents.document_files import translate_document
from hf_vanilla_transformer.inference.placement import TranslatedPart
from scripts.trials.documents import TRANSLATIONS
from tests.documents.translators import upper
from tests.model_helpers import error_of

pytest.importorskip("markdown_it", reason="needs the extra `documents`")


def python_docx():
    return pytest.importorskip("docx", reason="needs python-docx")


def joined(texts):
    """Translations of one word, linked to all words, as German number words are."""
    counts = [len(text.split()) for text in texts]
    return [
        [TranslatedPart(text, "".join(text.title().split()), [(i, 0) for i in range(count)])]
        for text, count in zip(texts, counts, strict=True)
    ]


def in_upper_case(document: str, suffix: str) -> str:
    return translate_document(document.encode(), suffix, upper, "en", "de").decode()


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            "Run:\n\n    make clean\n    make all\n\n\tls -l\n",
            "RUN:\n\n    make clean\n    make all\n\n\tls -l\n",
        ),
        (
            "See [it][a].\n\n  [a]: x.md\n  [b c]: y.md#z\n",
            "SEE [IT][a].\n\n  [a]: x.md\n  [b c]: y.md#z\n",
        ),
        (
            '<p align="x">\n  <img src="a">\n</p>\n\n# One\n\n```sh\ntwo\n```\n\n- three\n',
            '<p align="x">\n  <img src="a">\n</p>\n\n# ONE\n\n```sh\ntwo\n```\n\n- THREE\n',
        ),
        (
            "See [the guide][] or [the guide].\n\n[the guide]: http://x\n",
            "SEE [THE GUIDE][the guide] OR [THE GUIDE][the guide].\n\n[the guide]: http://x\n",
        ),
        (
            "## [Unreleased]\n\n[unreleased]: http://x\n",
            "## [UNRELEASED][Unreleased]\n\n[unreleased]: http://x\n",
        ),
        (
            "Press <kbd>Enter</kbd> or <code>some code</code>.\n",
            "PRESS <kbd>Enter</kbd> OR <code>some code</code>.\n",
        ),
        ("> a **b\n> c**\n\nd\n", "> A **B C**\n\nD\n"),
        (
            "- a\n\n  ```\n  b\n\n  c\n  ```\n\n      code\n",
            "- A\n\n  ```\n  b\n\n  c\n  ```\n\n      code\n",
        ),
        ("| a | b \\| `c\\|d` |\n|---|---|\n| e |\n", "| A | B \\| `c\\|d` |\n|---|---|\n| E |\n"),
        ("See \\*this\\* &amp; &lt;that\n", "SEE \\*THIS\\* & \\<THAT\n"),
        ("+---+---+\n| a | b |\n+---+---+\n\nc\n", "+---+---+\n| a | b |\n+---+---+\n\nC\n"),
        ("---\ntitle: a\n---\n\nb\n", "---\ntitle: a\n---\n\nB\n"),
    ],
)
def test_markdown_is_read_as_commonmark_reads_it(
    document: str, expected: str, newline: str
) -> None:
    source, wanted = (text.replace("\n", newline) for text in (document, expected))
    assert in_upper_case(source, ".md") == wanted
    assert in_upper_case("\ufeff" + source, ".md") == "\ufeff" + wanted


def test_translation_that_looks_like_markdown_is_escaped() -> None:
    def instead(translation: str) -> str:
        return translate_document(
            b"one two\n",
            ".md",
            lambda texts: [[TranslatedPart(text, translation)] for text in texts],
        ).decode()

    assert instead("# one") == "\\# one\n"
    assert instead("1. one") == "1\\. one\n"
    assert instead("a *b* c") == "a \\*b\\* c\n"
    assert instead("[a](b)") == "\\[a\\](b)\n"
    assert instead("a <b> c") == "a \\<b> c\n"
    assert instead("[a]: b") == "\\[a\\]: b\n"


def document_of(paragraphs) -> bytes:
    document = python_docx().Document()
    for fill in paragraphs:
        fill(document.add_paragraph())
    data = io.BytesIO()
    document.save(data)
    return data.getvalue()


def translated_docx(data: bytes, translate=upper):
    return python_docx().Document(io.BytesIO(translate_document(data, ".docx", translate)))


def runs_of(paragraph) -> list[tuple[str, bool | None]]:
    return [(run.text, run.bold) for run in paragraph.runs]


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def element(xml: str):
    return python_docx().oxml.parse_xml(f'<w:x xmlns:w="{WORD}">{xml}</w:x>')[0]


def test_tracked_formats_lose_no_text() -> None:
    def fill(paragraph) -> None:
        bold = paragraph.add_run("seven hundred.")
        bold.bold = True
        change = '<w:rPrChange w:id="1" w:author="A"><w:rPr></w:rPr></w:rPrChange>'
        bold._r.rPr.append(element(change))
        paragraph.add_run(" twelve.")

    (paragraph,) = translated_docx(document_of([fill])).paragraphs
    assert runs_of(paragraph) == [("SEVEN HUNDRED.", True), (" TWELVE.", None)]
    assert len(paragraph._p.findall(f".//{{{WORD}}}rPrChange")) == 1


def test_emoji_of_word_stays_in_its_run() -> None:
    emoji = (
        '<w:r><mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">'
        '<mc:Choice Requires="w16se"><w:t>x</w:t></mc:Choice><mc:Fallback><w:t>y</w:t></mc:Fallback>'
        "</mc:AlternateContent><w:t>one</w:t></w:r>"
    )
    data = document_of([lambda paragraph: paragraph._p.append(element(emoji))])
    (paragraph,) = translated_docx(data).paragraphs
    assert paragraph.text == "ONE"
    assert [text.text for text in paragraph._p.iter(f"{{{WORD}}}t")] == ["x", "y", "ONE"]


def test_empty_and_literal_texts_of_word() -> None:
    run = '<w:r><w:t xml:space="preserve"/><w:br/><w:t><![CDATA[one & two]]></w:t></w:r>'
    data = document_of([lambda paragraph: paragraph._p.append(element(run))])
    (paragraph,) = translated_docx(data).paragraphs
    assert paragraph.text == "\nONE & TWO"


def text_box(text: str) -> str:
    paragraph = f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"
    return f"<w:pict><v:textbox xmlns:v='v'><w:txbxContent>{paragraph}</w:txbxContent></v:textbox></w:pict>"


def test_text_boxes_of_a_run_stay_in_it() -> None:
    run = f"<w:r>{text_box('one')}{text_box('two')}</w:r><w:r><w:t>three</w:t></w:r>"
    paragraph = f"<w:p>{run}</w:p>"
    data = document_of([lambda before: before._p.addnext(element(paragraph))])
    (_, translated) = translated_docx(data).paragraphs
    boxes, word = translated._p.r_lst
    assert [text.text for text in boxes.iter(f"{{{WORD}}}t")] == ["ONE", "TWO"]
    assert [text.text for text in word.iter(f"{{{WORD}}}t")] == ["THREE"]


#: Runs with more than one child, with the texts of all runs of their translation.
RUNS = {
    "text box between texts": (
        f"<w:r><w:t>one</w:t>{text_box('two')}<w:t>six</w:t></w:r>",
        ["ONE", "TWO", "SIX"],
    ),
    "field in one run": (
        '<w:r><w:t>one</w:t><w:fldChar w:fldCharType="begin"/><w:instrText> PAGE </w:instrText>'
        '<w:fldChar w:fldCharType="separate"/><w:t>two</w:t><w:fldChar w:fldCharType="end"/><w:t>six</w:t></w:r>',
        ["ONE", "two", "SIX"],
    ),
    "link in one run": (
        '<w:r><w:fldChar w:fldCharType="begin"/><w:instrText> HYPERLINK "x" </w:instrText>'
        '<w:fldChar w:fldCharType="separate"/><w:t>one</w:t><w:fldChar w:fldCharType="end"/></w:r>',
        ["ONE"],
    ),
}


@pytest.mark.parametrize(("run", "expected"), RUNS.values(), ids=RUNS)
def test_each_text_of_a_run_is_translated(run: str, expected: list[str]) -> None:
    data = document_of([lambda paragraph: paragraph._p.append(element(run))])
    (paragraph,) = translated_docx(data).paragraphs
    assert [text.text for text in paragraph._p.iter(f"{{{WORD}}}t")] == expected
    kept = [
        node.tag
        for node in element(run).iter()
        if node.tag.endswith(("fldChar", "instrText", "textbox"))
    ]
    assert [
        node.tag
        for node in paragraph._p.iter()
        if node.tag.endswith(("fldChar", "instrText", "textbox"))
    ] == kept


def versions(choice: str, fallback: str) -> str:
    return (
        '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">'
        f'<mc:Choice Requires="wps">{choice}</mc:Choice><mc:Fallback>{fallback}</mc:Fallback></mc:AlternateContent>'
    )


def run_of(text: str) -> str:
    return f'<w:r><w:rPr><w:i/></w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


#: Children of a paragraph, with the texts of all runs of its translation.
VERSIONS = {
    "runs": (
        run_of("one ") + versions(run_of("two six"), run_of("two six")),
        ["ONE ", "TWO SIX", "TWO SIX"],
    ),
    "different runs": (versions(run_of("two"), run_of("six ") + run_of("one")), ["TWO", "SIX ONE"]),
    "link": (
        versions(f'<w:hyperlink w:anchor="x">{run_of("two")}</w:hyperlink>', run_of("two")),
        ["TWO", "TWO"],
    ),
    "in a link": (
        f'<w:hyperlink w:anchor="x">{run_of("one ")}{versions(run_of("two"), run_of("two"))}</w:hyperlink>',
        ["ONE ", "TWO", "TWO"],
    ),
    "text boxes": (
        f"<w:r>{versions(text_box('two'), text_box('two'))}</w:r>{run_of('one')}",
        ["TWO", "TWO", "ONE"],
    ),
}


@pytest.mark.parametrize(("paragraph", "expected"), VERSIONS.values(), ids=VERSIONS)
def test_both_versions_of_a_text_are_translated(paragraph: str, expected: list[str]) -> None:
    children = list(python_docx().oxml.parse_xml(f'<w:x xmlns:w="{WORD}">{paragraph}</w:x>'))
    data = document_of([lambda filled: filled._p.extend(children)])
    (translated,) = translated_docx(data).paragraphs
    texts = [text for text in translated._p.iter(f"{{{WORD}}}t") if text.text]
    assert [text.text for text in texts] == expected
    kinds = ["AlternateContent", "Choice", "Fallback", "hyperlink", "textbox", "i"]
    for kind in kinds:
        before = sum(
            len(child.findall(f".//{{*}}{kind}")) + child.tag.endswith(f"}}{kind}")
            for child in children
        )
        after = len(translated._p.findall(f".//{{*}}{kind}"))
        assert after == before or (kind == "i" and after <= before)


def test_bold_of_a_run_is_placed_as_in_html() -> None:
    def fill(paragraph) -> None:
        paragraph.add_run("two hundred ")
        paragraph.add_run("and thirty-four").bold = True

    (paragraph,) = translated_docx(document_of([fill]), joined).paragraphs
    page = "<p>two hundred <b>and thirty-four</b></p>"
    assert (
        translate_document(page.encode(), ".html", joined).decode()
        == "<p><b>TwoHundredAndThirty-Four</b></p>"
    )
    assert runs_of(paragraph) == [("TwoHundredAndThirty-Four", True)]


def test_main_part_of_word_has_any_name_and_prefix() -> None:
    source = zipfile.ZipFile(io.BytesIO(document_of([lambda paragraph: paragraph.add_run("one")])))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in source.namelist():
            content = source.read(name)
            if name in ("[Content_Types].xml", "_rels/.rels"):
                content = content.replace(b"word/document.xml", b"word/document2.xml")
            if name == "word/document.xml":
                name = "word/document2.xml"
                content = (
                    content.replace(b"<w:", b"<n:")
                    .replace(b"</w:", b"</n:")
                    .replace(b"xmlns:w=", b"xmlns:n=")
                )
                content = content.replace(b" w:", b" n:")
            archive.writestr(
                name.replace("word/_rels/document.xml", "word/_rels/document2.xml"), content
            )
    assert [paragraph.text for paragraph in translated_docx(data.getvalue()).paragraphs] == ["ONE"]


def test_archives_that_unpack_to_much_are_refused_before_they_are_read() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(11):
            archive.writestr(f"word/{number}.xml", " ")
            archive.getinfo(
                f"word/{number}.xml"
            ).file_size = 100_000_000  # as the list of files says
    assert "1100000000 bytes" in error_of(
        lambda: translate_document(data.getvalue(), ".docx", upper)
    )


UNITS = "".join(
    f'<trans-unit id="{i}"><source>one {word}</source></trans-unit>\n'
    for i, word in enumerate("abcdef")
)
XLIFF = f'<xliff version="1.2"><file><body>\n{UNITS}</body></file></xliff>'
TMX = '<tmx><body><tu><tuv xml:lang="en"><seg>one</seg></tuv></tu></body></tmx>'


@pytest.mark.parametrize(("suffix", "document"), [(".xlf", XLIFF), (".tmx", TMX)])
def test_cut_translation_files_are_refused(suffix: str, document: str) -> None:
    assert "ONE" in in_upper_case(document, suffix)
    for end in (len(document) // 3, len(document) * 2 // 3, len(document) - 1):
        assert "no well-formed XML" in error_of(in_upper_case, document[:end], suffix)
    entity = f'<!DOCTYPE x [<!ENTITY a "b">]>{document}'
    assert "entity" in error_of(in_upper_case, entity, suffix)


UNIT = "<trans-unit><source{0}>{1}</source>{2}</trans-unit>"


@pytest.mark.parametrize(
    ("attributes", "source", "target"),
    [
        ("", "one <!-- note -->two<?x y?>", "ONE <!-- note -->TWO<?x y?>"),
        (' xml:space="preserve"', "  one  two ", "  ONE  TWO "),
        (
            "",
            'one <mrk mtype="protected">two <g>x</g></mrk>',
            'ONE <mrk mtype="protected">two <g>x</g></mrk>',
        ),
    ],
)
def test_targets_have_the_nodes_of_their_sources(attributes: str, source: str, target: str) -> None:
    filled = f"<target{attributes}>{target}</target>"
    assert in_upper_case(UNIT.format(attributes, source, ""), ".xlf") == UNIT.format(
        attributes, source, filled
    )


def test_protected_text_between_two_marks_is_refused() -> None:
    source = 'one <sm id="1" translate="no"/>two<em startRef="1"/>'
    assert "mrk" in error_of(in_upper_case, f"<segment><source>{source}</source></segment>", ".xlf")


def test_empty_variants_of_a_memory_are_filled() -> None:
    variants = '<tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="de-DE"><seg>{}</seg></tuv>'
    memory = f"<tmx><body><tu>{variants}</tu></body></tmx>"
    assert in_upper_case(memory.format("one", ""), ".tmx") == memory.format("one", "ONE")
    assert in_upper_case(memory.format("one", "eins"), ".tmx") == memory.format("one", "eins")
    empty = '<tmx><body><tu><tuv xml:lang="en"><seg> </seg></tuv></tu></body></tmx>'
    assert in_upper_case(empty, ".tmx") == empty


SEGMENTS = '<mrk mtype="seg" mid="1">{}</mrk> <mrk mtype="seg" mid="2">{}</mrk>'


@pytest.mark.parametrize(
    "target",
    [
        "",
        f"<target>{SEGMENTS.format('', '')}</target>",
        f"<target>{SEGMENTS.format('EINS.', '')}</target>",
    ],
)
def test_segmented_targets_are_filled_segment_by_segment(target: str) -> None:
    sources = SEGMENTS.format("One.", "Two.")
    unit = (
        f"<trans-unit><source>One. Two.</source><seg-source>{sources}</seg-source>{{}}</trans-unit>"
    )
    first = "EINS." if "EINS." in target else "ONE."
    filled = f"<target>{SEGMENTS.format(first, 'TWO.')}</target>"
    assert in_upper_case(unit.format(target), ".xlf") == unit.format(filled)


def test_segments_without_text_stay_in_a_new_target() -> None:
    sources = SEGMENTS.format("One.", '<x id="1"/>')
    unit = f"<trans-unit><source>One.</source><seg-source>{sources}</seg-source>{{}}</trans-unit>"
    filled = f"<target>{sources.replace('One', 'ONE')}</target>"
    assert in_upper_case(unit.format(""), ".xlf") == unit.format(filled)


RUSSIAN = "(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2)"
ARABIC = "(n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5)"


@pytest.mark.parametrize(
    ("formula", "forms", "source", "is_singular"),
    [
        ("0", 1, "%d file", [False]),
        ("(n != 1)", 2, "one file", [True, False]),
        ("(n > 1)", 2, "one file", [True, False]),
        (RUSSIAN, 3, "%d file", [True, False, False]),
        (RUSSIAN, 3, "one file", [False, False, False]),
        (ARABIC, 6, "one file", [False, True, False, False, False, False]),
        ("n % 0", 2, "one file", [True, False]),
        ("n ==", 2, "one file", [True, False]),
    ],
)
def test_forms_of_a_plural_get_the_text_for_their_numbers(
    formula, forms, source, is_singular
) -> None:
    head = f'msgid ""\nmsgstr ""\n"Plural-Forms: nplurals={forms}; plu"\n"ral={formula};\\n"\n\n'
    entries = "".join(f'msgstr[{number}] ""\n' for number in range(forms))
    catalogue = f'{head}msgid "{source}"\nmsgid_plural "%d files"\n{entries}'
    filled = re.findall(r'^msgstr\[\d\] "(.*)"', in_upper_case(catalogue, ".po"), re.MULTILINE)
    assert ["FILES" not in text for text in filled] == is_singular
    assert len(filled) == forms


def test_message_that_is_a_choice_of_icu_stays_empty() -> None:
    message = 'msgid "{count, plural, one {Vote} other {Votes}}"\nmsgstr ""\n'
    assert in_upper_case(message, ".po") == message


PO_HEAD = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
    '"Plural-Forms: nplurals=3; plural=(n==1 ? 0 : n<5 ? 1 : 2);\\n"\n\n'
)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            '#, fuzzy\n#| msgctxt "x"\n#| msgid "old"\nmsgctxt "menu"\nmsgid "one"\nmsgstr {}\n',
            ["ONE"],
        ),
        ('msgid ""\n"one\\n"\n"two\\n"\nmsgstr {}\n', ["ONE\\nTWO\\n"]),
        ('msgid "one"\nmsgstr {}\n""\n""\n', ["ONE"]),
        ('  msgid "one"\n\tmsgstr {}\n', ["ONE"]),
        ('msgid"one"\nmsgstr{}\n', ["ONE"]),
        ('msgid "one"\nmsgstr {}\n\nmsgid "two" " six"\nmsgstr {}\n', ["ONE", "TWO SIX"]),
        ('msgid "\\x6fne \\164wo"\nmsgstr {}\n', ["ONE TWO"]),
        (
            'msgid "file"\nmsgid_plural "files"\nmsgstr[0] {}\nmsgstr[1] {}\nmsgstr [2] {}\n',
            ["FILE", "FILES", "FILES"],
        ),
        ('msgid "a\\tb \\"c\\" \\\\ d"\nmsgstr {}\n', ['A\\tB \\"C\\" \\\\ D']),
        ('#~ msgid "old"\n#~ msgstr ""\n\n#~| msgid "was"\n#~ msgid "x"\n#~ msgstr "y"\n', []),
        ('# note\nmsgid "one"\n# inside\nmsgstr {}\n', ["ONE"]),
    ],
)
def test_messages_of_gettext_are_filled(message: str, expected: list[str], newline: str) -> None:
    empty = PO_HEAD + message.format(*['""'] * len(expected))
    filled = PO_HEAD + message.replace('{}\n""\n""', "{}").format(
        *(f'"{text}"' for text in expected)
    )
    source, wanted = (text.replace("\n", newline) for text in (empty, filled))
    assert in_upper_case(source, ".po") == wanted
    assert in_upper_case(wanted, ".po") == wanted


def backwards(texts):
    """The words in reverse order and upper case, but for their formats."""
    reversed_texts = [" ".join(text.upper().split()[::-1]) for text in texts]
    translated = [
        re.sub(r"%[-.*<]*T?[A-Z]", lambda match: match[0].lower(), text) for text in reversed_texts
    ]
    return [[TranslatedPart(*pair)] for pair in zip(texts, translated, strict=True)]


@pytest.mark.parametrize(
    ("flags", "message", "expected"),
    [
        ("c-format", "%s has %d files", "FILES %2$d HAS %1$s"),
        ("php-format, no-wrap", "100%% of %s has %d", "%2$d HAS %1$s OF 100%%"),
        ("c-format", "%s is %s", "%s IS %s"),
        ("c-format", "%s is %d of %d", "%2$d OF %3$d IS %1$s"),
        ("tcl-format", "%s has %d files", "FILES %2$d HAS %1$s"),
        ("elisp-format", "%s has %d files", "FILES %2$d HAS %1$s"),
        ("ruby-format", "%s has %d files", "FILES %2$d HAS %1$s"),
        ("librep-format", "%s has %d files", "FILES %2$d HAS %1$s"),
        ("gfc-internal-format", "%s has %d files", "FILES %2$d HAS %1$s"),
        ("no-wrap", "%s has %d files", "FILES %d HAS %s"),
        ("python-format", "%s is %s", "%s IS %s"),
    ],
)
def test_formats_in_another_order_are_numbered(flags: str, message: str, expected: str) -> None:
    entry = f'#, c-format\nmsgid "x"\nmsgstr "x"\n\n#, {flags}\nmsgid "{message}"\nmsgstr ""\n'
    translated = translate_document((PO_HEAD + entry).encode(), ".po", backwards).decode()
    assert translated.endswith(f'msgstr "{expected}"\n')
    if shutil.which("msgfmt"):
        check = ["msgfmt", "--check-format", "-o", "/dev/null", "-"]
        assert subprocess.run(check, input=translated.encode(), capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("python-format", "%s has %d files"),
        ("lua-format", "%s has %d files"),
        ("object-pascal-format", "%s has %d files"),
        ("tcl-format", "%s has %*d"),
        ("c-format", "%-*s %s has %.*s"),
        ("java-printf-format", "%tb %<te of %s"),
        ("python-format", "%r has %s"),
        ("lua-format", "%q has %s"),
        ("object-pascal-format", "%n has %s"),
        ("scheme-format", "~a has ~d files"),
        ("lisp-format", "~a has ~d files"),
    ],
)
def test_formats_that_have_no_numbers_are_refused_in_another_order(flag: str, message: str) -> None:
    entry = f'#, {flag}\nmsgid "{message}"\nmsgstr ""\n'
    assert "order of its formats" in error_of(
        lambda: translate_document((PO_HEAD + entry).encode(), ".po", backwards)
    )


@pytest.mark.parametrize(
    ("flag", "message", "expected"),
    [
        # the alignment tells equal formats apart
        ("c-format", "%s is %s", "%2$s IS %1$s"),
        ("python-brace-format", "{} of {:d} in {{}}", "{{}} IN {1:d} OF {0}"),
        ("python-brace-format", "{} of {name}", "{name} OF {}"),
        ("rust-format", "{} of {}", "{1} OF {0}"),
        ("go-format", "%s of %d", "%[2]d OF %[1]s"),
        # the number stands before the verb: https://pkg.go.dev/fmt#hdr-Explicit_argument_indexes
        ("go-format", "%v of %+v", "%+[2]v OF %[1]v"),
        ("go-format", "%T in %5.2f", "%5.2[2]f IN %[1]T"),
        # any letter can be a directive
        ("awk-format", "%i of %s", "%2$s OF %1$i"),
        ("c-format", "%ls of %S", "%2$S OF %1$ls"),
        ("c-format", "%s of %n", "%2$n OF %1$s"),
        ("elisp-format", "%S of %s", "%2$s OF %1$S"),
        ("gcc-internal-format", "%qT and %s", "%2$s AND %1$qT"),
        ("gfc-internal-format", "%L and %d", "%2$d AND %1$L"),
        ("java-printf-format", "%tY of %,d", "%2$,d OF %1$tY"),
        ("javascript-format", "%j of %s", "%2$s OF %1$j"),
        ("librep-format", "%S of %s", "%2$s OF %1$S"),
        ("objc-format", "%C of %@", "%2$@ OF %1$C"),
        ("perl-format", "%s of %vd", "%2$vd OF %1$s"),
        ("php-format", "%b of %s", "%2$s OF %1$b"),
        ("ruby-format", "%b of %s", "%2$s OF %1$b"),
        # these take no argument
        ("c-format", "%m in %s", "%s IN %m"),
        ("java-printf-format", "%n in %s", "%s IN %n"),
        ("gfc-internal-format", "%C in %s", "%s IN %C"),
        ("boost-format", "%t in %s", "%s IN %t"),
        ("kde-format", "%1 of %2", "%2 OF %1"),
        ("scheme-format", "one file", "FILE ONE"),
        # tags stay in pairs
        ("kde-kuit-format", "See <b>the file</b> now", "NOW FILE<b> </b>THE SEE"),
        ("php-format", "to <a href='%s'>the %s</a> now", "NOW %2$s<a href='%1$s'> </a>THE TO"),
        ("no-wrap", "one<br> two", "TWO ONE<br>"),
    ],
)
def test_formats_and_tags_of_messages_stay_right_in_another_order(
    flag: str, message: str, expected: str
) -> None:
    entry = f'#, {flag}\nmsgid "{message}"\nmsgstr ""\n'
    translated = translate_document(
        (PO_HEAD + entry).encode(), ".po", TRANSLATIONS["reversed"]
    ).decode()
    assert translated.endswith(f'msgstr "{expected}"\n')
    if shutil.which("msgfmt"):
        check = ["msgfmt", "--check-format", "-o", "/dev/null", "-"]
        assert subprocess.run(check, input=translated.encode(), capture_output=True).returncode == 0


def test_document_that_includes_another_file_is_refused_by_name() -> None:
    def fill(paragraph) -> None:
        paragraph.add_run("one")
        paragraph._p.addnext(element('<w:altChunk xmlns:r="urn:r" r:id="x"/>'))

    assert "altChunk" in error_of(translate_document, document_of([fill]), ".docx", upper)
