"""Addresses, placeholders, markup, emoji and times come back exactly, each once, where the alignment places them."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference.protected import has_words, knows_escapes, protect, spans_in
from hf_vanilla_transformer.inference.span_patterns import BETWEEN_WORDS, IN_WORDS, SpanKind
from tests.serving_helpers import client_of, echo_translator, language_pair

WITHOUT_SPACES = """
https://example.com/a?b=c&d=(x) www.example.org/~me ann.b@mail.example.org {name} {0} {} ${x} %{count} %s %1$s
%(name)s %.2f %@ %count% <x/> </g> &nbsp; &#160; &lt; `f(x)` :smile: 12:30 9:05:10 file:///etc/x mailto:a@b.de
{{{x}}} {p}€ {n}% {\\an8} $name $(VAR) %-5.2f %'d %(n).2f %1 %n %Y-%m-%d :name @user @a@b.social
@string/app_name #tag #größe ``a`b`` :+1: &lt;b&gt; 🐈\u200d⬛ ⬅\ufe0f → $t(key.sub) <0> </12> <1/> <@123>
<!here> *|FNAME|* %%Name_1%% [/caption] [b] [url=x] %<n>d @ann:matrix.org tel:+49123 C:\\Users\\ann\\a.txt
/etc/nginx/nginx.conf ~/a/b.txt ./configure ../x src/main.py example.com/a?b 192.168.0.1:8080 10.0.0.1
3f2504e0-4f89-11d3-9a0c-0305e82c3301 \\textbf{bold} \\alpha \\(a+b\\) \\(name) $x^2$ \\n 2024-01-31T12:00:00Z
report.pdf REPORT.PDF Größe.xlsx README.md my_file-2.tar.gz a.b.json /api/v1/users?id=37 /api/v1/users?id=37&q=a,b
http://例え.jp/ https://例え.jp/a?b=ü http://例え.テスト/ http://한국.kr
12:30:05.123 09:15+02:00 😀 👨\u200d👩\u200d👧 ❤\ufe0f 1\ufe0f\u20e3
"""
WITH_SPACES = """
{{ x }}
{n, plural, one {# item} other {# items}}
<x id="1"/>
<g id='2'>
{{ 'a.b' | c }}
{n, plural, one {{n} item} other {# items}}
{% if x %}
<%= a.b %>
<?php x() ?>
[[x y]]
[gallery ids="1,2"]
\\cite[p. 3]{knuth}
$a_b = c$
"""
SPANS = [*WITHOUT_SPACES.split(), *WITH_SPACES.strip().splitlines()]
FRAMES = """
two {} dogs run.
{} dogs run
dogs run {}.
dogs ({}) run
a "{}", b
dogs run, {}!
你好{}，请看。
"""
ORDINARY = """
▁a ▁dog ▁run s ▁.
a well @-@ known ##AT##-##AT## wor@@ d
50 dogs
a 100%ige b
note: this
a < b > c
R&D & so
he's at 5
50 % der
a @ b
1:1 a
#1 a
C# a
a$ b
cost $5
a :
a::b
50% off
a %50
5` long, 6` long
I/O
5 km/h and/or 24/7, 3/4 of input/output
see (this): a; b
AT&T e.g. this (i.e. that), U.S./U.K.
$100 million, 5'10" or 10,000.50 kg
a/b. Then c.
The end.The start, the end.so it is
Er ging.ich bin.bin ich da.dat is
it is 3.5 or 1.2.3 or Python 3.py4 at 7.z
example.org, docs.python.org, U.S.A. and Ph.D. and e.g.pdf2 or a.pdf_x
one: (two) a) b; c
"""


@pytest.fixture(scope="module")
def translator() -> Translator:
    return echo_translator()


@pytest.mark.parametrize("span", SPANS)
def test_spans_leave_the_sentence_and_return_to_their_place(span: str) -> None:
    for frame in FRAMES.strip().splitlines():
        sentence = frame.replace("{}", span)
        protected = protect(sentence)
        assert span not in protected.text
        assert has_words(sentence)
        restored, links = protected.restore(protected.text, None)
        assert restored == sentence
        assert {source for source, _ in links} == {target for _, target in links}
        assert protected.restore(protected.text.upper(), None)[0] == frame.upper().replace(
            "{}", span
        )
    assert not has_words(f"{span} - {span}, 3.5")


@pytest.mark.parametrize("sentence", ORDINARY.strip().splitlines())
def test_ordinary_sentences_have_no_spans(sentence: str) -> None:
    assert protect(sentence) is None
    assert has_words(sentence)


@pytest.mark.parametrize("kind", [*IN_WORDS, *BETWEEN_WORDS], ids=lambda kind: kind.name)
def test_each_kind_of_span_has_its_example_and_not_its_counter_example(kind: SpanKind) -> None:
    assert re.fullmatch(kind.pattern, kind.example)
    assert not re.search(kind.pattern, kind.other)
    sentence = f"two {kind.example} dogs"
    assert [sentence[start:end] for start, end in spans_in(sentence)] == [kind.example]


def test_letters_that_touch_a_placeholder_stay_with_it() -> None:
    protected = protect("The {count}th of l'{name} and caf&eacute;s here")
    assert protected.text == "The of l' and here"
    assert (
        protected.restore("Der von l' und hier", None)[0]
        == "Der {count}th von l'{name} und caf&eacute;s hier"
    )


def test_formats_of_subtitles_do_not_take_the_words_beside_them() -> None:
    protected = protect("{\\i1}five{\\i0} six")
    assert protected.text == "five six"
    assert protected.restore("FIVE SIX", None)[0] == "{\\i1}FIVE{\\i0} SIX"


@pytest.mark.parametrize(
    ("sentence", "translation"),
    [
        (':name dogs "</12>"5www.example.org/~me5@user', "dogs"),
        ("This is test 1   0:08", "This is test 1"),
        ("0:08   dogs", "dogs"),
        ("dogs\u2003https://x.org\u00a0\u00a0run", "dogs\u00a0\u00a0run"),
    ],
)
def test_spans_return_with_the_space_around_them(sentence: str, translation: str) -> None:
    assert protect(sentence).restore(translation, None)[0] == sentence


def test_spans_follow_the_alignment() -> None:
    protected = protect("Ask {name} for %s today")
    assert protected.text == "Ask for today"
    restored, links = protected.restore("Heute nach fragen", [(0, 2), (1, 1), (2, 0)])
    assert restored == "Heute nach %s fragen {name}"
    assert links == [(0, 3), (1, 4), (2, 1), (3, 2), (4, 0)]


WORDS = st.sampled_from(
    [
        "dogs",
        "日本",
        "é",
        "(",
        ")",
        ",",
        ".",
        " ",
        " ",
        "  ",
        "\u2003",
        "\u00a0 ",
        "l'",
        "\u200b",
        "5",
        "-",
        "/",
        '"',
    ]
)
LINKS = st.one_of(st.none(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(WORDS, st.sampled_from(SPANS)), max_size=12).map("".join),
    st.text("Ab, .日", max_size=20),
    LINKS,
)
def test_no_span_is_lost_or_doubled(
    sentence: str,
    translation: str,
    links: list | None,
) -> None:
    sentence = sentence.strip()
    protected = protect(sentence)
    if protected is None:
        return
    assert protected.restore(protected.text, None)[0] == sentence
    restored, pairs = protected.restore(translation, links)
    rest = restored
    for core in sorted(
        [span.opening.strip() for span in protected.spans],
        key=len,
        reverse=True,
    ):
        assert core in rest
        rest = rest.replace(core, "\0", 1)
    assert all(i < len(sentence) and j < len(restored) for i, j in pairs)
    assert len(restored) <= len(translation) + len(sentence) + 2 * len(protected.spans)


@pytest.mark.slow
def test_translator_and_server_lose_none_of_1000_placeholders(
    translator: Translator, monkeypatch
) -> None:
    draw = random.Random(0)
    words = ["two", "hundred", "seven", "a", "red", "house"]
    seen: list[str] = []
    encode = translator.encode
    monkeypatch.setattr(
        translator,
        "encode",
        lambda line, *place, **how: (seen.append(line), encode(line, *place, **how))[1],
    )
    sentences = [
        " ".join(draw.sample(words, 3) + [f"{{n{number}}}", f"%{number}$s", draw.choice(words)])
        + "."
        for number in range(500)
    ]
    lists = list(
        translator.translate_nbest(
            sentences,
            2,
            protect=True,
            num_beams=2,
            alignment=True,
        )
    )
    with client_of(language_pair(translator, num_beams=2), max_characters=10**6) as client:
        request = {
            "q": sentences,
            "source": "en",
            "target": "de",
            "alternatives": 1,
        }
        answer = client.post("/translate", json=request).json()
        html = client.post(
            "/translate", json={**request, "alternatives": 0, "format": "html"}
        ).json()
    served = [
        [best, *others]
        for best, others in zip(answer["translatedText"], answer["alternatives"], strict=True)
    ]
    for number, hypotheses in enumerate(lists):
        texts = [one.text for one in hypotheses]
        assert texts[: len(served[number])] == served[number][: len(texts)]
        for text in [*texts, *served[number], html["translatedText"][number]]:
            assert text.count(f"{{n{number}}}") == text.count(f"%{number}$s") == 1
        assert all(max(j for _, j in one.alignment) < len(one.text.split()) for one in hypotheses)
    assert not any(sign in line for line in seen for sign in "{}%$")


def test_text_without_words_does_not_reach_the_model(translator: Translator, monkeypatch) -> None:
    lines = [
        "---",
        "12:30",
        "\u200b",
        "😀 😀",
        "https://example.com",
        "{name}: %s",
        "",
        "42",
        "\x00",
    ]
    lines += ["½", "¼ ⅓", "²", "Ⅳ", "①", "〇", "٣", "१२"]
    monkeypatch.setattr(translator, "encode", None)
    assert list(translator.translate(lines, protect=True)) == lines
    aligned = translator.translate_nbest(["--- 42"], protect=True, alignment=True)
    assert next(aligned)[0].alignment == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("vocabulary", "escaped"),
    [
        (["▁&quot;", "▁a"], True),
        (["Ġ&", "apos", "quot", ";"], True),
        (["&apos;s"], True),
        (["quot", "e", "a"], False),
        (["a", "b"], False),
    ],
)
def test_escapes_of_moses_are_words_of_models_trained_on_them(vocabulary, escaped):
    assert knows_escapes(vocabulary) == escaped
    for sentence in ("a man &apos;s &quot; hat &quot;", "&quot; a &quot;"):
        assert (protect(sentence, escaped) is None) == escaped
    protected = protect("a man &apos;s {hat} &nbsp; b", escaped)
    assert ("&apos;s" in protected.text) == escaped
    assert "{hat}" not in protected.text
