"""glyphs8: eight small image tasks and a small ViT, made on the spot from what ships inside Python packages."""
