"""What these tests share."""

from tests.one_kind import one_kind_of_products

__all__ = ["one_kind_of_products"]
