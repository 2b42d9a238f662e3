"""Tasks to judge merges by: the embedded suite, the paper's benchmark, your own; and the experiments on them."""
