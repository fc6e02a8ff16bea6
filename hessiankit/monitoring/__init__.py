"""Monitors that follow training: sharpness, norms, the top eigenvalue and depth diagnostics, a line of JSON a measurement."""

from hessiankit.monitoring.log import MonitorLog, read_monitor
from hessiankit.monitoring.monitor import Monitor
from hessiankit.monitoring.plots import plot_monitor

__all__ = ["Monitor", "MonitorLog", "plot_monitor", "read_monitor"]
