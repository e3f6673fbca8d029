"""The dashboard in a browser: its panes in JavaScript, its address, and when it is drawn."""

from __future__ import annotations

from typing import Any

from distributed import Client, Scheduler

# JavaScript for a Bokeh model on the page, by its name, and for the data that it draws.
MODEL = "Bokeh.documents[0].get_model_by_name('distmm-{}')"
SHADOW = "Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name('distmm-{}').id).shadow_el"
DATA = MODEL + ".renderers[0].data_source.data"
READY = "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].get_model_by_name('distmm-{}') && true"


def connections(dask_scheduler: Scheduler) -> int:
    """Count the pages that are open in browsers."""
    applications = dask_scheduler.http_application.applications
    sessions = (app.get_sessions(path) for app in applications for path in app.app_paths)
    return sum(session.connection_count for each in sessions for session in each)


def address(client: Client, path: str) -> str:
    return client.dashboard_link.rsplit("/", 1)[0] + path


def shown(browser: Any, pane: str) -> None:
    """Wait until a pane shows a record and is drawn."""
    browser.until(READY.format(pane))
    browser.until(f"Array.from({DATA.format(pane)}.x).length > 0")
    browser.until("Bokeh.documents[0].is_idle")
