"""Tinker's routes, as its official client asks them: each module is one part of the protocol."""

from isobit.serve.tinker.routes import Tinker

__all__ = ["Tinker"]
