"""Plain English: docstrings of functions begin with a verb, few sentences are inverted, and pages have short sentences.

The verb is in its base form: "Return", not "Returns" or "The rows of". Words that often mark an inverted sentence are
counted, and each module and page may have a few. The sentences of a page in Markdown have under 20 words on average.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.helpers.pages import PAGES

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_vlm", "rewards", "launch", "examples", "benchmarks")
NO_VERBS = set(
    """
    a all an another any as at before behind both by each every first for from how if in inside it its last more most
    no none not nothing of on one only other some that the their there these this those through to two under until
    what when where whether which who whose why with without
    """.split()
)
INVERTING = re.compile(r"\b(what|that of|those of|beside|behind|of its own)\b", re.IGNORECASE)
"""Words that often mark an inverted sentence."""
LINES_PER_WORD = 60
SENTENCES_PER_WORD = 12
OLD = ROOT / "docs/LOG.md"
"""Entries of the log are not written again, so its words are not counted."""
WORDS_PER_SENTENCE = 20


def is_imperative(docstring: str) -> bool:
    """Whether a docstring seems to begin with a verb in its base form."""
    word = re.split(r"[\s,:;.]", docstring.strip())[0]
    is_plain_word = re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word) is not None
    is_base_form = not word.endswith(("s", "ing", "ed")) or word.endswith(("ss", "eed"))
    return is_plain_word and is_base_form and word.lower() not in NO_VERBS


def first_lines() -> list[tuple[str, str]]:
    """Place and docstring of every function but properties and `__init__`, whose docstrings describe a thing."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", docstring)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name != "__init__"
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        and (docstring := ast.get_docstring(node))
    ]


@pytest.mark.parametrize(
    "docstring",
    ["Returns the rows.", "The rows.", "What is left.", "Rows of a table.", "`x` is given.", "Sorted rows."],
)
def test_what_is_no_verb_in_its_base_form(docstring: str):
    assert not is_imperative(docstring)


def test_docstrings_of_functions_begin_with_a_verb():
    lines = first_lines()
    assert len(lines) > 400
    assert [f"{place}: {docstring.splitlines()[0]}" for place, docstring in lines if not is_imperative(docstring)] == []


def prose(source: str) -> list[str]:
    """Docstrings and comments of a module."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(source))]
    statements = [statement for body in bodies if isinstance(body, list) for statement in body]
    values = [statement.value for statement in statements if isinstance(statement, ast.Expr)]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return texts + [token.string for token in tokens if token.type == tokenize.COMMENT]


def test_which_words_count():
    source = '"""What it is."""\n\nX = "what"  # beside Y\n"""That of Z, and whatever."""\n'
    assert [word for text in prose(source) for word in INVERTING.findall(text)] == ["What", "That of", "beside"]


def test_few_sentences_are_inverted():
    found = {}
    for package in ("rl_vlm", "rewards", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            count = sum(len(INVERTING.findall(text)) for text in prose(source))
            if count > max(1, len(source.splitlines()) // LINES_PER_WORD):
                found[str(path.relative_to(ROOT))] = count
    assert found == {}


def paragraphs(page: str) -> list[str]:
    """Paragraphs and list items of a page, without code blocks, tables, headings, images and items that are a link."""
    page = re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^ *(\||#|!\[|<).*", "", page, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", page, flags=re.MULTILINE)
    texts = [" ".join(block.split()) for block in blocks]
    return [text for text in texts if text and not re.fullmatch(r"\[[^]]*\]\([^)]*\)\.?", text)]


def sentences(page: str) -> list[list[str]]:
    """Words of each sentence of a page. A span of code and the text of a link's address are one word."""
    found = []
    for text in paragraphs(page):
        plain = re.sub(r"`+[^`]+`+", "code", text)
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain).replace("*", "")
        found += [re.findall(r"\w[^\s]*", sentence) for sentence in re.split(r"(?<=[.?!])[\")]* ", plain)]
    return [words for words in found if words]


def test_the_sentences_of_a_page():
    page = (
        "# A heading\n\nSet `a.b = 1` to\nstop. See [the page](docs/page.md): it helps!\n\n| a | table |\n\n"
        "```\nsome code. More.\n```\n\n- **One** item\n  of two lines\n- [only a link](x.md)\n1. Is it 1.5?\n"
    )
    assert [" ".join(words) for words in sentences(page)] == [
        "Set code to stop.",
        "See the page: it helps!",
        "One item of two lines",
        "Is it 1.5?",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_short_sentences(page: Path):
    lengths = [len(words) for words in sentences(page.read_text())]
    assert sum(lengths) < WORDS_PER_SENTENCE * len(lengths)


@pytest.mark.parametrize("page", [page for page in PAGES if page != OLD], ids=lambda page: str(page.relative_to(ROOT)))
def test_few_sentences_of_pages_are_inverted(page: Path):
    text = page.read_text()
    found = [word for block in paragraphs(text) for word in INVERTING.findall(block)]
    assert len(found) <= max(2, len(sentences(text)) // SENTENCES_PER_WORD), found
