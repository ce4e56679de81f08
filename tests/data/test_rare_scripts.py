"""Scripts that few corpora have, with quotation marks, digits, dates, addresses and invisible characters."""

import unicodedata

import pytest

from hf_vanilla_transformer.data import train_tokenizer
from hf_vanilla_transformer.data.cleaning import PairRow, judge_pairs
from hf_vanilla_transformer.data.cleaning_rules import RULES
from hf_vanilla_transformer.evaluation.bleu_tokenizers import fitting_tokenizer

ENGLISH = ["I go to the market with a friend", "He reads a book in the garden", "We drink tea every morning"]
#: script -> code of the language, the three sentences, digits
SCRIPTS = {
    "Khmer": (
        "km",
        ["ខ្ញុំទៅផ្សារជាមួយមិត្តភក្តិ", "គាត់អានសៀវភៅនៅក្នុងសួន", "យើងផឹកតែរៀងរាល់ព្រឹក"],
        "០១២៣៤៥៦៧៨៩",
    ),
    "Lao": (
        "lo",
        ["ຂ້ອຍໄປຕະຫຼາດກັບໝູ່", "ລາວອ່ານປຶ້ມຢູ່ໃນສວນ", "ພວກເຮົາດື່ມຊາທຸກເຊົ້າ"],
        "໐໑໒໓໔໕໖໗໘໙",
    ),
    "Burmese": (
        "my",
        ["ကျွန်တော်သူငယ်ချင်းနဲ့ဈေးသွားတယ်", "သူပန်းခြံထဲမှာစာအုပ်ဖတ်တယ်", "ကျွန်တော်တို့မနက်တိုင်းလက်ဖက်ရည်သောက်တယ်"],
        "၀၁၂၃၄၅၆၇၈၉",
    ),
    "Tibetan": (
        "bo",
        ["ང་གྲོགས་པོ་དང་མཉམ་དུ་ཁྲོམ་ལ་འགྲོ", "ཁོས་ལྡུམ་རའི་ནང་དེབ་ཀློག་གི་འདུག", "ང་ཚོས་ཞོགས་པ་རེ་རེར་ཇ་འཐུང"],
        "༠༡༢༣༤༥༦༧༨༩",
    ),
    "Cherokee": (
        "chr",
        ["ᎠᏴ ᎠᏆᎵᏂ ᏗᎦᎾᏗᏫᏍᏗᏱ ᏙᎨᏏ", "ᎤᏩᏌ ᎪᏪᎵ ᎠᎪᎵᏰᎠ ᎠᏫᏒᏗᏱ", "ᎢᎦᏓᏛᏁᎵ ᏑᎾᎴ ᏂᏓᏙᏓᏈᏒ"],
        "0123456789",
    ),
    "N'Ko": (
        "nqo",
        ["ߒ ߘߌ߫ ߕߊ߯ ߟߐ߯ߝߍ߫ ߒ ߕߋ߬ߙߌ", "ߊ߬ ߦߋ߫ ߞߊ߬ߝߊ ߞߊ߬ߙߊ߲߫ ߠߊ߫", "ߊ߲ ߦߋ߫ ߕߋ ߡߌ߲߫ ߠߊ߫ ߛߐ߰ߡߊ"],
        "߀߁߂߃߄߅߆߇߈߉",
    ),
    "Adlam": (
        "ff",
        ["𞤃𞤭 𞤴𞤢𞤸𞤭𞥅 𞤤𞤵𞥅𞤥𞤮 𞤫 𞤧𞤫𞤸𞤭𞤤𞤢𞤲", "𞤃𞤮 𞤶𞤢𞤲𞥆𞤢𞤲𞤭 𞤣𞤫𞤬𞤼𞤫𞤪𞤫 𞤲𞤣𞤫𞤪", "𞤃𞤭𞤯𞤫𞤲 𞤴𞤢𞤪𞤢 𞤢𞤼𞤢𞤴𞤫 𞤲𞤣𞤫"],
        "𞥐𞥑𞥒𞥓𞥔𞥕𞥖𞥗𞥘𞥙",
    ),
    "Mongolian": (
        "mn",
        ["ᠪᠢ ᠨᠠᠢᠵᠠ ᠲᠠᠢ ᠵᠠᠬ᠎ᠠ ᠳᠤ ᠣᠴᠢᠪᠠ", "ᠲᠡᠷᠡ ᠨᠣᠮ ᠤᠩᠰᠢᠵᠤ ᠪᠠᠢᠨ᠎ᠠ", "ᠪᠢᠳᠡ ᠡᠷᠲᠡ ᠪᠦᠷᠢ ᠴᠠᠢ ᠤᠤᠭᠤᠳᠠᠭ"],
        "᠐᠑᠒᠓᠔᠕᠖᠗᠘᠙",
    ),
    "Armenian": (
        "hy",
        ["Ես ընկերոջս հետ գնում եմ շուկա", "Նա գիրք է կարդում այգում", "Մենք ամեն առավոտ թեյ ենք խմում"],
        "0123456789",
    ),
    "Georgian": (
        "ka",
        ["მე მეგობართან ერთად ბაზარში მივდივარ", "ის ბაღში წიგნს კითხულობს", "ჩვენ ყოველ დილით ჩაის ვსვამთ"],
        "0123456789",
    ),
    "Arabic presentation forms": (
        "ar",
        ["ﺃﺫﻫﺐ ﺇﻟﻰ ﺍﻟﺴﻮﻕ ﻣﻊ ﺻﺪﻳﻘﻲ", "ﻳﻘﺮﺃ ﻛﺘﺎﺑﺎ ﻓﻲ ﺍﻟﺤﺪﻳﻘﺔ", "ﻧﺸﺮﺏ ﺍﻟﺸﺎﻱ ﻛﻞ ﺻﺒﺎﺡ"],
        "٠١٢٣٤٥٦٧٨٩",
    ),
    "Hebrew points": (
        "he",
        ["אֲנִי הוֹלֵךְ לַשּׁוּק עִם חָבֵר", "הוּא קוֹרֵא סֵפֶר בַּגִּנָּה", "אֲנַחְנוּ שׁוֹתִים תֵּה כָּל בֹּקֶר"],
        "0123456789",
    ),
    "Hangul jamo": (
        "ko",
        ["나는 친구와 시장에 간다", "그는 정원에서 책을 읽는다", "우리는 매일 아침 차를 마신다"],
        "0123456789",
    ),
    "half-width kana": (
        "ja",
        ["ﾜﾀｼﾊﾄﾓﾀﾞﾁﾄｲﾁﾊﾞﾆｲｸ", "ｶﾚﾊﾆﾜﾃﾞﾎﾝｦﾖﾑ", "ﾜﾀｼﾀﾁﾊﾏｲｱｻｵﾁｬｦﾉﾑ"],
        "０１２３４５６７８９",
    ),
    "rare Chinese characters": (
        "zh",
        ["我𠮷朋友𠀀一起去市场", "他在𪚥花园里看书", "我们每天早上喝茶"],
        "0123456789",
    ),
    "Inuktitut syllabics": (
        "iu",
        ["ᐊᒐᑉᐸᖕᓂᐊᖅᑐᖓ ᐱᖃᓐᓂᕋᓗ", "ᐅᖃᓕᒫᖅᑐᖅ ᓯᓚᒥ", "ᑎᑐᖅᐸᒃᑐᒍᑦ ᐅᓪᓛᑕᒫᑦ"],
        "0123456789",
    ),
    "Tamil": (
        "ta",
        ["நான் நண்பருடன் சந்தைக்கு போகிறேன்", "அவன் தோட்டத்தில் புத்தகம் படிக்கிறான்", "நாங்கள் தினமும் காலையில் தேநீர் குடிக்கிறோம்"],
        "௦௧௨௩௪௫௬௭௮௯",
    ),
}
#: in English and in the other language. a and b are sentences, the numbers have the digits of the language
FORMS = [
    ("{a}.", "{a}."),
    ("“{a},” {b}…", "«\u00a0{a}\u00a0», {b}…"),
    ("{a} at 8:30.", "{a} {t}."),
    ("{a} on {y}-05-12.", "{a} 12.05.{y}."),
    ("{a} for ${n}.", "{a} {n} $."),
    ("{a} (15%).", "{a} ({p}\u202f%)."),
    ("\u200e{a}\u200f.", "\u202b{a}\u202c."),
    ("soft\u00adly {a}", "{a}\u00ad{b}"),
    ("{a} 👨‍👩‍👧‍👦🏳️‍🌈 🇩🇪", "{a} 👨‍👩‍👧‍👦🏳️‍🌈 🇩🇪"),
    ("{a}: https://a.org/b, {b}", "{a}: https://a.org/b、{b}"),
    ("{a}\u00a0— {b}", "{a}\u3000— {b}"),
    ("{a}?", "{a}؟"),
    ("{a} 3.5 kg", "{a} {k} kg"),
    ("mail a@b.org: {a}", "{a}a@b.org{b}"),
    ("{a} €1.2 million", "{a} 1,2 million €"),
    ("{a}\ufeff", "\ufeff{a}"),
    ("H₂O, m², ½: {a}", "H₂O, m², ½: {a}"),
]


