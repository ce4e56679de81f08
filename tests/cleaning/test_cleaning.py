"""Cleaning: damage that is planted in good pairs is found, by its rule, and good pairs are kept."""

import pytest
from datasets import Dataset

from hf_vanilla_transformer.cleaning.damaged_characters import has_damaged_characters
from hf_vanilla_transformer.cleaning.judging import PairRow, judge_pairs, sample_warnings
from hf_vanilla_transformer.cleaning.report import report_page, report_text
from hf_vanilla_transformer.cleaning.rules import RULES, PairLimits
from hf_vanilla_transformer.corpora import number_pairs
from hf_vanilla_transformer.text.text_keys import sentence_key
from hf_vanilla_transformer.utils.errors import UserError

ADJECTIVES = {
    "small": "kleine",
    "old": "alte",
    "red": "rote",
    "new": "neue",
    "long": "lange",
    "quiet": "leise",
}
NOUNS = {
    "house": "Häuser",
    "street": "Straßen",
    "garden": "Gärten",
    "book": "Bücher",
    "door": "Türen",
    "fish": "Fische",
}
GOOD = [
    (
        f"We saw {a} and {b} {noun} {number} {other} now.",
        f"Wir sahen eben {x} und {y} {thing} bei {number} {place}.",
    )
    for number, (a, x), (b, y), (noun, thing), (other, place) in zip(
        range(10, 400), *[[*ADJECTIVES.items()] * 65] * 2, *[[*NOUNS.items()] * 65] * 2, strict=True
    )
]

DAMAGE = {
    "length": lambda a, b: (a * 30, b * 30),
    "mojibake": lambda a, b: (a, b.replace("sahen", "fÃ¼r")),
    "markup": lambda a, b: (f"<b>{a}</b>", b),
    "addresses": lambda a, b: (f"{a} See www.example.org/a.", f"{b} Siehe www.example.org/b."),
    "copy": lambda a, b: (a, a),
    "script": lambda a, b: (a, "Сегодня мы видели старые дома у дороги и книги."),
    "repetition": lambda a, b: (a, b.replace("eben", "eben eben eben")),
    "numbers": lambda a, b: (f"{a} Page 7001.", f"{b} Seite 9002."),
    "capitals": lambda a, b: (a, b.upper()),
    "spaces": lambda a, b: (a, "".join(filter(str.isalpha, b + "danach schlafen"))),
    "ratio": lambda a, b: (a, "Wir."),
    "language": lambda a, b: (a, "Nous avons vu aujourd'hui les vieilles maisons près des rues."),
    "overlap": lambda a, b: (a, "Die Katze schläft lange auf dem warmen alten Dach."),
}


def judge(pairs, *rules, **options):
    rows = [PairRow(line, *pair) for line, pair in enumerate(pairs, start=1)]
    judged, report = judge_pairs(rows, rules or tuple(RULES), **options)
    return [rule for rule, _ in judged], report


def test_good_pairs_are_kept():
    reasons, report = judge(GOOD, languages=None)
    assert (
        reasons == [None] * len(GOOD)
        and report.summary() == f"kept {len(GOOD)} of {len(GOOD)} pairs"
    )


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        (("见https://a.org/b。我们走吧", "see https://a.org/b. let us go"), None),
        (("ดูhttps://a.org/bนะ", "see https://a.org/b ok"), None),
        (("我们今天去北京大学学习", "我们今天去北京大学，学习。"), "copy"),
        (("我们今天去北京大学学习", "昨天他很高兴地在家吃饭"), None),
        (("mail a@b.org now", "请发邮件到a@b.org联系我们"), None),
        (("see https://a.org/b, then", "انظر https://a.org/b، ثم"), None),
        (("see https://a.org/b.", "https://a.org/b를 보세요."), None),
        (("go to www.a.org.", "www.a.org'a gidin."), None),
        (("it is at www.a.org.", "यह www.a.org। पर है"), None),
        (("“https://a.org/”", "« https://a.org »"), None),
        (("see http://www.A.org/b", "siehe https://www.a.org/b"), None),
        (("https://de.b.org/wiki/Öl", "https://de.b.org/wiki/Öl ist"), None),
        (("mail a@b.org", "发邮件到a@c.org"), "addresses"),
        (("see https://a.org/b.", "https://a.org/c를 보세요."), "addresses"),
    ],
)
def test_rules_count_words_without_spaces(pair, rule):
    assert judge([pair], "addresses", "copy")[0] == [rule]


