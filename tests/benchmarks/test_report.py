"""Tables, ratios, JSON and charts of both benchmarks, from invented figures."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.benchmarks import report
from hf_vanilla_transformer.benchmarks.measurements import DecodingMeasurement, Measurement, TrainingMeasurement, Turn


def decoding(engine: str, size: int, beams: int, tokens: int, seconds: list[float], **more: float) -> Measurement:
    return DecodingMeasurement(
        engine=engine, batch_size=size, num_beams=beams, sentences=64, seconds=seconds,
        target_tokens=[tokens] * len(seconds), peak_mib=100.0, same_output=1.0, **more,
    )  # fmt: skip


def training(engine: str, processes: int, rates: list[float], peak: float = 100.0) -> Measurement:
    found = TrainingMeasurement(engine=engine, processes=processes, updates=2)
    for rate in rates:
        found.add_turns([Turn(1000 / rate, 1000, 1900, 2000, peak, 40.0)])
    return found


DECODING = [
    decoding("ours_fp32", 16, 4, 900, [3.0, 1.0, 2.0], bleu=40.0),
    decoding("ours_bf16", 16, 4, 900, [1.0, 1.0, 1.0]),
    decoding("marian_fp32", 16, 4, 900, [6.0, 6.0, 6.0]),
    decoding("ctranslate2_int8", 16, 4, 1000, [2.0, 2.0, 2.0]),
    decoding("ours_fp32", 64, 4, 900, [1.5, 1.5, 1.5]),
    decoding("ours_fp32", 64, 1, 900, [0.5, 0.5, 0.5]),
]
TRAINING = [
    training("ours_fp32", 1, [300.0, 100.0, 200.0]),
    training("ours_bf16", 1, [600.0, 600.0, 600.0]),
    training("marian_fp32", 1, [50.0, 50.0, 80.0], peak=400.0),
    training("marian_grouped_fp32", 1, [100.0, 100.0, 100.0]),
    training("ours_fp32", 2, [380.0, 380.0, 380.0]),
]


def test_ratios_compare_medians_in_the_same_precision() -> None:
    found = [(one["ours"], one["peer"], one["speed"], one["memory"]) for one in report.as_json(DECODING)["ratios"]]
    assert found == [
        ("ours_fp32", "marian_fp32", pytest.approx(450 / 150), 1.0),
        ("ours_bf16", "ctranslate2_int8", pytest.approx(900 / 500), 1.0),
    ]
    found = [(one["ours"], one["peer"], one["speed"], one["memory"]) for one in report.as_json(TRAINING)["ratios"]]
    assert found == [
        ("ours_fp32", "marian_fp32", pytest.approx(4.0), pytest.approx(0.25)),
        ("ours_fp32", "marian_grouped_fp32", pytest.approx(2.0), pytest.approx(1.0)),
    ]


@pytest.mark.parametrize(
    ("found", "titles"),
    [(DECODING, {"16 sentences": 1, "64 sentences": 2}), (TRAINING, {"1 process": 1, "2 processes": 1})],
)
def test_chart_has_a_panel_per_setting(found: list[Measurement], titles: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(found, tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    assert {title: text.count(f"<!-- {title} -->") for title in titles} == titles
    assert [path.name for path in tmp_path.iterdir()] == ["speed.svg"]
