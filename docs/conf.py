"""The documentation as a site: `make docs` builds it from the repository's Markdown, as it is.

The sources are the pages that a code host shows too: links between them stay, links to other files
of the repository become pages with the file's text, and the tables of a hub (docs/README.md, ...)
are the site's navigation.
"""

import csv
import dataclasses
import html
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import ziamath
from docutils import nodes
from docutils.parsers.rst import Directive
from pygments.lexers import find_lexer_class_for_filename
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.util.docutils import SphinxTranslator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
HUBS = ("docs/README", "docs/methods/README", "docs/api/README")

project = "rayfed"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Above the navigation, and in the titles of tabs.
html_title = f"rayfed {version}"
root_doc = HUBS[0]
include_patterns = [
    "docs/**",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "jobs/papers/README.md",
    "cluster/README.md",
]
exclude_patterns = ["docs/_static", "docs/results", "**/.*", ".*", "build"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
# What is copied of a block with output is its commands.
copybutton_prompt_text = "$ "
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_search_scorer = str(ROOT / "docs/_static/scorer.js")
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_math_renderer = "drawn"
html_theme_options = {"navigation_with_keys": True}
html_additional_pages = {"index": "to_hub.html"}
templates_path = ["_templates"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# Notebooks carry their outputs; tests run them.
nb_execution_mode = "off"
# Docstrings have one backtick, as Markdown.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
autodoc_class_signature = "mixed"
toc_object_entries_show_parents = "hide"


# Navigation ---------------------------------------------------------------------------------------


def navigation_of(app: Sphinx, docname: str, source: list[str]) -> None:
    """The pages of a hub: what the first cells of its tables link to, by heading."""
    if docname not in HUBS:
        return
    headed = re.split(r"^## (.*)\n", f"## \n{source[0]}", flags=re.MULTILINE)[1:]
    for heading, section in zip(headed[::2], headed[1::2], strict=True):
        links = re.findall(r"^\| *\[([^\]]*)\]\(([^)#]+\.(?:md|ipynb))\)", section, re.MULTILINE)
        pages = [
            path if name[0] == "`" else f"{name[0].upper()}{name[1:]} <{path}>"
            for name, path in links
        ]
        if pages:
            caption = f":caption: {heading}\n" if docname == root_doc else ""
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(pages) + "\n```\n"


def parameters_of(app: Sphinx, docname: str, source: list[str]) -> None:
    """The page of a method also has the table that `rayfed methods NAME` prints."""
    from rayfed.cli.describe import default_text
    from rayfed.methods import RECIPES
    from rayfed.methods.registry import parameters

    name = docname.removeprefix("docs/methods/")
    if name not in RECIPES or not parameters(name):
        return
    lines = ["## Parameters", "", "| parameter | default | what |", "|---|---|---|"]
    for parameter, default, sense in parameters(name):
        sense = sense.replace("|", r"\|")
        lines.append(f"| `{parameter}` | `{default_text(default)}` | {sense} |")
    source[0] = source[0].replace("\n## When\n", "\n".join(["", *lines, "", "## When", ""]))


# Files of the repository that are no pages --------------------------------------------------------


def page_of(path: Path) -> str:
    return f"files/{path.relative_to(ROOT).as_posix()}"


def link_files(app: Sphinx, document: nodes.document) -> None:
    """Links to files and folders of the repository lead to pages that show them; pictures stay
    as they are.
    """
    for link in [
        *document.findall(addnodes.download_reference),
        *document.findall(addnodes.pending_xref),
    ]:
        target, here = link["reftarget"], link.get("refdoc")
        if link.get("reftype") != "myst" or target in app.env.found_docs:
            continue
        beside = Path(app.env.doc2path(here)).parent / target
        path = ROOT / f"{target}.md" if link["refdomain"] == "doc" else beside.resolve()
        if path.exists() and path.is_relative_to(ROOT) and path.suffix not in (".png", ".svg"):
            app.env.rayfed_files.add(path)
            relative = app.builder.get_relative_uri(here, page_of(path))
            link.replace_self(
                nodes.reference("", "", *link.children, refuri=relative, internal=True)
            )


def pair_pictures(app: Sphinx, document: nodes.document) -> None:
    """On dark pages, NAME-dark.png replaces a picture NAME-light.png, where it exists."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for image in list(document.findall(nodes.image)):
        dark = image["uri"].replace("-light.png", "-dark.png")
        if dark != image["uri"] and (folder / dark).exists():
            other = image.deepcopy()
            other["uri"] = dark
            image["classes"].append("only-light")
            other["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, other)


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """A page for each file that is linked to, and for each folder a list of its files."""
    bridge = PygmentsBridge("html", app.config.pygments_style)
    linked = set(app.env.rayfed_files)
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for folder in {path for path in linked if path.is_dir()}:
        inside = {ROOT / name for name in tracked if (ROOT / name).parent == folder}
        linked |= {path for path in inside if path.suffix not in (".gz", ".parquet")}
    for path in sorted(linked):
        title = f"<h1>{path.relative_to(ROOT).as_posix()}</h1>"
        if path.is_dir():
            body = list_of(path, sorted(other for other in linked if other.parent == path))
        elif path.suffix == ".csv":
            body = table_of(path)
        else:
            lexer = find_lexer_class_for_filename(path.name)
            body = bridge.highlight_block(
                path.read_text(), lexer.aliases[0] if lexer else "text", force=True
            )
        yield page_of(path), {"title": path.name, "body": title + body}, "page.html"


def list_of(folder: Path, files: list[Path]) -> str:
    items = (f'<li><a href="{folder.name}/{path.name}.html">{path.name}</a></li>' for path in files)
    return f"<ul>{''.join(items)}</ul>"


def table_of(path: Path) -> str:
    head, *rows = (map(html.escape, row) for row in csv.reader(path.read_text().splitlines()))
    titles = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = (
        f'<table class="docutils"><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>'
    )
    return f'<div class="table-wrapper">{table}</div>'


# Docstrings ---------------------------------------------------------------------------------------


def fields_of(thing: Any) -> list[str]:
    """A line for each field of a dataclass or parameter of a recipe: its default, and the
    sentence or comment on it.
    """
    from rayfed.base.values import Checked, sentence
    from rayfed.methods import RECIPES
    from rayfed.methods.registry import parameters

    if RECIPES.get(getattr(thing, "__name__", "")) is thing:
        return [
            f"* ``{name}`` = ``{default!r}``: {sense}"
            for name, default, sense in parameters(thing.__name__)
        ]
    if not inspect.isclass(thing) or not thing.__module__.startswith("rayfed"):
        return []
    source = inspect.getsource(thing)
    if not dataclasses.is_dataclass(thing):
        comments = re.findall(r"^ +self\.([a-z]\w*) = .*?  # (.*)$", source, re.M)
        return [f"* ``{name}``: {comment}" for name, comment in comments]
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.M))
    lines = []
    for field in dataclasses.fields(thing):
        sense = (
            sentence(thing, field.name)
            if issubclass(thing, Checked)
            else comments.get(field.name, "")
        )
        default = (
            f" = ``{field.default!r}``"
            if isinstance(field.default, str | int | float | bool)
            else ""
        )
        lines.append(f"* ``{field.name}``{default}" + (f": {sense}" if sense else ""))
    return lines


def plain_signature(
    app: Sphinx, kind: str, name: str, thing: Any, options: Any, signature: str, returned: str
) -> Any:
    """Of classes and recipes without types: their fields come with sentences, and annotations
    hold these too.
    """
    # What a module imports comes here too.
    ours = str(getattr(thing, "__module__", "")).startswith("rayfed.")
    if (
        not signature
        or not ours
        or not (kind == "class" or (kind == "function" and "Annotated[" in signature))
    ):
        return None
    bare = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(thing).parameters.values()
    ]
    return str(inspect.Signature(bare)), ""


def mend_docstring(
    app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Indented paragraphs are code, and the fields of a dataclass come after its docstring."""
    mended: list[str] = []
    # The last line that is not empty.
    last = ""
    for line in lines:
        if (
            line.startswith("    ")
            and mended
            and not mended[-1]
            and not last.startswith((" ", ">>>", "*"))
        ):
            mended += ["::", ""]
        mended.append(line)
        last = line or last
    lines[:] = mended
    if kind in ("class", "function") and (fields := fields_of(thing)):
        lines += ["", *fields, ""]


# What the command prints --------------------------------------------------------------------------


class Keys(Directive):
    """The keys of a job file, as a table for each section."""

    def run(self) -> list[nodes.Node]:
        from rayfed.base import values
        from rayfed.cli.describe import default_text
        from rayfed.grid.cells import Grid
        from rayfed.job import Job

        sections: dict[str, list[list[str]]] = {}
        for key in [*values.keys(Job), *values.keys(Grid, "grid")]:
            section = key.name.rpartition(".")[0] if key.kind or "." in key.name else ""
            sense = f"{key.kind}: {key.sentence}" if key.kind else key.sentence
            sections.setdefault(section, []).append([key.name, default_text(key.default), sense])
        return [node for name, rows in sections.items() for node in self.section(name, rows)]

    def section(self, name: str, rows: list[list[str]]) -> list[nodes.Node]:
        section = nodes.section(ids=[f"keys-{name.replace('.', '-') or 'top'}"])
        section += nodes.title(
            "", "", nodes.literal("", f"[{name}]") if name else nodes.Text("Top level")
        )
        table, group, head, body = nodes.table(), nodes.tgroup(cols=3), nodes.thead(), nodes.tbody()
        group += [*(nodes.colspec(colwidth=width) for width in (25, 15, 60)), head, body]
        head += row("key", "default", "what")
        body += [row(f"`{key}`", f"`{default}`", sense) for key, default, sense in rows]
        table += group
        section += table
        return [section]


def row(*cells: str) -> nodes.row:
    """A row of a table; what is in backticks is code."""
    line = nodes.row()
    for cell in cells:
        paragraph = nodes.paragraph()
        for at, words in enumerate(cell.split("`")):
            paragraph += nodes.literal("", words) if at % 2 else nodes.Text(words)
        line += nodes.entry("", paragraph)
    return line


class Helped(Directive):
    """What `--help` says of each command."""

    def run(self) -> list[nodes.Node]:
        from rayfed.cli import SECTIONS

        sections = []
        # As `rayfed --help` lists them, by what they are for.
        for command in itertools.chain(*SECTIONS.values()):
            name = command.name
            section = nodes.section(ids=[f"rayfed-{name}"])
            section += nodes.title("", "", nodes.literal("", f"rayfed {name}"))
            usage = command.get_help(
                click.Context(command, info_name=f"rayfed {name}", max_content_width=100)
            )
            section += nodes.literal_block(usage, usage, language="text")
            sections.append(section)
        return sections


# Formulas -----------------------------------------------------------------------------------------

# Ziamath draws r"\|" in the right height.
NORMS = (r"\lVert", r"\rVert", r"\Big\Vert", r"\Vert")
# Without ids, which would be on a page twice.
ziamath.config.svg2 = False


def visit_math(self: SphinxTranslator, node: nodes.Element) -> None:
    """A formula as a drawing in the page: it needs no script and no font, and has the text's
    colour.
    """
    block, source = isinstance(node, nodes.math_block), " ".join(node.astext().split())
    plain = source
    for norm in NORMS:
        plain = plain.replace(norm, r"\|")
    drawing = ziamath.Latex(plain, size=18, inline=not block, color="currentColor").svgxml()
    _, top, _, height = map(float, drawing.get("viewBox", "").split())
    drawing.set("style", f"vertical-align: {-(height + top):.1f}px")
    drawing.set("role", "img")
    drawing.set("aria-label", source)
    drawing.set("class", "math")
    svg = ElementTree.tostring(drawing, encoding="unicode")
    self.body.append(f'<div class="math">{svg}</div>' if block else svg)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("drawn", (visit_math, None), (visit_math, None))
    app.add_directive("keys", Keys)
    app.add_directive("commands", Helped)
    app.connect("builder-inited", lambda app: setattr(app.env, "rayfed_files", set()))
    app.connect("source-read", navigation_of)
    app.connect("source-read", parameters_of)
    # Before links to files are taken for downloads.
    app.connect("doctree-read", link_files, priority=100)
    app.connect("doctree-read", pair_pictures, priority=100)
    app.connect("html-collect-pages", file_pages)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-process-docstring", mend_docstring)
