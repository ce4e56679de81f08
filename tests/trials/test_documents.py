"""A part of the trial of documents: the guides in four formats. `python -m scripts.trials.documents` runs more."""

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.trials import documents
from scripts.trials.documents import Tally

GUIDES = Path(__file__).parents[2] / "scripts" / "docs"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pandoc") is None, reason="needs pandoc")
def test_guides_keep_their_structure_in_every_format(tmp_path: Path) -> None:
    for guide in sorted(GUIDES.glob("*.md")):
        shutil.copy(guide, tmp_path)
        for suffix in (".docx", ".odt", ".html"):
            written = tmp_path / f"{guide.stem}{suffix}"
            subprocess.run(["pandoc", "-f", "gfm", str(guide), "-o", str(written)], check=True)
    tallies = dict(documents.run([tmp_path], limit=4))
    assert set(tallies) == {".md", ".docx", ".odt", ".html"}
    for suffix, tally in tallies.items():
        assert not [*tally.refused, *tally.differences, *tally.unreadable], suffix
        assert tally.equal == {"upper": 4, "reversed": 4}


def test_trial_notices_a_lost_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_word(data: bytes, *_: object) -> bytes:
        return data.replace(b"two ", b"")

    monkeypatch.setattr(documents, "translate_document", without_a_word)
    tally = Tally()
    documents.check("page", b"<p>one two three", ".html", tally)
    assert len(tally.differences) == 2 and not tally.equal
