"""Data, networks, batches and labels: what measuring curvature and evaluating models share."""
