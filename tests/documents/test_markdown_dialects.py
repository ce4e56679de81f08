"""What site generators add to Markdown stays. Their titles and texts are translated, each in its place."""

import pytest

from hf_vanilla_transformer.documents import markdown_blocks
from hf_vanilla_transformer.documents.document_files import translate_document
from hf_vanilla_transformer.documents.markdown_text import split_markdown
from scripts.trials.documents import TRANSLATIONS

pytest.importorskip("markdown_it", reason="needs the extra `documents`")


def translated(document: str, translation: str = "upper") -> str:
    return translate_document(document.encode(), ".md", TRANSLATIONS[translation]).decode()


KEPT = {
    "code of Liquid": "{% highlight python %}\nfor x in range(3): pass\n{% endhighlight %}\n",
    "code of Hugo": '{{< highlight go >}}\nx := "two words"\n{{< /highlight >}}\n',
    "raw text of Liquid": "{% raw %}\n\nHello {{ name }}\n\n{% endraw %}\n",
    "formula in brackets": "\\[\nE = mc^2\n\\]\n",
    "module of MDX": "export const meta = {\n  title: 'Hello world'\n};\n",
    "module of MDX with empty lines": "export const meta = {\n  title: 'Hello world',\n\n  other: [\n\n 'a b']\n}\n",
    "component of MDX": "export default ({children}) => <Layout>{children}</Layout>\n",
    "function of MDX": "export default function Layout(props) {\n  return <div>{props.children}</div>;\n}\n",
    "comment of MDX": "{/* one\n\ntwo */}\n",
    "import of MDX": "import {\n  one,\n  two\n} from './three'\n",
    "simple table of pandoc": "  Right     Left\n-------     ------\n     12     twelve words\n",
    "included files": "--8<--\nfile one.md\n--8<--\n",
    "included file": '--8<-- "includes/abbreviations.md"\n',
    "comment of Obsidian": "%% comment text %%\n",
    "target of MyST": "(my-label)=\n",
}


@pytest.mark.parametrize("translation", TRANSLATIONS)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_block_without_text_stays(kept: str, translation: str) -> None:
    assert translated(f"one\n\n{kept}\ntwo\n", translation) == f"ONE\n\n{kept}\nTWO\n"


INLINE = [
    ("See [it](#){ .md-button title='A b' } now\n", "NOW [IT](#){ .md-button title='A b' } SEE\n"),
    (
        'See ![it](a.png){ width="300" loading=lazy } now\n',
        '![it](a.png){ width="300" loading=lazy } NOW SEE\n',
    ),
    ("See *it*{: .note} now\n", "NOW *IT*{: .note} SEE\n"),
    ("See [it all]{.smallcaps} now\n", "[it all]{.smallcaps} NOW SEE\n"),
    ("See `<b>it</b>`{=html} now\n", "`<b>it</b>`{=html} NOW SEE\n"),
    ("# One two { #one-two }\n", "# TWO ONE { #one-two }\n"),
    ("One two\n{ .annotate }\n", "TWO ONE\n{ .annotate }\n"),
    ("One two ^one-two\n", "TWO ONE ^one-two\n"),
    ("- [ ] one two\n- [x] six\n", "- [ ] TWO ONE\n- [x] SIX\n"),
    ("Press ++ctrl+alt+del++ now\n", "++ctrl+alt+del++ NOW PRESS\n"),
    ("See {doc}`my page` now\n", "{doc}`my page` NOW SEE\n"),
    ("A :octicons-arrow-24:{ .big } b\n", ":octicons-arrow-24:{ .big } B A\n"),
    ("See {/* it all */} now\n", "{/* it all */} NOW SEE\n"),
    ("So \\[x^2 + y\\] holds\n", "\\[x^2 + y\\] HOLDS SO\n"),
    ("One \\[two\\_six\\] \\(a\\)\n", "\\(A\\) \\[TWO\\_SIX\\] ONE\n"),
    ("One \\[two\\] six\n", "SIX \\[TWO\\] ONE\n"),
]