@pytest.mark.parametrize("rule", DAMAGE)
def test_planted_damage_is_found_by_its_rule(rule):
    if rule == "language":
        pytest.importorskip("py3langid")
    damaged = {index: DAMAGE[rule](*GOOD[index]) for index in range(5, len(GOOD), 40)}
    pairs = [damaged.get(index, pair) for index, pair in enumerate(GOOD)]
    excluded = ["die Katze schläft lange auf dem warmen alten Dach"] if rule == "overlap" else []
    rules = [name for name in RULES if name not in ("duplicate", "near_duplicate")]
    languages = ("en", "de") if rule == "language" else None
    reasons, report = judge(pairs, *rules, excluded=excluded, languages=languages)
    assert {index: reason for index, reason in enumerate(reasons) if reason} == dict.fromkeys(
        damaged, rule
    )
    assert report.examples[rule][0] == (6, *damaged[5]) and len(report.examples[rule]) == min(
        10, len(damaged)
    )
    assert rule in report_text(report) and RULES[rule][0] in report_page(report, "read")


def test_language_that_is_not_detected_is_named_once(caplog):
    pytest.importorskip("py3langid")
    assert judge(GOOD[:3], "language", languages=("en", "deu_Latn"))[0] == [None] * 3
    assert [record.args for record in caplog.records] == [("deu_Latn",)]


CAPITALS = [
    ("ᎯᎠ ᏗᎧᎾᏩᏛᏍᏗ ᎠᎴ ᏧᎾᏓᎴᏅᏓ ᏴᏫ ᎤᎾᏓᏤᎵᏛ ᎤᎵᏍᎨᏛ", "This is about the rights of all different people."),
    ("THE GOVERNMENT ADOPTS A NEW LAW", "მთავრობა ახალ კანონს იღებს დღეს საღამოს"),
    (
        "OECD、UNESCO、UNICEF、NATO、IMF 和其他国际组织的成员国代表今天在这里开会讨论新的计划",
        "Members of the OECD met today.",
    ),
    ("THE GOVERNMENT ADOPTS A NEW LAW", "정부가 새로운 법을 오늘 저녁에 채택한다"),
]


@pytest.mark.parametrize("pair", CAPITALS)
def test_capitals_of_scripts_without_sentence_case_are_kept(pair):
    assert judge([pair, pair[::-1]], "capitals")[0] == [None, None]


@pytest.mark.parametrize(
    "text",
    [
        "ΤΟ ΜΙΚΡΟ ΠΑΙΔΙ ΔΙΑΒΑΖΕΙ ΒΙΒΛΙΟ",
        "МАЛЕНЬКИЙ МАЛЬЧИК ЧИТАЕТ КНИГУ",
        "ՓՈՔՐԻԿ ՏՂԱՆ ԳԻՐՔ Է ԿԱՐԴՈՒՄ",
    ],
)
def test_capitals_on_one_side_are_found(text):
    pairs = [("the little boy reads a book", text), ("THE LITTLE BOY READS A BOOK", text)]
    assert judge(pairs, "capitals")[0] == ["capitals", None]


def test_limits_of_shares_and_lengths_are_inside():
    words = [("a word", "a" * 40), ("a word", "a" * 40 + "."), ("a word", "a" * 41)]
    assert judge([*GOOD, *words], "spaces")[0][-3:] == [None, None, "spaces"]
    halves = [("ab", "ab γδ"), ("ab", "ab γδε")]
    assert judge(halves, "script", scripts=(frozenset({"LATIN"}),) * 2)[0] == [None, "script"]


