"""Score models on tasks: a user's own suites, their statistics, and lm-eval."""
