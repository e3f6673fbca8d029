"""Additions to the web server of Dask's scheduler. Only this module uses private parts of the dashboard and of Bokeh.

Tested with distributed 2026.7.1 to 2026.8.0 and Bokeh 3.9. If another version differs,
`tests/distmm/telemetry/test_dashboard_server.py` is the first test to fail. At run time the scheduler then logs a
warning with the error (`distmm.telemetry.faults`), and products run without the part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.scheduler import Scheduler
from tornado.ioloop import IOLoop

if TYPE_CHECKING:
    from bokeh.document import Document

# Fills the document of one browser session: (scheduler, variables of the dashboard's template, document).
Build = Callable[[Scheduler, dict[str, Any], "Document"], None]


def add_page(scheduler: Scheduler, page: str, build: Build) -> None:
    """Add a page with an entry in the navigation bar, and in the list of plots of JupyterLab's Dask extension.

    Does nothing if the scheduler has no dashboard, or has the page already.

    Parameters
    ----------
    scheduler : Scheduler
    page : str
        Path of the page without its slash: ``"distmm"`` for ``/distmm``.
    build : callable
        Fills the page.
    """
    server = getattr(scheduler, "http_application", None)
    if server is None or not getattr(server, "applications", None):
        return  # without an import of Bokeh, which takes a second
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from distributed.http.scheduler.info import IndividualPlots

    dashboards = [app for app in server.applications if isinstance(app, BokehTornado)]
    if not dashboards or has_page(scheduler, f"/{page}"):
        return
    variables = template_variables(scheduler)  # all pages of a scheduler share one dictionary
    prefix = dashboards[0].prefix
    application = BokehApplication({f"/{page}": build}, scheduler, prefix=prefix, template_variables=variables)
    server.add_application(application)
    application.initialize(IOLoop.current())
    application.start()

    class Plots(IndividualPlots):
        """Dask's list of plots, with the page of distmm."""

        def write(self, chunk: dict[str, str]) -> None:
            super().write(chunk | {page.title(): f"/{page}"})

    # JupyterLab's extension requests its list of plots at this path. Dask's handler lists only Dask's plots.
    add_handler(scheduler, f"{prefix.rstrip('/')}/individual-plots.json", Plots)
    variables["pages"].insert(1, page)


def has_page(scheduler: Scheduler, page: str) -> bool:
    """Whether the scheduler serves a Bokeh page at the path `page`."""
    server = getattr(scheduler, "http_application", None)
    return any(page in getattr(application, "app_paths", ()) for application in getattr(server, "applications", ()))


def add_handler(scheduler: Scheduler, path: str, handler: type[Any]) -> None:
    """Let `handler` answer requests for a path; does nothing on a scheduler without a web server."""
    if hasattr(scheduler, "http_application"):
        scheduler.http_application.add_handlers(".*", [(path, handler, {"dask_server": scheduler})])


def dress(document: Document, title: str, variables: dict[str, Any]) -> None:
    """Give a document the title, the theme and the navigation bar of Dask's dashboard."""
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    document.title = f"Dask: {title}"
    document.theme = BOKEH_THEME
    document.template = env.get_template("simple.html")
    document.template_variables.update(variables)
