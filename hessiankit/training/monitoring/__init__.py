"""Monitors that follow training: sharpness, norms, the top eigenvalue and depth diagnostics, a line of JSON a measurement."""

from hessiankit.training.monitoring.log import MonitorLog
from hessiankit.training.monitoring.monitor import Monitor

__all__ = ["Monitor", "MonitorLog"]
