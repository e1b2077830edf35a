"""The version, in receipts and in the package's metadata."""

__version__ = "0.1.0"
