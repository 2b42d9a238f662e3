"""Run the jobs of a plan; every engine writes the same bytes."""
