"""One self-contained HTML page from run directories; imports no torch."""

from isobit.monitor.report.page import write_report

__all__ = ["write_report"]
