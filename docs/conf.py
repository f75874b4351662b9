"""Sphinx configuration; `make docs` builds with warnings as errors."""

import dataclasses
import re

import latex2mathml.converter
from docutils import nodes

import trl_qarl


project = "trl_qarl"
author = "The trl_qarl authors"
copyright = "2026, The trl_qarl authors"
version = release = trl_qarl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_enable_extensions = ["alert", "dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
nitpicky = True

# autodoc leaves out what cannot be imported, without a word.
assert all(hasattr(trl_qarl, name) for name in trl_qarl.__all__)

# Docstrings have TRL's form: [`Name`] is a link, `name` is code. "Args:" and its entries are a definition list as they
# stand.
default_role = "literal"
autodoc_inherit_docstrings = False
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"trl_qarl {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_math_renderer = "mathml"


def translate_docstring(app, what, name, obj, options, lines):
    text = "\n".join(lines)
    # A parameter or an error with its text in the same line.
    text = re.sub(r"^( +)(\w+Error|\w+ \(.+?\)): (?=\S)", r"\1\2:\n\1    ", text, flags=re.M)
    lines[:] = re.sub(r"\[`~?([\w.]+)`\]", link, text).splitlines()


def link(match):
    name = match[1].rpartition(".")[2]
    return f":py:obj:`~trl_qarl.{name}`" if name in trl_qarl.__all__ else f"`{name}`"


def shorten_signature(app, what, name, obj, options, signature, return_annotation):
    # One argument for each of the hundreds of options.
    if what == "class" and name.endswith(("Config", "Options")) and dataclasses.is_dataclass(obj):
        return "(**options)", None


def visit_math(self, node):
    """Formulas as MathML, which browsers draw without a script and without a network."""
    is_block = isinstance(node, nodes.math_block)
    formula = latex2mathml.converter.convert(node.astext().strip(), display="block" if is_block else "inline")
    self.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def unlink_lab_notebooks(app, docname, source):
    """Keep only the text of links to pages outside docs/, which a reader of the repository can follow and a site does
    not have."""
    source[0] = re.sub(r"\[([^]]+)\]\(\.\./(?:benchmarks/[\w./-]+|CONTRIBUTING)\.md(?:#[\w-]+)?\)", r"\1", source[0])


def setup(app):
    app.connect("source-read", unlink_lab_notebooks)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("autodoc-process-docstring", translate_docstring)
    app.connect("autodoc-process-signature", shorten_signature)
