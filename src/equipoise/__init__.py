"""Equipoise: federated learning when the classes are not balanced."""

__version__ = "0.1.0"
