"""The version of flashgen: the package's metadata, generated headers and the cache key all read it here."""

__version__ = "0.3.0"
