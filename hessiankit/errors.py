"""The one family of exceptions a user meets: each says what was asked, what was seen, what was expected, what to do."""

from __future__ import annotations


class HessiankitError(Exception):
    """Base class of every error that hessiankit raises on purpose."""


class InputError(HessiankitError, ValueError):
    """An argument cannot be used as it is: wrong shape, dtype, device, value or name."""


class TraceError(HessiankitError, RuntimeError):
    """The module could not be turned into a list of primitive operations."""


class OutOfMemoryError(HessiankitError, MemoryError):
    """The result, or the work space it needs, does not fit; said before anything is computed."""
