"""Sphinx configuration; `make docs` builds with warnings as errors."""

import trl_qarl


project = "trl_qarl"
author = "The trl_qarl authors"
copyright = "2026, The trl_qarl authors"
version = release = trl_qarl.__version__

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"trl_qarl {release}"
