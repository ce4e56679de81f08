"""The table of both benchmarks, from invented figures."""

from typing import Any

from scripts.benchmarks.report import Measurement, table


def measurement(
    engine: str, setting: dict[str, int], rates: list[float], **more: Any
) -> Measurement:
    one = Measurement(engine, setting, more)
    for rate in rates:
        one.add(1000 / rate, 1000, 400.0 if engine.startswith("marian") else 100.0)
    return one


DECODING = [
    measurement("ours_fp32", {"batch": 16, "beams": 4}, [300.0, 900.0, 450.0], BLEU=40.0),
    measurement("ours_bf16", {"batch": 16, "beams": 4}, [900.0] * 3),
    measurement("marian_fp32", {"batch": 16, "beams": 4}, [150.0] * 3),
    measurement("ctranslate2_int8", {"batch": 16, "beams": 4}, [500.0] * 3),
    measurement("ours_fp32", {"batch": 64, "beams": 4}, [600.0] * 3),
    measurement("marian_fp32", {"batch": 64, "beams": 1}, [600.0] * 3),
]
TRAINING = [
    measurement("ours_fp32", {"processes": 1}, [300.0, 100.0, 200.0], padding=0.05),
    measurement("marian_grouped_fp32", {"processes": 1}, [100.0] * 3, padding=0.2),
    measurement("ours_fp32", {"processes": 2}, [380.0] * 3),
]


def rows(measurements: list[Measurement]) -> list[dict[str, str]]:
    head, _, *lines = (
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in table(measurements).splitlines()
    )
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_table_compares_medians_in_the_same_precision_and_setting() -> None:
    found = rows(DECODING)
    assert [row["target tokens/s"] for row in found] == ["450", "900", "150", "500", "600", "600"]
    assert (
        found[0] | {"spread": "133%", "beams": "4", "BLEU": "40.00", "ours / this": ""} == found[0]
    )
    assert [row["ours / this"] for row in found[2:]] == [
        "3.00 (ours_fp32)",
        "1.80 (ours_bf16)",
        "",
        "",
    ]
    assert [row["ours / this, peak"] for row in found[2:]] == ["0.25", "1.00", "", ""]


def test_table_compares_several_processes_with_one() -> None:
    found = rows(TRAINING)
    assert [row["times one process"] for row in found] == ["1.00", "1.00", "1.90"]
    assert [row["padding"] for row in found] == ["5.0%", "20.0%", ""]
    assert found[1]["ours / this"] == "2.00 (ours_fp32)"
