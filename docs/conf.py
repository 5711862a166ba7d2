"""Sphinx: the pages of this folder, the C++ API from Doxygen's XML, the Python API by import.

`make docs` builds the package first, then this; the result lies in docs/_build/html.
"""

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

project = "Ferry"
author = "The Ferry authors"
copyright = author
VERSION = (ROOT / "include/ferry/version.hpp").read_text()
release = ".".join(re.findall(r"#define FERRY_VERSION_\w+ (\d+)", VERSION))

extensions = ["myst_nb", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_doxygen"]
html_theme = "furo"
html_title = f"Ferry {release}"
html_show_copyright = False
html_static_path = ["style"]
html_css_files = ["pages.css"]

highlight_language = "none"  # of blocks that name none: output, folders
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # notebooks are stored without outputs: the build runs them
nb_execution_raise_on_error = True
nb_execution_timeout = 120
# Pages link to files of the repository, which are not pages.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["jax", "tensorflow"]  # large, and only their names are needed

# Doxygen reads the public headers and writes XML; breathe reads that.
DOXYGEN = f"""
PROJECT_NAME = ferry
INPUT = {ROOT}/include/ferry
RECURSIVE = YES
OUTPUT_DIRECTORY = {HERE}/_doxygen
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
EXTRACT_ALL = YES
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_AS_ERROR = FAIL_ON_WARNINGS
MACRO_EXPANSION = YES
JAVADOC_AUTOBRIEF = YES
EXCLUDE_SYMBOLS = std::*
"""
(HERE / "_doxygen").mkdir(exist_ok=True)
subprocess.run(["doxygen", "-"], input=DOXYGEN, text=True, check=True, cwd=HERE)
XML = HERE / "_doxygen" / "xml"
breathe_projects = {"ferry": str(XML)}
breathe_default_project = "ferry"
breathe_default_members = ("members",)
breathe_show_include = False


def directive(kind, name, *options):
    return "\n".join([f"```{{doxygen{kind}}} {name}", *options, "```", ""])


def api_of(header):
    """The part of api/cpp.md that documents one public header: its classes, then the rest."""
    first = header.read_text(encoding="utf-8").splitlines()[0]
    parts = [f"## `ferry/{header.name}`", first.removeprefix("//").strip(), ""]
    page = f"{header.stem.replace('_', '__')}_8hpp.xml"  # as Doxygen names it
    for inner in ElementTree.parse(XML / page).iter("innerclass"):
        if inner.get("prot", "public") == "public" and inner.text.count("::") == 1:
            kind = "class" if inner.get("refid").startswith("class") else "struct"
            parts.append(directive(kind, inner.text, ":members:", ":undoc-members:"))
    for member in ElementTree.parse(XML / "namespaceferry.xml").iter("memberdef"):
        if Path(member.find("location").get("file")).name != header.name:
            continue
        kind, name = member.get("kind"), f"ferry::{member.findtext('name')}"
        if kind == "function":
            parts.append(directive(kind, name + member.findtext("argsstring")))
        elif kind in ("enum", "typedef", "variable"):
            parts.append(directive(kind, name))
    return "\n".join(parts)


def fill_in_the_api(_app, page, source):
    if page == "api/cpp":
        headers = sorted((ROOT / "include" / "ferry").glob("*.hpp"))
        source[0] += "\n" + "\n".join(api_of(h) for h in headers if h.name != "ferry.hpp")


def setup(app):
    """napoleon takes what is before the first colon of an attribute's text for its type: texts of
    attributes pass by it, for it runs at priority 500."""
    texts = {}

    def keep(_app, what, name, _object, _options, lines):
        if what in ("attribute", "property"):
            texts[name] = list(lines)

    def give_back(_app, what, name, _object, _options, lines):
        if what in ("attribute", "property"):
            lines[:] = texts.pop(name)

    app.connect("source-read", fill_in_the_api)
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", give_back, priority=600)