def rows(named: bool) -> list[PairRow]:
    made = []
    for code, sentences, digits in SCRIPTS.values():
        local = str.maketrans("0123456789", digits)
        for number, (english, other) in enumerate(FORMS * 6):
            first, second = number % 3, number // 3 % 3
            amount, year = 1000 + 7919 * number, 1900 + number
            source = english.format(a=ENGLISH[first], b=ENGLISH[second], n=f"{amount:,}", y=year)
            values = {"n": f"{amount:,}".replace(",", "."), "y": str(year), "t": "8:30", "p": "15", "k": "3,5"}
            values = {name: value.translate(local) for name, value in values.items()}
            own = [unicodedata.normalize("NFD", text) if code == "ko" else text for text in sentences]
            target = other.format(a=own[first], b=own[second], **values)
            made.append(PairRow(len(made) + 1, source, target, ("en", code) if named else ("", "")))
    return made


@pytest.mark.parametrize("named", [True, False], ids=["directions", "no codes"])
def test_right_pairs_of_every_script_are_kept(named: bool) -> None:
    rules = [rule for rule in RULES if "duplicate" not in rule]
    judged, _ = judge_pairs(rows(named), rules)
    assert [(rule, row.pair) for rule, row in judged if rule] == []


def test_text_of_every_script_is_restored() -> None:
    texts = [text for row in rows(True) for text in row.pair]
    tokenizer = train_tokenizer(texts[::40], vocab_size=400)
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts


@pytest.mark.parametrize("script", SCRIPTS)
def test_bleu_has_the_tokenizer_of_the_language(script: str) -> None:
    own = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", "km": "char", "lo": "char", "my": "char", "bo": "char"}
    code, sentences, _ = SCRIPTS[script]
    form = "NFD" if code == "ko" else "NFC"
    expected = own.get(code, "13a")
    if "-" in expected:
        pytest.importorskip(f"mecab_{code}" if code == "ko" else "MeCab", reason="sacrebleu[ja,ko] is not installed")
    assert fitting_tokenizer([unicodedata.normalize(form, text) for text in sentences]) == expected