def test_long_words_that_a_language_has_are_kept():
    numbers = number_pairs(200, seed=1, held_out=1)["train"]
    pairs = list(zip(numbers["source"], numbers["target"], strict=True))
    assert max(len(word) for _, target in pairs for word in target.split()) > 50
    assert judge(pairs, "spaces")[0] == [None] * len(pairs)
    address = "https://example.org/" + "path" * 20
    texts = ["รถไฟวิ่งไปทางเหนือทุกวันและกลับมาในตอนเย็นของทุกวันอาทิตย์", address, "-" * 60, "a/b" * 30]
    assert judge([("x", text) for text in texts], "spaces")[0] == [None] * len(texts)
    assert judge([*GOOD, ("x" * 41, "x")], "spaces")[0][-1] == "spaces"


CLOSE = [
    ("Vi har ikke sett det før i dag", "Vi har ikke set det før i dag"),
    ("Hun leser en bok i hagen nå", "Hun læser en bog i haven nu"),
    ("Hunden løper i skogen hver dag", "Hunden løber i skoven hver dag"),
    ("De kommer hjem i morgen kveld", "De kommer hjem i morgen aften"),
]


def test_sentences_of_close_languages_are_no_copies():
    assert judge(CLOSE * 5, "copy")[0] == [None] * 20
    copies = [(text, text) for text, _ in GOOD[:60]]
    assert judge([*GOOD[:60], *copies], "copy")[0] == [None] * 60 + ["copy"] * 60


def test_second_of_two_equal_pairs_is_dropped():
    first, second = GOOD[:2]
    loud = (first[0].upper().replace(".", " !"), first[1].upper())
    reasons, _ = judge([first, second, first, loud, (first[0], first[1].replace("eben", "jetzt"))])
    assert reasons == [None, None, "duplicate", "near_duplicate", None]


@pytest.mark.parametrize(
    "pair",
    [
        ("Paris", "Paris"),
        ("Windows 10 Pro", "Windows 10 Pro"),
        ("We have 3 dogs.", "Wir haben drei Hunde."),
        ("1,234.5 km", "1.234,5 km"),
        ("See www.example.org.", "Siehe www.example.org!"),
        ("<b>Now</b> it is <i>late</i>", "<b>Jetzt</b> ist es <i>spät</i>"),
        ("very very very good", "sehr sehr sehr gut"),
        ("naïve café à la carte", "naives Café à la carte mit Kuchen"),
        ("Two Greek letters: α and β", "Zwei griechische Buchstaben: α und β"),
        ("...", "…"),
        ("Well . . . I see", "Nun… ich sehe"),
        ("* * *", "***"),
        ("Name: ________", "Name: …"),
        ("100000000 people live there", "Dort leben 100.000.000 Menschen"),
        ("THE ROAD TO THE NORTH OF IT", "DIE STRAßE IN DEN NORDEN"),
        ("THE ROAD TO THE NORTH", "Die lange Straße in den weiten Norden"),
    ],
)
def test_unusual_translations_are_kept(pair):
    limits = {"ratio": (0.0, 1.0), "scripts": (frozenset({"LATIN"}),) * 2}
    assert judge([pair], **limits)[0] == [None]


#: right pairs with characters that look like a wrong encoding to a simple rule
TYPOGRAPHY = [
    "Er sagte „Viel Spaß“.",
    "Das macht Spaß… wirklich",
    "»Spaß«",
    "Strauß’ Walzer",
    "„MENÜ“",
    "«\u00a0liberté\u00a0»",
    "«\u00a0Cité\u00a0»",
    "SOCIÉTÉ\u00a0: un homme",
    "«\u00a0çà et là\u00a0»",
]


@pytest.mark.parametrize("text", TYPOGRAPHY)
def test_typography_is_no_wrong_encoding(text):
    assert judge([("x", text)], "mojibake")[0] == [None]
    misread = text.encode().decode("latin-1")
    assert judge([("x", misread)], "mojibake")[0] == ["mojibake"]


@pytest.mark.parametrize(
    "text", ["für die Brücke", "Příliš žluťoučký kůň", "Привет, мир", "لا شيء هنا", "it’s “new”"]
)
def test_text_of_a_wrong_encoding_is_found(text):
    misread = text.encode().decode("latin-1")
    twice = misread.encode().decode("latin-1")
    assert judge([("x", text), ("x", misread), ("x", twice)], "mojibake")[0] == [
        None,
        "mojibake",
        "mojibake",
    ]