@pytest.mark.parametrize(("document", "expected"), INLINE)
def test_inline_markup_goes_with_its_words(document: str, expected: str) -> None:
    assert translated(document, "reversed") == expected


BLOCKS = [
    ("> [!tip]- My title\n> Two words\n", "> [!tip]- My title\n> TWO WORDS\n"),
    ("> [!faq] One?\n> > [!todo] Two\n> > six\n", "> [!faq] One?\n> > [!todo] Two\n> > SIX\n"),
    ('!!! info inline end "My title"\n    Two\n', '!!! info inline end "MY TITLE"\n    TWO\n'),
    ("/// note | My title\nTwo\n///\n", "/// note | MY TITLE\nTWO\n///\n"),
    ("{{% notice note %}}\nTwo\n{{% /notice %}}\n", "{{% notice note %}}\nTWO\n{{% /notice %}}\n"),
    (
        ":::{figure} a.png\n:alt: one two\nTwo\n:::\n",
        ":::{figure} a.png\n:alt: one two\nTWO\n:::\n",
    ),
    (":::note Title here\nTwo\n:::\n", ":::note TITLE HERE\nTWO\n:::\n"),
    (":::tip[Title here]\n\nTwo\n\n:::\n", ":::tip[TITLE HERE]\n\nTWO\n\n:::\n"),
    ("/// html | div\nTwo\n///\n", "/// html | div\nTWO\n///\n"),
    ("::: code-group a b\nTwo\n:::\n", "::: code-group a b\nTWO\n:::\n"),
    (
        "| a | {% if x %}c d |{% endif %}\n|---|---|\n| {{ a | b }} | **X** |{% endif %}\n",
        "| A | {% if x %}C D |{% endif %}\n|---|---|\n| {{ a | b }} | **X** |{% endif %}\n",
    ),
    ("\\[one two\\]\n", "\\[ONE TWO\\]\n"),
    ("- Import the list from 'one'\n", "- IMPORT THE LIST FROM 'ONE'\n"),  # no module
    (
        "> $$\n> x\n> $$\n> two\n\n$$a$$ one\n\n$$b$$\n",
        "> $$\n> x\n> $$\n> TWO\n\n$$a$$ ONE\n\n$$b$$\n",
    ),
    ("Use `a\\.b` of http://a.b/c_d or e.\n", "USE `a\\.b` OF http://a.b/c_d OR E.\n"),
    ("One\\_two. See http://a.b/c_d, e_f.\n", "ONE\\_TWO. SEE http://a.b/c_d, E\\_F.\n"),
    ("| a | b |\n|--|--|\n| \\| c | \\|d\\| |\n", "| A | B |\n|--|--|\n| \\| C | \\|D\\| |\n"),
    ("> a | b\n> --|--\n> | e\n> e `c\\|d` | e\n", "> A | B\n> --|--\n> | E\n> E `c\\|d` | E\n"),
]


@pytest.mark.parametrize(("document", "expected"), BLOCKS)
def test_marks_of_a_block_stay_on_their_lines(document: str, expected: str) -> None:
    assert translated(document) == expected


OPENINGS = [
    "$$",
    "\\[",
    "\\[" + "=" * 50,
    "\\begin{a%d}",
    "{% raw",
    "{{< code",
    "{/*",
    "--8<--\n",
    "- $$",
    "> {/*",
]


@pytest.mark.parametrize("opening", [*OPENINGS, "{% a %}" * 40])
def test_openings_without_an_end_are_read_in_linear_time(opening: str) -> None:
    text = "\n\n".join(f"{opening} one".replace("%d", str(number)) for number in range(200))
    assert split_markdown(text)  # {% a %}: years, if each tag were tried with each later end


def test_ends_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    ends = markdown_blocks._ends
    monkeypatch.setattr(
        markdown_blocks, "_ends", lambda *given: passes.append(given) or ends(*given)
    )
    split_markdown("\n\n".join(f"\\begin{{a{number}}} one" for number in range(100)))
    assert len(passes) == 1
