"""glyphs8: eight small image tasks and a small ViT, built from the fonts and images inside Python packages."""