@pytest.mark.parametrize(
    ("text", "encoding", "other"),
    [
        ("Über die Straße gehen", "utf-8", "cp1251"),
        ("Où est passé ce garçon ?", "utf-8", "cp1251"),
        ("مرحبا بكم في المدينة القديمة", "utf-8", "cp1256"),
        ("Привет, как дела сегодня", "koi8_r", "cp1251"),
        ("Привет, как дела сегодня", "cp1251", "koi8_r"),
        ("Привет, как дела сегодня", "cp1251", "latin-1"),
    ],
)
def test_text_of_another_old_encoding_is_found(text, encoding, other):
    misread = text.encode(encoding).decode(other)
    assert judge([("x", text), ("x", misread)], "mojibake")[0] == [None, "mojibake"]


@pytest.mark.parametrize(
    "text", ["мРНК и тРНК", "Nããããão!", "þýðing á íslensku", "Ні, дякую. Її брат", "«В»", "طظ"]
)
def test_rare_but_right_words_are_no_wrong_encoding(text):
    assert judge([("x", text)], "mojibake")[0] == [None]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("SMSы для VIPов, миниUSB, iPhoneом, 10 °С", None),
        ("хIума а, гӀо а", None),
        ("Quoi ?Non, a?B, 何?いい", None),
        ("ชาย\u200bคน и \u200bконец", None),
        ("see http://example.org/a?b=c", None),
        ("K сожaлению", "mojibake"),
        ("ein Mаnn", "mojibake"),
        ("Gr??e und f?r", "mojibake"),
        ("ein\u200bes Tages", "mojibake"),
    ],
)
def test_damage_within_words_is_found(text, rule):
    assert judge([("x", text)], "mojibake")[0] == [rule]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("लड़का खाता है", "लड़की खाती है"),
        ("ดี", "ดู"),
        ("ป่า", "ป้า"),
        ("ကား", "ကို"),
        ("శాల", "శిల"),
        ("סֵפֶר", "סָפַר"),
    ],
)
def test_vowel_signs_and_tones_belong_to_words(first, second):
    assert sentence_key(first) != sentence_key(second) and sentence_key(first) == sentence_key(
        f" {first}!"
    )
    assert judge([("a", first)], "overlap", excluded=[second])[0] == [None]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("He codes in C++.", "He codes in C#."),
        ("It costs $5.", "It costs €5."),
        ("50% off", "50 off"),
        ("It is -5 °C.", "It is 5 °C."),
        ("5 + 3", "5 − 3"),
        ("Great 😀", "Great 😡"),
    ],
)
def test_signs_that_change_a_sentence_are_compared(first, second):
    assert sentence_key(first) != sentence_key(second) and sentence_key(first) == sentence_key(
        f" {first.upper()}!"
    )
    assert judge([("a", first)], "overlap", excluded=[second])[0] == [None]
    assert sentence_key("R&D at −5 °C") == sentence_key("r & d – at -5°C …")


def test_limits_are_those_of_a_direction():
    """Scripts and lengths of one language are none of another, also in a text that is sorted by language."""
    languages = {
        "de": "ein Hund läuft durch den Garten",
        "th": "หมาวิ่งในสวน",
        "zh": "狗在跑",
        "ar": "كلب يركض في الحديقة",
    }
    text = "a dog runs through the garden"
    rows, line = [], 0
    for code, translation in languages.items():
        for number in range(60):
            line += 1
            rows.append(PairRow(line, f"{text} {number}", f"{translation} {number}", ("en", code)))
    wrong = PairRow(line + 1, f"{text} 99", languages["th"] + " 99", ("en", "zh"))
    for order in ([*rows, wrong], [*rows[::2], wrong, *rows[1::2]]):
        dropped = [row.line for rule, row in judge_pairs(order)[0] if rule]
        assert dropped == [wrong.line]
    for unnamed in ([row._replace(direction=("", "")) for row in rows], rows[:60] + rows[-6:]):
        assert not any(rule for rule, _ in judge_pairs(unnamed)[0])


