"""Sphinx's configuration of the documentation site. README.md in this folder says how to build it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import distmm

project = "distmm"
author = "The distmm developers"
copyright = "2026, the distmm developers"  # noqa: A001  Sphinx's name
version = release = distmm.__version__

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
    "documents",  # the two files of this folder
    "commands",
]
root_doc = "index"
exclude_patterns = ["build", "dist", "**/.*"]

# GitHub's anchors, so that a link to a heading works there and here.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Notebooks are stored without outputs. The build runs them, and fails if one of them fails.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# One page for each public function and class, made from the tables of this page.
autosummary_generate = ["deploy/site/pages/reference/api.md"]
templates_path = [str(Path(__file__).with_name("templates"))]

# Links to other projects need their inventories. A build without a network has no such links.
intersphinx_mapping = {}
try:
    socket.create_connection(("numpy.org", 443), timeout=5).close()
except OSError:
    pass
else:
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3/", None),
        "numpy": ("https://numpy.org/doc/stable/", None),
        "scipy": ("https://docs.scipy.org/doc/scipy/", None),
        "dask": ("https://docs.dask.org/en/stable/", None),
        "distributed": ("https://distributed.dask.org/en/stable/", None),
        "zarr": ("https://zarr.readthedocs.io/en/stable/", None),
    }

default_role = "py:obj"  # single backquotes in docstrings link to what they name
autodoc_typehints = "none"  # numpydoc's Parameters have the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# Every parameter and return value has a description, in the order of the signature.
numpydoc_validation_checks = {"GL06", "GL07", "PR01", "PR02", "PR03", "RT01", "SS01", "SS02", "SS03", "YD01"}
# Classes that distmm makes and users read: they document Attributes.
numpydoc_validation_exclude = {r"distmm\.(Plan|Verdict|job\.Summary|job\.Status)$"}
html_theme = "pydata_sphinx_theme"
html_title = "distmm"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "distmm"},
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "show_toc_level": 2,
}
