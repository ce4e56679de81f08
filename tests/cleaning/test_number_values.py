"""Numbers are compared by value, whatever the script, grouping and unit they are written in."""

import pytest

from hf_vanilla_transformer.cleaning.number_values import numbers_of


def differ(source, target):
    first, second = numbers_of(source), numbers_of(target)
    return first.lacks_one_of(second) and second.lacks_one_of(first)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("He is 45 years old.", "عمره ٤٥ سنة."),
        ("in 2016", "در سال ۲۰۱۶"),
        ("45 years", "४५ वर्ष"),
        ("45 years old", "４５岁"),
        ("4.5 percent", "٤٫٥ ٪"),
        ("1,234 people", "١٬٢٣٤ شخصا"),
        ("10,000 people", "10\u202f000 personnes"),
        ("10,000 people", "10\u00a0000 personnes"),
        ("10,000 people", "10 000 personnes"),
        ("1,000,000", "1.000.000"),
        ("10'000 Franken", "10,000 francs"),
        ("1 234,56", "1,234.56"),
        ("12,34,567 rupees", "1.234.567 Rupien"),
        ("In 2016 3 people died", "2016 starben 3 Menschen"),
        ("2, 3 and 4", "2,3 und 4"),
        ("2.00 euros", "2 Euro"),
        ("2.5", "2,5"),
        ("3.5 million", "3,500,000"),
        ("1.5 Mio. Euro", "1,500,000 euros"),
        ("10,000 yuan", "1万元"),
        ("120 million yen", "1億2000万円"),
        ("20 million yen", "2千万円"),
        ("12,345 yen", "1万2,345円"),
        ("12,345 won", "1만 2,345원"),
        ("120 million people", "1억 2,000만 명"),
        ("1,234,567", "12,34,567"),
        ("2.5 million people", "250万人"),
        ("500,000 baht", "5แสนบาท"),
        ("3,500,000 baht", "3.5 ล้านบาท"),
        ("3,500,000 lira", "3,5 milyon lira"),
        ("3.5 billion rupiah", "3.500.000.000 rupiah"),
        ("3,500,000 dong", "3,5 triệu đồng"),
        ("3,500,000 euros", "3,5 miljoonaa euroa"),
        ("3,500,000", "3,5 мільйона"),
        ("3,500,000", "۳٫۵ میلیون"),
        ("3,500,000", "3.5 מיליון"),
        ("3,500,000,000", "3,5 Milliarden"),
        ("3,500,000,000,000", "3,5 Billionen"),
        ("3,500,000,000", "3.5 billion"),
        ("1,250 riel", "១.២៥០ រៀល"),
        ("1,250", "໑.໒໕໐"),
        ("1,250", "၁,၂၅၀"),
        ("12", "༡༢"),
        ("12", "߁߂"),
        ("12", "𞥑𞥒"),
        ("12", "᠑᠒"),
        ("3 lakh", "300,000"),
        ("at 5 p.m.", "um 17 Uhr"),
        ("at 8:30", "à 8h30"),
        ("half past 8", "um 8.30 Uhr"),
        ("2010-05-12", "12.05.2010"),
        ("May 5, 2010", "5.5.2010"),
        ("May 12, 2010", "2010年5月12日"),
        ("on May 5", "am 5.5. um"),
        ("in 2016", "พ.ศ. 2559"),
        ("in 2016", "民國105年"),
        ("in 2023", "عام 1445"),
        ("in 2016", "در سال ۱۳۹۵"),
        ("in 2016", "ปี ๒๕๕๙"),
        ("in 1988", "昭和63年"),
        ("the 1990s", "die 90er"),
        ("2010–12", "2010–2012"),
        ("10 miles away", "16 km entfernt"),
        ("5 feet tall", "1,5 m groß"),
        ("70 °F", "21 °C"),
    ],
)
def test_equal_numbers_are_equal_in_every_notation(source, target):
    assert not differ(source, target) and not differ(target, source)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("page 7001", "Seite 9002"),
        ("45 years", "46 Jahre"),
        ("He is 45.", "عمره ٤٦."),
        ("10,000 people", "100 000 personnes"),
        ("2.5", "2,6"),
        ("in 2016", "in 2017"),
        ("in 2016", "عام 2015"),
        ("10 miles in 3 hours", "16 km in 4 Stunden"),
        ("3 dogs and 10 cats", "3 Hunde und 11 Katzen"),
        ("5 km", "50 km"),
        ("3 million", "4,000,000"),
        ("2千万円", "30 million yen"),
        ("1,234", "1.235"),
    ],
)
def test_different_numbers_differ(source, target):
    assert differ(source, target) and differ(target, source)