def test_mark_of_a_language_names_the_direction():
    marked = [
        PairRow(n, f">>{code}<< dog {n}", text)
        for code, text, n in [("de", "Hund 1", 1), ("th", "หมา 2", 2)]
    ]
    assert [row.language for row in marked] == [("", "de"), ("", "th")]


def test_pair_of_two_directions_is_no_duplicate():
    rows = [
        PairRow(n, "Paris", "Paris", ("en", code))
        for n, code in enumerate(("de", "fr", "de"), start=1)
    ]
    assert [rule for rule, _ in judge_pairs(rows)[0]] == [None, None, "duplicate"]


def test_best_of_near_duplicates_is_kept():
    right = ("Men wearing hats.", "Männer mit Hüten.")
    loud = ("MEN WEARING HATS  !", "MÄNNER MIT HÜTEN !")
    assert judge([loud, right, right])[0] == ["near_duplicate", None, "duplicate"]
    assert judge([right, loud])[0] == [None, "near_duplicate"]
    # the better one of two breaks another rule
    tagged = (f"<b>{right[0]}", right[1])
    assert judge([loud, tagged], "markup", "near_duplicate")[0] == [None, "markup"]


def test_entities_on_one_side_become_characters():
    pairs = [
        ("Smith &amp; Co", "Smith & Co"),
        ("a &amp;amp; b", "a & b"),
        ("R&D", "F&E"),
        ("&lt;b&gt; x", "x"),
    ]
    rows = [
        PairRow(n, *pair) for n, pair in enumerate([*pairs, ("a &amp; b", "c &amp; d")], start=1)
    ]
    judged, report = judge_pairs(rows, ["markup"])
    rules, kept = zip(*judged, strict=True)
    assert rules == (None, None, None, "markup", None)
    assert [row.source for row in kept] == ["Smith & Co", "a & b", "R&D", "<b> x", "a &amp; b"]
    assert report.repaired == 2


@pytest.mark.parametrize(
    "tags", [("a<br/>b", "c<br>d"), ("<B>a</B>", "<b>c</b>"), ("a<br />", "c<BR>")]
)
def test_spellings_of_a_tag_are_one(tags):
    assert judge([tags], "markup")[0] == [None]
    assert judge([(tags[0], "c")], "markup")[0] == ["markup"]


def test_scripts_come_from_the_text():
    pairs = [("犬が走ります", "The dog runs"), ("カタカナとひらがな", "Katakana and hiragana")] * 20
    assert PairLimits.of_sample(pairs).scripts == (frozenset({"CJK"}), frozenset({"LATIN"}))
    assert judge([*pairs, ("dogs run", "The dogs run fast")], "script")[0][-1] == "script"


def test_unknown_rule_is_refused():
    with pytest.raises(UserError, match="'spelling'.*numbers"):
        judge(GOOD, "spelling")


def test_training_warns_of_frequent_damage():
    pairs = [DAMAGE["copy"](*pair) if index % 10 == 3 else pair for index, pair in enumerate(GOOD)]
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    table = Dataset.from_dict(
        {"source": sources, "target": targets, "line": range(1, len(pairs) + 1)}
    )
    (warning,) = sample_warnings(table)
    assert "10%" in warning and "lines 4, 14, 24" in warning
    assert list(sample_warnings(table.select(range(3)))) == []
    escaped = [
        text.replace(" and ", " &amp; ") if row % 5 == 0 else text
        for row, text in enumerate(table["source"])
    ]
    warnings = list(sample_warnings(table.remove_columns("source").add_column("source", escaped)))
    assert any("about 20% of the training pairs: entities" in line for line in warnings)


@pytest.mark.parametrize("mark", ["»", "›", "”", "’"])
def test_quotation_that_starts_with_a_closing_mark_is_no_damage(mark):
    """Danish, German and Slovene books open with », Finnish and Swedish ones with ”."""
    for letter in "ÄÖÜÅØÆŽŠČĆÉ":
        for text in (
            f"{mark}{letter}va{mark} sagde han.",
            f"Hon sa: {mark}{letter}r du där?{mark}",
            f"({mark}{letter}l)",
        ):
            assert not has_damaged_characters(text)
            assert has_damaged_characters(text.encode().decode("cp1252", "replace"))
