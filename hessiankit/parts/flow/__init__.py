"""What the flow of data says about parameters: the model runs once, and no name is read."""

from hessiankit.parts.flow.findings import flow

__all__ = ["flow"]
