"""What was measured, as one HTML page that stands alone: records in, no torch."""
