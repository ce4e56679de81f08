"""`python -m tests.interop.real_toolkits WORK [NAME …]` trains with real toolkits and compares their conversions.

Run it by hand, before a release: each toolkit is installed in the folder WORK, with the torch of this environment,
trains 150 updates on reversed letters, and its checkpoint is converted. It prints the largest difference of a logit in
the 50 test pairs, and how many of its translations with 5 beams are the same. It needs PyPI, and minutes.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_vanilla_transformer.utils.markdown import markdown_table

from .toolkits import eole, fairseq, opennmt
from .toolkits.argos import compare_argos
from .toolkits.environment import BEAMS, SENTENCES
from .toolkits.eole import compare_eole
from .toolkits.fairseq import compare_fairseq
from .toolkits.joeynmt import compare_joeynmt
from .toolkits.marian import PRE_NORM, compare_marian
from .toolkits.opennmt import compare_opennmt
from .toolkits.optimum import compare_optimum
from .toolkits.transformers_marian import compare_transformers

MARIAN = {
    "separate embeddings, post": (),
    "tied embeddings, swish, post": (
        "--tied-embeddings",
        "--transformer-ffn-activation",
        "swish",
    ),
    "gelu, pre": ("--transformer-ffn-activation", "gelu", *PRE_NORM),
}
TOOLKITS: dict[str, Callable[[Path], tuple[float | None, int]]] = {
    **{
        f"Marian 1.12.42, {name}": partial(compare_marian, options=options)
        for name, options in MARIAN.items()
    },
    **{
        f"JoeyNMT 2.3.0, {norm}": partial(compare_joeynmt, layer_norm=norm)
        for norm in ("post", "pre")
    },
    **{
        f"OpenNMT-py {version}, pre": partial(compare_opennmt, version=version)
        for version in opennmt.PACKAGES
    },
    **{f"eole 0.6.4, pre, {name}": partial(compare_eole, name=name) for name in eole.MODELS},
    **{
        f"fairseq {version}, {norm}": partial(compare_fairseq, version=version, norm=norm)
        for version in fairseq.PACKAGES
        for norm in ("post", "pre")
    },
    **{
        f"transformers {major}, MarianMTModel": partial(compare_transformers, major=major)
        for major in (4, 5)
    },
    "optimum 2.1.0, greedy": compare_optimum,
    **{
        f"{version}, {beams} beams": partial(compare_argos, version=version, beams=beams)
        for version, beams in (
            ("argostranslate 1.11.0", 4),
            ("argos-translate-lt 1.12.1", 1),
            ("argos-translate-lt 1.12.1", 4),
        )
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "work", type=Path, metavar="WORK", help="a folder for environments and trainings"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {'; '.join(TOOLKITS)}; default: all"
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.names or TOOLKITS:
        difference, same = TOOLKITS[name](work)
        rows.append(
            [
                name,
                "" if difference is None else f"{difference:.1e}",
                f"{same} of {SENTENCES}",
            ]
        )
        print(*rows[-1], flush=True)
    print(
        markdown_table(
            [
                "toolkit",
                "logits differ by",
                f"same translations, {BEAMS} beams unless stated",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
