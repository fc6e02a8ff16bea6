"""Exact identities of gradient and Hessian that the structure of a module implies."""

from hessiankit.verify.identities.examination import examine_identities, identities
from hessiankit.verify.identities.gauge import gauge_dimension, rescaled
from hessiankit.verify.identities.report import IdentityReport, IdentityRow

__all__ = ["IdentityReport", "IdentityRow", "examine_identities", "gauge_dimension", "identities", "rescaled"]
