"""Named merging methods: each a short composition of subspace, metric and aggregator, and one registry row."""
