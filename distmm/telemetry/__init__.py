"""Monitoring of products: events, records, the dashboard page, Prometheus series, progress lines and reports."""
