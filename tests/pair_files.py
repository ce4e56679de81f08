"""Sentence pairs in every format that training reads."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

PAIRS = [
    ('He said "two, three".', "zwei"),
    ("two hundred", 'Er sagte "drei"'),
    ("naïve\u2028line", "größer"),
]
UNITS = '<tu><tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="de"><seg>{}</seg></tuv></tu>'
SEGMENTS = '<trans-unit id="{}"><source>{}</source><target>{}</target></trans-unit>'


def write_pairs(folder: Path, name: str, source: str = "source", target: str = "target") -> Path:
    """PAIRS in the format of a file's suffix."""
    path = folder / name
    _, _, suffix = name.removesuffix(".gz").rpartition(".")
    kind = suffix.lower()
    rows = [
        {"number": str(number), source: one, target: two} for number, (one, two) in enumerate(PAIRS)
    ]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    names = list(rows[0])
    cells = [list(row.values()) for row in rows]
    quoted = [['"{}"'.format(cell.replace('"', '""')) for cell in row] for row in cells]
    text = {
        "csv": "\n".join(map(",".join, [names, *quoted])),
        "tsv": "\n".join(map("\t".join, [names, *cells])),
        "tst": "\n".join(map("\t".join, cells)),
        "jsonl": "\n".join(map(json.dumps, rows)),
        "json": json.dumps(rows, indent=1),
        "tmx": f'<tmx><header srclang="en"/><body>{"".join(UNITS.format(*pair) for pair in PAIRS)}</body></tmx>',
        "xlf": '<xliff version="1.2"><file source-language="en" target-language="de"><body>'
        + "".join(SEGMENTS.format(number, *pair) for number, pair in enumerate(PAIRS))
        + "</body></file></xliff>",
    }[kind]
    content = (text + "\n").encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path
