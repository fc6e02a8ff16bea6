"""Monitors that follow training: sharpness, norms, the top eigenvalue and depth diagnostics, a line of JSON a measurement."""

from hessiankit.diagnostics.monitoring.log import MonitorLog
from hessiankit.diagnostics.monitoring.monitor import Monitor

__all__ = ["Monitor", "MonitorLog"]
