"""The page's sections, each from the records it is about."""
